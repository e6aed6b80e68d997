"""Block hashes: equal hash, equal prefix; the salt separates; each block is hashed once."""

import random

import hypothesis.strategies as st
from hypothesis import given, settings

from engine.core.block_hash import BlockHasher, hash_block_tokens

token_lists = st.lists(st.integers(0, 3), max_size=24)
salts = st.sampled_from((None, "a", "b", "ab"))


def hashes_of(token_ids: list[int], salt: str | None = None, block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    BlockHasher(block_size).extend(hashes, token_ids, salt)
    return hashes


@settings(max_examples=200, deadline=None)
@given(one=token_lists, other=token_lists, salt=salts, other_salt=salts)
def test_equal_prefix_if_and_only_if_equal_hash(
    one: list[int], other: list[int], salt: str | None, other_salt: str | None
) -> None:
    pairs = zip(hashes_of(one, salt), hashes_of(other, other_salt), strict=False)
    for index, (mine, others) in enumerate(pairs):
        end = 4 * (index + 1)
        assert (mine == others) == (one[:end] == other[:end] and salt == other_salt)


@settings(max_examples=100, deadline=None)
@given(token_ids=token_lists, cuts=st.lists(st.integers(0, 24), max_size=5), salt=salts)
def test_growing_piece_by_piece_gives_the_same_chain(
    token_ids: list[int], cuts: list[int], salt: str | None
) -> None:
    hasher, hashes = BlockHasher(4), []  # type: ignore[var-annotated]
    for end in [*sorted(cuts), len(token_ids)]:
        hasher.extend(hashes, token_ids[:end], salt)
        assert len(hashes) == len(token_ids[:end]) // 4
    assert hashes == hashes_of(token_ids, salt)


def test_only_full_blocks_have_a_hash() -> None:
    lengths = [len(hashes_of([1] * n)) for n in range(10)]
    assert lengths == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_the_same_block_at_another_place_has_another_hash() -> None:
    first, second, third = hashes_of([5, 6, 7, 8] * 3)
    assert len({first, second, third}) == 3


def test_large_and_many_tokens_do_not_collide() -> None:
    rng = random.Random(7)
    blocks = {tuple(rng.randrange(2**31) for _ in range(16)) for _ in range(2_000)}
    # Neighbours that differ in one bit, and ids that agree in their low bytes.
    base = tuple(range(16))
    blocks |= {
        (*base[:i], base[i] ^ (1 << bit), *base[i + 1 :]) for i in range(16) for bit in (0, 8, 30)
    }
    hashes = {hash_block_tokens(None, list(block)) for block in blocks}
    assert len(hashes) == len(blocks)


def test_the_salt_is_no_token_and_no_parent() -> None:
    plain = hash_block_tokens(None, [1, 2])
    assert hash_block_tokens(None, [1, 2], b"s") != plain
    assert hash_block_tokens(plain, [1, 2]) != plain
    assert hash_block_tokens(b"s", [1, 2]) != hash_block_tokens(None, [1, 2], b"s")
