"""The KV blocks: who is used, who is free, and which hold a prefix worth keeping.

A block is in exactly one of three states:

    used         referenced by at least one request
    cached-free  referenced by none, but its hash is known: a later request may take it back
    free         referenced by none, holds nothing

Free and cached-free blocks wait in one queue. Allocation takes from its front, where blocks
without a hash stand; cached ones follow in the order in which they were released (LRU), and
giving one out drops its hash (an eviction). Knows ids, counts and hashes; no request, no tensor.
Times are `BlockHistory`'s.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable

from engine.core.block_history import BlockHistory


class BlockPool:
    """Reference counts, the free queue and the map from hash to block."""

    def __init__(self, num_blocks: int, *, enable_caching: bool = True) -> None:
        assert num_blocks > 0, "a KV pool needs at least one block"
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.num_evictions = 0
        self.history = BlockHistory(num_blocks)
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        self._num_cached_used = 0
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached-free ones included."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that a request holds."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached_free_blocks(self) -> int:
        """Free blocks whose content can still be reused."""
        return len(self._block_of_hash) - self._num_cached_used

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """The block that holds this prefix, or None."""
        return self._block_of_hash.get(block_hash)

    def cached_blocks(self) -> Collection[int]:
        """Blocks whose content can be hit, used or free."""
        return self._block_of_hash.values()

    def is_free(self, block_id: int) -> bool:
        """Whether no request holds the block."""
        return self._ref_counts[block_id] == 0

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks from the front of the free queue, evicting what they cached."""
        assert num_blocks <= len(self._free), "allocate() without checking num_free_blocks"
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        history = self.history
        now_ns, allocated_ns = history.now_ns, history.allocated_ns
        for block_id in taken:
            self._ref_counts[block_id] = 1
            block_hash = self._hashes[block_id]
            if block_hash is not None:
                self._hashes[block_id] = None
                del self._block_of_hash[block_hash]
                self.num_evictions += 1
                history.evict(block_id, block_hash)
            allocated_ns[block_id] = now_ns
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to each block, pulling it out of the free queue."""
        history = self.history
        now_ns, used_ns, gaps_ns = history.now_ns, history.used_ns, history.reuse_gaps_ns
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
                self._num_cached_used += self._hashes[block_id] is not None
                gaps_ns.append(now_ns - used_ns[block_id])
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference to each block; the ones released first are evicted first."""
        now_ns, used_ns = self.history.now_ns, self.history.used_ns
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} released twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            self._free[block_id] = None
            if self._hashes[block_id] is None:
                self._free.move_to_end(block_id, last=False)
            else:
                self._num_cached_used -= 1
                used_ns[block_id] = now_ns

    def cache(self, block_id: int, block_hash: bytes) -> None:
        """Register a full, referenced block under its hash, unless a twin has it already."""
        assert self._ref_counts[block_id] > 0
        assert self._hashes[block_id] is None
        if self.enable_caching and block_hash not in self._block_of_hash:
            self._block_of_hash[block_hash] = block_id
            self._hashes[block_id] = block_hash
            self._num_cached_used += 1

    def reset_cache(self) -> bool:
        """Forget every hash, those evicted before included; False, and nothing done, while a
        request holds blocks."""
        if self.num_used_blocks:
            return False
        self._block_of_hash.clear()
        self._hashes = [None] * self.num_blocks
        self._num_cached_used = 0
        self.history.forget_evictions()
        return True

    def check_idle(self) -> None:
        """Assert that nothing is held and nothing was lost; cheap enough for every idle moment."""
        assert len(self._free) == self.num_blocks, "idle, yet blocks are in use"
        assert not any(self._ref_counts), "idle, yet a block is referenced"
        assert self._num_cached_used == 0
        assert len(self._block_of_hash) == self.num_blocks - self._hashes.count(None)

    def check_integrity(self) -> None:
        """Assert that counts, queue and hash map agree. Slow: for tests and debugging."""
        for block_id, count in enumerate(self._ref_counts):
            assert count >= 0
            assert (block_id in self._free) == (count == 0), f"block {block_id}: {count} references"
        hashed = {h: b for b, h in enumerate(self._hashes) if h is not None}
        assert hashed == self._block_of_hash, "hash map and block hashes disagree"
        used = sum(self._ref_counts[block_id] > 0 for block_id in hashed.values())
        assert used == self._num_cached_used, "cached-used count is wrong"
