"""KV cache manager: hits, slots, registration and release, case by case."""

import pytest

from engine.core.kv_cache_manager import KVCacheManager, PrefixHit
from instrumentation import PrefixMiss
from tests.fakes import make_request


def manager_with(prompt: list[int], *, num_blocks: int = 8, **fields: object) -> KVCacheManager:
    """A manager whose pool has seen one request that is gone."""
    manager = KVCacheManager(num_blocks, 4, enable_caching=True)
    request = make_request("seen", prompt, **fields)
    assert manager.allocate_slots(request, len(prompt)) is not None
    request.num_computed_tokens = len(prompt)
    manager.free(request)
    manager.check_idle()
    return manager


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (20, 12)]
)
def test_a_hit_leaves_at_least_one_token(num_tokens: int, expected: int) -> None:
    prompt = list(range(1, 21))
    manager = manager_with(prompt[:13])
    hit = manager.get_computed_blocks(make_request("new", prompt[:num_tokens]))
    assert hit.num_tokens == expected
    assert len(hit.block_ids) * 4 == expected


def test_a_hit_ends_at_the_first_difference() -> None:
    manager = manager_with([1] * 13)
    assert manager.get_computed_blocks(make_request("a", [1] * 7 + [2] * 6)).num_tokens == 4
    assert manager.get_computed_blocks(make_request("b", [2] + [1] * 12)).num_tokens == 0


def test_prompt_logprobs_need_the_whole_prompt_once() -> None:
    manager = manager_with([1] * 13)
    request = make_request("new", [1] * 13, prompt_logprobs=1)
    assert manager.get_computed_blocks(request) == PrefixHit([], 0, PrefixMiss.DISABLED)
    request.append_output([5])  # the prompt is done: after a preemption its cache may be used
    assert manager.get_computed_blocks(request).num_tokens == 12


def test_without_caching_there_are_no_hits() -> None:
    manager = KVCacheManager(8, 4, enable_caching=False)
    request = make_request("a", [1] * 8)
    assert manager.allocate_slots(request, 8) is not None
    hit = manager.get_computed_blocks(make_request("b", [1] * 9))
    assert hit == PrefixHit([], 0, PrefixMiss.DISABLED)


def test_a_table_grows_only_at_block_borders() -> None:
    manager = KVCacheManager(8, 4, enable_caching=True)
    request = make_request("a", [1, 2, 3], ignore_eos=True)
    sizes = []
    for num_new in (3, 1, 1, 1, 1, 1, 1):
        added = manager.allocate_slots(request, num_new)
        assert added is not None
        request.num_computed_tokens += num_new
        request.append_output([1])
        sizes.append(len(manager.block_ids(request)))
    assert sizes == [1, 1, 2, 2, 2, 2, 3]


def test_a_refusal_changes_nothing() -> None:
    manager = KVCacheManager(4, 4, enable_caching=True)
    holder, late = make_request("a", [1] * 12), make_request("b", [2] * 8)
    manager.allocate_slots(holder, 12)
    assert manager.allocate_slots(late, 8) is None
    assert manager.block_ids(late) == []
    assert manager.pool.num_free_blocks == 1
    manager.check_integrity()
    assert manager.allocate_slots(late, 4) is not None


def test_hit_blocks_that_are_free_count_as_needed() -> None:
    manager = manager_with([1] * 8, num_blocks=3)
    other = make_request("other", [3] * 4)
    manager.allocate_slots(other, 4)
    request = make_request("new", [1] * 9)
    hit = manager.get_computed_blocks(request)
    assert hit.num_tokens == 8
    # Two blocks are free, and both are the hit: there is none for the ninth token.
    assert manager.allocate_slots(request, 1, hit=hit) is None
    manager.free(other)
    assert manager.allocate_slots(request, 1, hit=hit) is not None


def test_a_block_that_somebody_holds_is_shared_for_nothing() -> None:
    manager = KVCacheManager(4, 4, enable_caching=True)
    first, second = make_request("a", [1] * 9), make_request("b", [1] * 9)
    manager.allocate_slots(first, 9)
    hit = manager.get_computed_blocks(second)
    assert manager.allocate_slots(second, 1, hit=hit) is not None
    assert manager.block_ids(second)[:2] == manager.block_ids(first)[:2]
    assert manager.pool.num_used_blocks == 4
    manager.free(first)
    assert manager.pool.num_used_blocks == 3
    manager.free(second)
    manager.check_idle()


def test_the_tail_of_a_request_is_evicted_first() -> None:
    prompt = list(range(1, 18))
    manager = manager_with(prompt, num_blocks=5)
    other = make_request("other", [99] * 8)
    manager.allocate_slots(other, 8)
    # Its partial block went first, then the last full one: the front of the prefix still hits.
    assert manager.get_computed_blocks(make_request("new", prompt)).num_tokens == 12


def test_tokens_that_are_not_known_yet_are_registered_later() -> None:
    manager = KVCacheManager(4, 4, enable_caching=True)
    request = make_request("a", [1, 2, 3], ignore_eos=True)
    manager.allocate_slots(request, 3)
    request.num_computed_tokens = 3
    # The fourth token is computed by a step that was planned before anybody knew it.
    manager.allocate_slots(request, 1)
    request.num_computed_tokens = 4
    probe = make_request("probe", [1, 2, 3, 7, 7])
    assert manager.get_computed_blocks(probe).num_tokens == 0
    request.append_output([7])
    manager.allocate_slots(request, 1)
    assert manager.get_computed_blocks(probe).num_tokens == 4


def test_the_integrity_check_sees_a_lost_table() -> None:
    manager = KVCacheManager(8, 4, enable_caching=True)
    request = make_request("a", [1] * 8)
    manager.allocate_slots(request, 8)
    manager.check_integrity()
    with pytest.raises(AssertionError, match="idle"):
        manager.check_idle()
    del manager._tables["a"]
    with pytest.raises(AssertionError, match="no table"):
        manager.check_integrity()
