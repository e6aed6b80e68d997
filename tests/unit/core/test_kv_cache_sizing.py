"""From bytes to blocks, and the context length that they allow."""

import dataclasses
import logging

import pytest

from engine.core.kv_cache_sizing import KVCacheSize, size_kv_cache
from engine.errors import ConfigError
from engine.types.kv_cache import KVCacheSpec

SPEC = KVCacheSpec(
    block_size=16, num_layers=2, num_kv_heads=(3, 1), head_dim=(64, 32), element_bytes=2
)


def size(**changes: object) -> KVCacheSize:
    arguments = {"available_bytes": 10**9, "num_blocks_override": None, "max_model_len": 1_000}
    return size_kv_cache(SPEC, **(arguments | changes))  # type: ignore[arg-type]


def test_a_block_costs_keys_and_values_of_every_layer() -> None:
    per_token = 2 * (3 * 64 + 1 * 32) * 2
    assert SPEC.block_bytes == 16 * per_token


def test_all_that_fits_is_used_and_nothing_more() -> None:
    for spare in (0, 1, SPEC.block_bytes - 1):
        got = size(available_bytes=100 * SPEC.block_bytes + spare, max_model_len=500)
        assert got == KVCacheSize(100, 100 * SPEC.block_bytes, 500)


def test_an_override_beats_the_budget() -> None:
    assert size(available_bytes=0, num_blocks_override=70).num_blocks == 70


def test_the_context_is_reduced_to_the_pool_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="isinglass"):
        got = size(num_blocks_override=10, max_model_len=161)
    assert got.max_model_len == 160
    assert "from 161 to 160" in caplog.text
    assert "Raise num_gpu_blocks_override to keep it" in caplog.text
    caplog.clear()
    assert size(available_bytes=10 * SPEC.block_bytes, max_model_len=161).max_model_len == 160
    assert "Raise gpu_memory_utilization or kv_cache_memory_bytes to keep it" in caplog.text
    caplog.clear()
    assert size(num_blocks_override=10, max_model_len=160).max_model_len == 160
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_pool_of_one_token_serves_nobody_and_one_of_two_somebody() -> None:
    one = dataclasses.replace(SPEC, block_size=1)
    with pytest.raises(ConfigError, match=r"no request can ever run.*num_gpu_blocks_override"):
        size_kv_cache(one, available_bytes=10**9, num_blocks_override=1, max_model_len=9)
    for spec, num_blocks in ((one, 2), (dataclasses.replace(SPEC, block_size=2), 1)):
        got = size_kv_cache(
            spec, available_bytes=10**9, num_blocks_override=num_blocks, max_model_len=9
        )
        assert got.max_model_len == 2


@pytest.mark.parametrize("available_bytes", [0, -5, SPEC.block_bytes - 1])
def test_no_room_is_an_error_that_says_what_to_do(available_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"no room.*gpu_memory_utilization"):
        size(available_bytes=available_bytes)
