"""The KV pool at one instant, block by block: who holds what, and what could still be hit.

Made when somebody asks, between two steps; costs nothing otherwise. Work is proportional to the
blocks in use and cached, with NumPy doing the most of it.
"""

import time
from collections.abc import Iterable

import numpy as np

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.types.block_map import CACHED_AGES_S, OWNED, SHARED, BlockMap


def block_map(kv_cache: KVCacheManager, requests: Iterable[Request], *, now_ns: int) -> BlockMap:
    """Every block's state, by its id; ages as of `now_ns`."""
    began_ns, pool = time.monotonic_ns(), kv_cache.pool
    codes = np.zeros(pool.num_blocks, dtype="<u2")  # [num_blocks]
    num_holders = np.zeros(pool.num_blocks, dtype=np.int32)  # [num_blocks]
    owners: list[int] = []
    for request in requests:
        held = kv_cache.block_ids(request)
        if held:
            block_ids = np.array(held)
            num_holders[block_ids] += 1
            codes[block_ids] = OWNED + len(owners)
            owners.append(request.num)
    codes[num_holders > 1] = SHARED
    cached_blocks = pool.cached_blocks()
    cached = np.fromiter(cached_blocks, dtype=np.int64, count=len(cached_blocks))
    cached = cached[num_holders[cached] == 0]  # [num_cached_free_blocks]
    used_ns = map(pool.history.used_ns.__getitem__, cached.tolist())
    ages_ns = now_ns - np.fromiter(used_ns, dtype=np.int64, count=len(cached))
    bounds_ns = np.array(CACHED_AGES_S, dtype=np.int64) * 10**9
    codes[cached] = 1 + np.searchsorted(bounds_ns, ages_ns, side="right")
    took_ns = time.monotonic_ns() - began_ns
    return BlockMap(codes=codes.tobytes(), owners=owners, took_ns=took_ns)
