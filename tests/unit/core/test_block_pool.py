"""Block pool: states, reference counts, eviction order, and what its own checks catch."""

import pytest

from engine.core.block_pool import BlockPool


def fill(pool: BlockPool, *hashes: bytes) -> list[int]:
    """Allocate a block for each hash and register it."""
    blocks = pool.allocate(len(hashes))
    for block_id, block_hash in zip(blocks, hashes, strict=True):
        pool.cache(block_id, block_hash)
    return blocks


def states(pool: BlockPool) -> tuple[int, int, int]:
    """Used, cached-free and free blocks."""
    pool.check_integrity()
    cached_free = pool.num_cached_free_blocks
    return pool.num_used_blocks, cached_free, pool.num_free_blocks - cached_free


def test_a_block_goes_from_free_to_used_to_cached_free() -> None:
    pool = BlockPool(4)
    assert states(pool) == (0, 0, 4)
    blocks = fill(pool, b"a", b"b")
    assert states(pool) == (2, 0, 2)
    pool.release(blocks)
    assert states(pool) == (0, 2, 2)
    pool.check_idle()


def test_blocks_without_a_hash_go_out_first_then_the_least_recently_released() -> None:
    pool = BlockPool(4)
    a, b, c = fill(pool, b"a", b"b", b"c")
    pool.release([b])
    pool.release([a])
    (plain,) = pool.allocate(1)
    pool.release([c])
    pool.release([plain])
    assert pool.allocate(4) == [plain, b, a, c]
    assert pool.num_evictions == 3
    assert [pool.get_cached_block(h) for h in (b"a", b"b", b"c")] == [None, None, None]
    assert states(pool) == (4, 0, 0)


def test_a_touched_block_is_pulled_out_of_the_free_queue() -> None:
    pool = BlockPool(3)
    a, b = fill(pool, b"a", b"b")
    pool.release([a, b])
    assert pool.get_cached_block(b"a") == a
    pool.touch([a])
    assert states(pool) == (1, 1, 1)
    assert a not in pool.allocate(2)
    assert pool.num_evictions == 1


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(2)
    (a,) = fill(pool, b"a")
    pool.touch([a])
    pool.release([a])
    assert not pool.is_free(a)
    pool.release([a])
    assert pool.is_free(a)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([a])


def test_a_twin_does_not_replace_the_block_that_is_known() -> None:
    pool = BlockPool(4)
    (first,) = fill(pool, b"a")
    (second,) = fill(pool, b"a")
    assert pool.get_cached_block(b"a") == first
    pool.release([second])
    assert states(pool) == (1, 0, 3)
    pool.release([first])
    assert states(pool) == (0, 1, 3)


def test_without_caching_nothing_is_registered() -> None:
    pool = BlockPool(2, enable_caching=False)
    (a,) = fill(pool, b"a")
    assert pool.get_cached_block(b"a") is None
    pool.release([a])
    assert states(pool) == (0, 0, 2)


def test_reset_forgets_everything_but_only_when_idle() -> None:
    pool = BlockPool(3)
    a, b = fill(pool, b"a", b"b")
    pool.release([b])
    assert pool.reset_cache() is False
    assert pool.get_cached_block(b"b") == b
    pool.release([a])
    assert pool.reset_cache() is True
    assert states(pool) == (0, 0, 3)
    assert pool.get_cached_block(b"b") is None


def test_more_than_there_is_cannot_be_allocated() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="num_free_blocks"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="at least one block"):
        BlockPool(0)


def test_the_integrity_check_sees_each_kind_of_damage() -> None:
    def damaged(damage: str) -> BlockPool:
        pool = BlockPool(3)
        _, b = fill(pool, b"a", b"b")
        pool.release([b])
        pool.check_integrity()
        if damage == "lost block":
            del pool._free[b]
        elif damage == "free yet referenced":
            pool._ref_counts[b] = 1
        elif damage == "negative count":
            pool._ref_counts[b] = -1
        elif damage == "hash of another":
            pool._hashes[b] = b"x"
        else:
            pool._num_cached_used += 1
        return pool

    for damage in (
        "lost block",
        "free yet referenced",
        "negative count",
        "hash of another",
        "wrong count",
    ):
        with pytest.raises(AssertionError):
            damaged(damage).check_integrity()


def test_check_idle_sees_what_is_still_held() -> None:
    pool = BlockPool(2)
    pool.check_idle()
    pool.allocate(1)
    with pytest.raises(AssertionError, match="idle"):
        pool.check_idle()
