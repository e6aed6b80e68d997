"""The native attention against the reference, on random batches whose unused memory is NaN."""

import numpy as np
import pytest
import torch

from engine.attention.base import AttentionShape
from engine.attention.native import NativeAttentionBackend, unsupported_shape
from tests.support.attention_batches import CPU, assert_equals_reference, make_layout
from tests.support.native_support import needs_native

pytestmark = [needs_native, pytest.mark.usefixtures("several_threads")]


def compare(
    query_lens: list[int],
    seq_lens: list[int],
    shape: AttentionShape,
    *,
    block_size: int,
    seed: int,
    spread: float = 1.0,
) -> None:
    layout, num_blocks = make_layout(query_lens, seq_lens, block_size, np.random.default_rng(seed))
    assert_equals_reference(
        "native", layout, num_blocks, shape, torch.bfloat16, seed=seed, spread=spread
    )


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_reference_on_random_batches(seed: int) -> None:
    generator = np.random.default_rng(seed)
    query_lens, seq_lens = [], []
    for _ in range(generator.integers(1, 7)):
        kind = generator.integers(3)
        num_cached = 0 if kind == 1 else int(generator.integers(0, 300))
        query_lens.append(1 if kind == 0 else int(generator.integers(1, 150)))
        seq_lens.append(num_cached + query_lens[-1])
    kv_heads, group_size = int(generator.integers(1, 4)), int(generator.integers(1, 8))
    head_dim = int(generator.choice([32, 64, 96, 128]))
    for window in (None, int(generator.integers(1, 200))):
        shape = AttentionShape(kv_heads * group_size, kv_heads, head_dim, head_dim**-0.5, window)
        block_size = int(generator.choice([16, 32, 48]))
        compare(query_lens, seq_lens, shape, block_size=block_size, seed=seed)


@pytest.mark.parametrize("chunk", [1, 17, 64, 1000])
@pytest.mark.parametrize("window", [None, 100])
def test_chunks_of_a_prompt(chunk: int, window: int | None) -> None:
    shape = AttentionShape(6, 2, 64, 0.125, window)
    compare([chunk], [chunk + 333], shape, block_size=16, seed=chunk)


@pytest.mark.parametrize("head_dim", [32, 256])
@pytest.mark.parametrize("group_size", [1, 20, 192])
def test_the_most_rows_and_the_largest_heads(group_size: int, head_dim: int) -> None:
    shape = AttentionShape(group_size, 1, head_dim, head_dim**-0.5, None)
    compare([40, 1], [140, 33], shape, block_size=16, seed=1)


@pytest.mark.parametrize("spread", [0.0, 30.0, 400.0])
def test_scores_that_are_large_small_or_all_alike(spread: float) -> None:
    """Scores of hundreds, whose largest rises by far more than the slack from chunk to chunk."""
    shape = AttentionShape(3, 1, 64, 0.125, None)
    compare([200, 1], [900, 700], shape, block_size=16, seed=2, spread=spread)


def test_all_scores_far_below_zero() -> None:
    """exp(score) is zero for each of them: only relative to their largest do they count."""
    shape, size = AttentionShape(1, 1, 32, 1.0, None), 32
    layout, num_blocks = make_layout([300], [300], 16, np.random.default_rng(0))
    qkv = torch.randn(300, 3 * size, generator=torch.Generator().manual_seed(0))
    qkv[:, :size], qkv[:, size : 2 * size] = 10.0, -10.0
    backend = NativeAttentionBackend()
    cache = torch.empty(backend.kv_cache_shape(num_blocks, 16, 1, size), dtype=torch.bfloat16)
    output = backend.forward(qkv.bfloat16(), cache, backend.build_metadata(layout, CPU), shape)
    counts = torch.arange(1, 301)[:, None]
    expected = qkv[:, 2 * size :].bfloat16().float().cumsum(0) / counts
    torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2)


def test_what_it_does_not_cover_is_said() -> None:
    assert unsupported_shape(9, 3, 64, 16) is None
    assert "head_dim 48" in (unsupported_shape(9, 3, 48, 16) or "")
    assert "head_dim 288" in (unsupported_shape(9, 3, 288, 16) or "")
    assert "block_size 8" in (unsupported_shape(9, 3, 64, 8) or "")
    assert "193 query heads" in (unsupported_shape(193, 1, 64, 16) or "")
