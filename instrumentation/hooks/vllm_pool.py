"""vLLM's block pool: used, cached free and free blocks, kept count of.

Knows the pool's methods that take blocks and give them back. Does not know requests. vLLM itself
counts free blocks only; how many of them still hold something is counted here, at a cost for each
block that is moved, not for each that there is.
"""

import functools
from typing import Any

from instrumentation.hooks.fence import Fence, wrap


class PoolCounts:
    """Counts one pool's blocks, beginning while it is empty or at least idle."""

    def __init__(self, pool: Any, fence: Fence) -> None:
        self._pool = pool
        self._num_cached_free = sum(1 for block in pool.blocks if _is_cached_free(block))
        self._num_evicted = 0
        self._watch_free(pool, fence)
        wrap(pool, "touch", fence=fence, before=self._before_touch)
        wrap(
            pool,
            "_maybe_evict_cached_block",
            fence=fence,
            before=_is_cached_free,
            after=self._after_evict,
        )
        wrap(pool, "reset_prefix_cache", fence=fence, after=self._after_reset)

    def counts(self) -> tuple[int, int, int]:
        """Used, cached free and free blocks; together all that the pool can hand out."""
        pool = self._pool
        num_free = pool.get_num_free_blocks()
        cached_free = min(max(0, self._num_cached_free), num_free)
        # One block is the pool's own placeholder and never handed out.
        return pool.num_gpu_blocks - 1 - num_free, cached_free, num_free - cached_free

    def take_evictions(self) -> int:
        """Blocks evicted since the last call."""
        num_evicted, self._num_evicted = self._num_evicted, 0
        return num_evicted

    def _watch_free(self, pool: Any, fence: Fence) -> None:
        free_blocks = pool.free_blocks

        @functools.wraps(free_blocks)
        def free_and_count(ordered_blocks: Any) -> Any:
            # May be an iterator, which can be read only once.
            blocks = list(ordered_blocks)
            result = free_blocks(blocks)
            fence.call(self._after_free, blocks)
            return result

        pool.free_blocks = free_and_count

    def _after_free(self, blocks: list[Any]) -> None:
        distinct = {block.block_id: block for block in blocks if block.block_hash is not None}
        self._num_cached_free += sum(map(_is_cached_free, distinct.values()))

    def _before_touch(self, blocks: Any) -> None:
        self._num_cached_free -= sum(map(_is_cached_free, blocks))

    def _after_evict(self, was_cached_free: bool | None, is_evicted: bool, block: Any) -> None:
        if is_evicted:
            self._num_evicted += 1
            self._num_cached_free -= bool(was_cached_free)

    def _after_reset(self, begin: None, is_reset: bool) -> None:
        if is_reset:
            self._num_cached_free = 0


def _is_cached_free(block: Any) -> bool:
    return block.ref_cnt == 0 and block.block_hash is not None and not block.is_null
