"""How the state of every KV block is written down, for whoever draws the pool."""

from typing import TypedDict

FREE = 0
CACHED_AGES_S = (1, 5, 30, 120, 600)
"""A cached free block unused for less than the first is 1, for less than the second 2, ..."""
SHARED = len(CACHED_AGES_S) + 2
"""Held by several requests."""
OWNED = SHARED + 1
"""Held by one: this plus its place among the owners."""


class BlockMap(TypedDict):
    """Every block's state at one instant."""

    codes: bytes
    """One unsigned 16-bit number a block, little-endian."""
    owners: list[int]
    """Numbers of the requests that hold blocks."""
    took_ns: int
    """What making it took."""
