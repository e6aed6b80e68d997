"""Which blocks each request holds, and which prefix of it is already there.

Region map of one request while a step is planned (half-open, in tokens):

    [0, hit)                 found in the prefix cache: blocks shared, nothing to compute
    [hit, computed)          computed by earlier steps
    [computed, computed+new) to be computed by this step: slots must exist
    [.., num_blocks * size)  rest of the last block

Knows requests and the pool; knows no budget and no queue.
"""

from typing import NamedTuple

from engine.core.block_pool import BlockPool
from engine.core.request import Request
from instrumentation import PrefixMiss


class PrefixHit(NamedTuple):
    """The longest cached prefix of a request, and why there is no more of it."""

    block_ids: list[int]
    num_tokens: int
    miss: PrefixMiss
    evicted_age_ns: int = -1
    """How long ago the first block that is missing was evicted, where it was."""


class KVCacheManager:
    """Block tables of all requests, over one `BlockPool`."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_caching: bool) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.pool = BlockPool(num_blocks, enable_caching=enable_caching)
        self._tables: dict[str, list[int]] = {}
        self._num_registered: dict[str, int] = {}

    def set_time(self, now_ns: int) -> None:
        """Say what time it is, once for all blocks that are taken, hit or released from now on."""
        self.pool.history.now_ns = now_ns

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """Find the longest cached prefix, at most num_tokens - 1 tokens of it.

        One token is always left to compute, since its logits are needed. A request that wants
        prompt logprobs computes its whole prompt: for it, caching is as good as disabled.
        """
        if not self.enable_caching or self._wants_whole_prompt(request):
            return PrefixHit([], 0, PrefixMiss.DISABLED)
        most = (request.num_tokens - 1) // self.block_size
        found: list[int] = []
        for block_hash in request.block_hashes[:most]:
            block_id = self.pool.get_cached_block(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        num_tokens = len(found) * self.block_size
        if len(found) == most:
            miss = PrefixMiss.NONE if most else PrefixMiss.PARTIAL_BLOCK
            return PrefixHit(found, num_tokens, miss)
        age_ns = self.pool.history.evicted_age_ns(request.block_hashes[len(found)])
        if age_ns is None:
            return PrefixHit(found, num_tokens, PrefixMiss.NEVER_CACHED)
        return PrefixHit(found, num_tokens, PrefixMiss.EVICTED, age_ns)

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *, hit: PrefixHit | None = None
    ) -> list[int] | None:
        """Give the request the blocks that its next tokens need.

        Args:
            request: `num_computed_tokens` must not include `num_new_tokens`, nor the hit.
            num_new_tokens: tokens that the step will compute.
            hit: the cached prefix to take over, when the request is being admitted.

        Returns:
            Ids of the blocks added to its table, the hit's first; None (and nothing changed)
            when the pool has too few.
        """
        hit_blocks = hit.block_ids if hit else []
        num_computed = request.num_computed_tokens + (hit.num_tokens if hit else 0)
        table = self._tables.get(request.request_id, [])
        num_needed = -(-(num_computed + num_new_tokens) // self.block_size)
        num_fresh = num_needed - len(table) - len(hit_blocks)
        num_revived = sum(map(self.pool.is_free, hit_blocks))
        if num_fresh + num_revived > self.pool.num_free_blocks:
            return None
        self.pool.touch(hit_blocks)
        added = hit_blocks + self.pool.allocate(max(0, num_fresh))
        table = self._tables.setdefault(request.request_id, table)
        table.extend(added)
        if hit_blocks:
            self._num_registered[request.request_id] = len(hit_blocks)
        self._register_full_blocks(request, num_computed + num_new_tokens)
        return added

    def free(self, request: Request) -> int:
        """Release all blocks of a request, its tail first in line for eviction.

        Returns:
            How many blocks it held.
        """
        table = self._tables.pop(request.request_id, [])
        self._num_registered.pop(request.request_id, None)
        self.pool.release(reversed(table))
        return len(table)

    def block_ids(self, request: Request) -> list[int]:
        """The request's block table, in order."""
        return self._tables.get(request.request_id, [])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while any request holds blocks."""
        return self.pool.reset_cache()

    def check_idle(self) -> None:
        """Assert that no request holds anything."""
        assert not self._tables, "idle, yet a block table is left"
        assert not self._num_registered
        self.pool.check_idle()

    def check_integrity(self) -> None:
        """Assert that tables and reference counts agree."""
        self.pool.check_integrity()
        held = {block_id for table in self._tables.values() for block_id in table}
        assert len(held) == self.pool.num_used_blocks, "a block is used by no table"

    def _register_full_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the blocks that this step completes, as far as their tokens are known.

        They may be hit before the worker has filled them: it runs steps in order, and within a
        step each layer writes all keys and values before any row reads them.
        """
        if not self.enable_caching:
            return
        num_full = min(num_computed_tokens // self.block_size, len(request.block_hashes))
        registered = self._num_registered.get(request.request_id, 0)
        table = self._tables[request.request_id]
        for index in range(registered, num_full):
            self.pool.cache(table[index], request.block_hashes[index])
        self._num_registered[request.request_id] = max(registered, num_full)

    @staticmethod
    def _wants_whole_prompt(request: Request) -> bool:
        return request.sampling_params.prompt_logprobs is not None and not request.num_output_tokens
