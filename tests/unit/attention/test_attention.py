"""The CPU attention backend against the reference on random batches, and the interface's edges."""

import numpy as np
import pytest
import torch

from engine.attention import cpu
from engine.attention.base import AttentionShape
from engine.attention.forward_context import forward_context, get_forward_context
from engine.attention.registry import attention_backend_names, select_backend
from engine.errors import ConfigError
from tests.support.attention_batches import CPU, assert_equals_reference, make_layout

pytestmark = pytest.mark.usefixtures("several_threads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(25))
def test_cpu_equals_reference_on_random_batches(
    seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is, with equal odds, one new token, a fresh prompt, or a chunk behind others."""
    monkeypatch.setattr(cpu, "MIN_MERGE_TOKENS", 24)  # so that small chunks take that way too
    monkeypatch.setattr(cpu, "MAX_GROUP_TOKENS", 256)
    monkeypatch.setattr(cpu, "FREE_PADDING_TOKENS", 4)
    generator = np.random.default_rng(seed)
    query_lens, seq_lens = [], []
    for _ in range(generator.integers(1, 9)):
        kind = generator.integers(3)
        num_cached = 0 if kind == 1 else int(generator.integers(0, 90))
        query_lens.append(1 if kind == 0 else int(generator.integers(1, 50)))
        seq_lens.append(num_cached + query_lens[-1])
    kv_heads, group_size = int(generator.integers(1, 4)), int(generator.integers(1, 4))
    head_dim = int(generator.choice([16, 40, 64]))
    for window in (None, int(generator.integers(1, 60))):
        shape = AttentionShape(kv_heads * group_size, kv_heads, head_dim, 0.2, window)
        block_size = int(generator.choice([1, 4, 16]))
        layout, num_blocks = make_layout(query_lens, seq_lens, block_size, generator)
        assert_equals_reference("cpu", layout, num_blocks, shape, dtype, seed=seed)


def test_one_step_serves_layers_of_several_windows() -> None:
    generator = np.random.default_rng(5)
    layout, num_blocks = make_layout([1, 12, 1], [30, 40, 7], 4, generator)
    backend = select_backend("cpu", CPU)
    metadata = backend.build_metadata(layout, CPU)
    reference = select_backend("torch_reference", CPU)
    for window in (None, 8, None, 16):
        shape = AttentionShape(4, 2, 16, 0.25, window)
        qkv = torch.randn(14, 8 * 16, generator=torch.Generator().manual_seed(1))
        cache = torch.randn(num_blocks, 4, 64, generator=torch.Generator().manual_seed(2))
        expected = reference.forward(
            qkv,
            cache.clone().view(num_blocks, 4, 2, 2, 16),
            reference.build_metadata(layout, CPU),
            shape,
        )
        torch.testing.assert_close(backend.forward(qkv, cache, metadata, shape), expected)


def num_blocks(group: cpu.DecodeGroup) -> int:
    if isinstance(group.blocks, slice):
        return group.blocks.stop - group.blocks.start
    return len(group.blocks)


def test_groups_of_similar_rows_waste_little() -> None:
    """A row of 8000 tokens among sixty of about 100 must not stretch them all to 8000."""
    generator = np.random.default_rng(0)
    seq_lens = [*generator.integers(60, 140, 60).tolist(), 8000]
    layout, _ = make_layout([1] * 61, seq_lens, 16, generator)
    plan = cpu.make_plan(layout, None)
    gathered = sum(num_blocks(group) * 16 for group in plan.decode_groups)
    assert sum(seq_lens) <= gathered < 1.6 * sum(seq_lens)
    assert len(plan.decode_groups) <= 4
    covered = [row for group in plan.decode_groups for row in range(group.start, group.end)]
    assert covered == list(range(61))


def test_a_window_gathers_only_what_it_sees() -> None:
    layout, _ = make_layout([1, 1], [5000, 4000], 16, np.random.default_rng(0))
    plan = cpu.make_plan(layout, 64)
    assert sum(num_blocks(group) for group in plan.decode_groups) <= 2 * (64 // 16 + 1)


@pytest.mark.parametrize("window", [None, 9])
def test_neighbouring_blocks_are_not_copied(window: int | None) -> None:
    """Rows alone in the cache read it in place; their results are those of shuffled blocks."""
    layout, num_blocks = make_layout([1, 30], [37, 50], 4, np.random.default_rng(0))
    total = 0
    for row, length in enumerate(layout.seq_lens):
        count = -(-length // 4)
        layout.block_table[row, :count] = np.arange(total, total + count)
        total += count
    positions = np.concatenate([[36], np.arange(20, 50)])
    requests = np.array([0] + [1] * 30)
    layout.slot_mapping[:] = layout.block_table[requests, positions // 4] * 4 + positions % 4
    plan = cpu.make_plan(layout, window)
    assert isinstance(plan.decode_groups[0].blocks, slice)
    assert isinstance(plan.chunks[0].blocks, slice)
    assert plan.decode_groups[0].mask is None
    shape = AttentionShape(4, 2, 16, 0.3, window)
    assert_equals_reference("cpu", layout, num_blocks, shape, torch.float32, seed=1)


def test_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        select_backend("flashinfer", CPU)
    assert all(name in str(caught.value) for name in attention_backend_names())
    with pytest.raises(ConfigError, match="does not run on cuda"):
        select_backend("cpu", "cuda")
    assert select_backend("auto", "cpu").name == "cpu"


def test_forward_context_is_scoped_and_does_not_nest() -> None:
    with pytest.raises(AssertionError, match="outside of forward_context"):
        get_forward_context()
    with forward_context("metadata", []):
        assert get_forward_context().metadata == "metadata"
        with pytest.raises(AssertionError, match="does not nest"), forward_context("other", []):
            pass
        assert get_forward_context().metadata == "metadata"
    with pytest.raises(ValueError, match="inside"), forward_context("metadata", []):
        raise ValueError("inside")
    with pytest.raises(AssertionError, match="outside of forward_context"):
        get_forward_context()
