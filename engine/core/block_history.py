"""When blocks were taken, last used and given up: the times behind the pool's counts.

Knows block ids, hashes and the one time it was told; reads no clock, so that no block costs a
clock call. Decides nothing: the pool works the same without it.
"""

from collections import OrderedDict
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")

SAMPLE_SIZE = 64
"""Most times of each kind that a step's record gets."""

_MIN_GHOSTS, _MAX_GHOSTS, _GHOSTS_PER_BLOCK = 1 << 10, 1 << 17, 4


class BlockTimes(NamedTuple):
    """What happened to blocks since the last taking, at most `SAMPLE_SIZE` each.

    Of more there is an even sample, every n-th in the order of events, so that it is not all of
    the blocks that were unused for longest.
    """

    evicted_lifetimes_ns: tuple[int, ...]
    evicted_idle_ns: tuple[int, ...]
    """Of the same blocks."""
    reuse_gaps_ns: tuple[int, ...]


_NOTHING = BlockTimes((), (), ())


class BlockHistory:
    """Stamps of every block, and a bounded list of ghosts: hashes that were evicted, and when.

    `now_ns` is set by whoever drives the pool, once a step. The pool writes the stamps in place.
    A ghost outlives the return of its hash to the pool, where nobody asks for it; it is renewed
    when the hash is evicted again. The oldest ghosts are dropped, so an eviction long ago may
    look as if it had never been.
    """

    __slots__ = (
        "_evicted",
        "_ghosts",
        "_max_ghosts",
        "allocated_ns",
        "now_ns",
        "reuse_gaps_ns",
        "used_ns",
    )

    def __init__(self, num_blocks: int) -> None:
        self.now_ns = 0
        self.allocated_ns = [0] * num_blocks
        self.used_ns = [0] * num_blocks
        """When the last request let go of the block, while it is free and cached."""
        self.reuse_gaps_ns: list[int] = []
        """From the last use to being hit again, since the last taking."""
        self._evicted: list[tuple[int, int]] = []
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()
        self._max_ghosts = min(_MAX_GHOSTS, max(_MIN_GHOSTS, _GHOSTS_PER_BLOCK * num_blocks))

    def evict(self, block_id: int, block_hash: bytes) -> None:
        """A cached free block is given out again; call it before the block is stamped anew."""
        now_ns, ghosts = self.now_ns, self._ghosts
        self._evicted.append(
            (now_ns - self.allocated_ns[block_id], now_ns - self.used_ns[block_id])
        )
        ghosts[block_hash] = now_ns
        ghosts.move_to_end(block_hash)
        if len(ghosts) > self._max_ghosts:
            ghosts.popitem(last=False)

    def evicted_age_ns(self, block_hash: bytes) -> int | None:
        """How long ago a hash that the pool lacks was evicted; None if it never was, it seems."""
        evicted_ns = self._ghosts.get(block_hash)
        return None if evicted_ns is None else self.now_ns - evicted_ns

    def take(self) -> BlockTimes:
        """What has happened since the last call."""
        if not self._evicted and not self.reuse_gaps_ns:
            return _NOTHING
        evicted, gaps = _sample(self._evicted), _sample(self.reuse_gaps_ns)
        self._evicted, self.reuse_gaps_ns = [], []
        return BlockTimes(
            tuple([lifetime_ns for lifetime_ns, _ in evicted]),
            tuple([idle_ns for _, idle_ns in evicted]),
            tuple(gaps),
        )

    def forget_evictions(self) -> None:
        """Drop all ghosts: what the cache forgets on request was not lost for want of room."""
        self._ghosts.clear()


def _sample(values: list[_T]) -> list[_T]:
    return values[:: -(-len(values) // SAMPLE_SIZE) or 1]
