"""Whole models in the native kernels against float32, and their memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.registry import select_backend
from engine.checkpoint.architecture import read_model_config
from engine.checkpoint.locate import resolve_model
from engine.models.native_decoder import unsupported
from engine.worker.memory import model_bytes
from tests.support import paged_runs
from tests.support.native_support import needs_native
from tests.support.paged_runs import CPU, LENGTHS, STEPS, load, make_prompts, run_in_steps
from tests.tiny_models import build_tiny_checkpoint

pytestmark = [needs_native, pytest.mark.usefixtures("several_threads")]

SIZES = {"hidden_size": 128, "head_dim": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, odd vocabulary": ("llama", {"tie_word_embeddings": True, "vocab_size": 131}),
    "llama odd vocabulary": ("llama", {"vocab_size": 150}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama no groups": ("llama", {"num_key_value_heads": 4}),
    "llama dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2 windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 bias, larger heads": ("qwen3", {"attention_bias": True, "head_dim": 96}),
    "mistral window": ("mistral", {}),
}


@pytest.fixture(autouse=True)
def _blocks_of_sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_runs, "BLOCK_SIZE", 16)


@pytest.mark.parametrize("case", CASES)
def test_as_near_to_float32_as_pytorch_in_bfloat16(case: str, tmp_path: Path) -> None:
    """One wrong operand, head, mask or bias moves logits by about their spread, 1."""
    family, overrides = CASES[case]
    build_tiny_checkpoint(tmp_path, family, seed=3, **(SIZES | overrides))
    prompts = make_prompts(LENGTHS)
    runs = []
    for name, dtype in (
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        ("native", torch.bfloat16),
    ):
        backend = select_backend(name, CPU)
        runs.append(run_in_steps(load(tmp_path, backend, dtype), backend, prompts, STEPS, dtype))
    for exact, of_torch, ours in zip(*runs, strict=True):
        assert ours.dtype == torch.float32
        error = (exact - ours).abs().mean()
        assert error < 0.03 * exact.std()
        assert error < 1.2 * (exact - of_torch).abs().mean()


def test_a_request_does_not_depend_on_the_others(tmp_path: Path) -> None:
    """To the bit, alone or in a batch, while its chunks are the same."""
    build_tiny_checkpoint(tmp_path, "llama", **SIZES)
    backend = select_backend("native", CPU)
    model = load(tmp_path, backend, torch.bfloat16)
    prompts = make_prompts(LENGTHS)
    together = run_in_steps(model, backend, prompts, STEPS, torch.bfloat16)
    for row, prompt in enumerate(prompts):
        steps = [[step[row]] for step in STEPS if step[row]]
        alone = run_in_steps(model, backend, [prompt], steps, torch.bfloat16)[0]
        assert torch.equal(alone, together[row])


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_are_held_once(is_tied: bool, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=is_tied, **SIZES)
    dense = load(tmp_path, select_backend("torch_reference", CPU), torch.float32)
    num_elements = sum(weight.numel() for weight in dense.parameters())
    model = load(tmp_path, select_backend("native", CPU), torch.bfloat16)
    assert 2 * num_elements <= model_bytes(model) < 1.05 * 2 * num_elements


def test_a_token_outside_of_the_vocabulary_is_no_crash(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "llama", **SIZES)
    model = load(tmp_path, select_backend("native", CPU), torch.bfloat16)
    with pytest.raises(AssertionError, match="vocabulary"):
        model(torch.tensor([10**6]), torch.tensor([0]))


@pytest.mark.parametrize(
    ("overrides", "dtype", "reason"),
    [
        ({}, torch.float32, "float32"),
        ({"hidden_act": "gelu"}, torch.bfloat16, "gelu"),
        ({"head_dim": 24}, torch.bfloat16, "head_dim 24"),
        ({"intermediate_size": 100}, torch.bfloat16, "intermediate_size 100"),
        ({"hidden_size": 48}, torch.bfloat16, "hidden_size 48"),
    ],
)
def test_what_it_does_not_cover_is_said(
    overrides: dict[str, Any], dtype: torch.dtype, reason: str, tmp_path: Path
) -> None:
    build_tiny_checkpoint(tmp_path, "llama", **(SIZES | overrides))
    config = read_model_config(resolve_model(str(tmp_path)))
    assert reason in (unsupported(config, dtype, 16) or "")
