"""Random histories of the block pool against a plain model of it."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.block_pool import BlockPool


class BlockPoolHistory(RuleBasedStateMachine):
    """A list of counts, a list of hashes and a list of free blocks, each searched naively."""

    @initialize(num_blocks=st.integers(1, 8), enable_caching=st.booleans())
    def start(self, num_blocks: int, enable_caching: bool) -> None:
        self.pool = BlockPool(num_blocks, enable_caching=enable_caching)
        self.caching = enable_caching
        self.counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.free = list(range(num_blocks))
        self.evictions = 0

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        num_blocks = data.draw(st.integers(0, len(self.free)))
        taken = self.pool.allocate(num_blocks)
        assert taken == self.free[:num_blocks]
        del self.free[:num_blocks]
        for block_id in taken:
            assert self.counts[block_id] == 0, "a block that somebody holds was given out"
            self.counts[block_id] = 1
            self.evictions += self.hashes[block_id] is not None
            self.hashes[block_id] = None

    def _held(self) -> list[int]:
        return [block_id for block_id, count in enumerate(self.counts) if count]

    @precondition(lambda self: any(self.counts))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self._held()), unique=True))
        self.pool.release(blocks)
        for block_id in blocks:
            self.counts[block_id] -= 1
            if self.counts[block_id] == 0:
                self.free.insert(len(self.free) if self.hashes[block_id] else 0, block_id)

    @precondition(lambda self: any(self.counts))
    @rule(data=st.data(), block_hash=st.sampled_from((b"a", b"b", b"c", b"d")))
    def cache(self, data: st.DataObject, block_hash: bytes) -> None:
        candidates = [block_id for block_id in self._held() if self.hashes[block_id] is None]
        if not candidates:
            return
        block_id = data.draw(st.sampled_from(candidates))
        self.pool.cache(block_id, block_hash)
        if self.caching and block_hash not in self.hashes:
            self.hashes[block_id] = block_hash

    @precondition(lambda self: any(self.hashes))
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        known = [block_id for block_id, block_hash in enumerate(self.hashes) if block_hash]
        block_id = data.draw(st.sampled_from(known))
        self.pool.touch([block_id])
        if self.counts[block_id] == 0:
            self.free.remove(block_id)
        self.counts[block_id] += 1

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_cache() == (not any(self.counts))
        if not any(self.counts):
            self.hashes = [None] * len(self.hashes)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check_integrity()
        cached_free = sum(
            block_hash is not None and count == 0
            for block_hash, count in zip(self.hashes, self.counts, strict=True)
        )
        assert pool.num_free_blocks == len(self.free)
        assert pool.num_used_blocks == len(self._held())
        assert pool.num_cached_free_blocks == cached_free
        assert pool.num_evictions == self.evictions
        for block_hash in (b"a", b"b", b"c", b"d"):
            owner = self.hashes.index(block_hash) if block_hash in self.hashes else None
            assert pool.get_cached_block(block_hash) == owner
        assert [pool.is_free(b) for b in range(len(self.counts))] == [c == 0 for c in self.counts]
        if not any(self.counts):
            pool.check_idle()


TestBlockPoolHistory = BlockPoolHistory.TestCase
TestBlockPoolHistory.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
