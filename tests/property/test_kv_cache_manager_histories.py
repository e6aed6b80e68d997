"""Random histories of the KV cache manager: tables, sharing, hits and what the pool keeps."""

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from tests.fakes import make_request, sampling_params

BLOCK_SIZE = 2
PARAMS = sampling_params(max_tokens=None)


@dataclass(slots=True)
class Held:
    """A request that has been admitted."""

    request: Request
    table: list[int]


class KVCacheManagerHistory(RuleBasedStateMachine):
    """Admits, grows, preempts and frees requests without a scheduler."""

    @initialize(num_blocks=st.integers(2, 10), enable_caching=st.booleans())
    def start(self, num_blocks: int, enable_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.caching = enable_caching
        self.manager = KVCacheManager(num_blocks, BLOCK_SIZE, enable_caching=enable_caching)
        self.held: dict[str, Held] = {}
        self.contents: dict[int, tuple[object, ...]] = {}
        """What each block was filled with last: salt and the whole prefix."""
        self.num = 0

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=12),
        salt=st.sampled_from((None, "a")),
        data=st.data(),
    )
    def admit(self, prompt: list[int], salt: str | None, data: st.DataObject) -> None:
        request = make_request(
            f"r{self.num}",
            prompt,
            block_size=BLOCK_SIZE if self.caching else None,
            cache_salt=salt,
            params=PARAMS,
        )
        self.num += 1
        manager, pool = self.manager, self.manager.pool
        hit = manager.get_computed_blocks(request)
        assert hit.num_tokens == len(hit.block_ids) * BLOCK_SIZE < len(prompt)
        assert self.caching or not hit.block_ids
        for index, block_id in enumerate(hit.block_ids):
            end = (index + 1) * BLOCK_SIZE
            assert self.contents[block_id] == (salt, *prompt[:end]), "a hit on other contents"
        # The hit is the longest one: the next block is not known to the pool.
        if self.caching and len(hit.block_ids) < (len(prompt) - 1) // BLOCK_SIZE:
            assert pool.get_cached_block(request.block_hashes[len(hit.block_ids)]) is None
        num_new = data.draw(st.integers(1, len(prompt) - hit.num_tokens))
        needed = -(-(hit.num_tokens + num_new) // BLOCK_SIZE)
        missing = needed - sum(not pool.is_free(block_id) for block_id in hit.block_ids)
        num_free = pool.num_free_blocks
        added = manager.allocate_slots(request, num_new, hit=hit)
        if missing > num_free:
            assert added is None
            assert pool.num_free_blocks == num_free, "a refusal must change nothing"
            assert manager.block_ids(request) == []
            return
        assert added is not None
        assert added[: len(hit.block_ids)] == hit.block_ids
        assert len(added) == needed
        assert pool.num_free_blocks == num_free - missing
        self.held[request.request_id] = Held(request, added)
        self._fill(request, hit.num_tokens, num_new)

    def _fill(self, request: Request, begin: int, num_new: int) -> None:
        """The step runs: its tokens are in their blocks."""
        request.num_computed_tokens = begin + num_new
        table = self.manager.block_ids(request)
        for index in range(begin // BLOCK_SIZE, -(-(begin + num_new) // BLOCK_SIZE)):
            end = min(begin + num_new, (index + 1) * BLOCK_SIZE)
            self.contents[table[index]] = (request.cache_salt, *request.all_token_ids[:end])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token_id=st.integers(1, 2))
    def grow(self, data: st.DataObject, token_id: int) -> None:
        held = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        request, manager, pool = held.request, self.manager, self.manager.pool
        if request.num_computed_tokens == request.num_tokens:
            request.append_output([token_id])
        num_new = data.draw(st.integers(1, request.num_tokens - request.num_computed_tokens))
        needed = -(-(request.num_computed_tokens + num_new) // BLOCK_SIZE) - len(held.table)
        num_free = pool.num_free_blocks
        added = manager.allocate_slots(request, num_new)
        if needed > num_free:
            assert added is None
            assert manager.block_ids(request) == held.table
            return
        assert added is not None
        assert len(added) == needed
        held.table = held.table + added
        self._fill(request, request.num_computed_tokens, num_new)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self._free(self.held[data.draw(st.sampled_from(sorted(self.held)))])

    def _free(self, held: Held) -> None:
        assert self.manager.free(held.request) == len(held.table)
        assert self.manager.free(held.request) == 0
        del self.held[held.request.request_id]

    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() == (not self.held)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, pool = self.manager, self.manager.pool
        manager.check_integrity()
        counts = [0] * self.num_blocks
        for held in self.held.values():
            assert manager.block_ids(held.request) == held.table
            assert len(held.table) * BLOCK_SIZE >= held.request.num_computed_tokens
            for block_id in held.table:
                counts[block_id] += 1
        assert counts == pool._ref_counts
        cached_free = pool.num_cached_free_blocks
        free = pool.num_free_blocks - cached_free
        assert pool.num_used_blocks + cached_free + free == self.num_blocks
        assert min(cached_free, free) >= 0
        if not self.held:
            manager.check_idle()


TestKVCacheManagerHistory = KVCacheManagerHistory.TestCase
TestKVCacheManagerHistory.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None
)
