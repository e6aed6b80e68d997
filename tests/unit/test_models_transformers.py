"""The Transformers backend against Transformers itself, and what it must refuse."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.registry import select_backend
from engine.errors import CheckpointError, UnsupportedModelError
from engine.models.transformers_backend import TransformersForCausalLM
from tests.tiny_models import build_tiny_checkpoint, build_tiny_model
from tests.unit.paged_runs import (
    CPU,
    LENGTHS,
    STEPS,
    assert_same_logits,
    load,
    make_prompts,
    run_in_steps,
)

pytestmark = pytest.mark.usefixtures("several_threads")

CASES = {
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "phi, part of a head turned": ("PhiForCausalLM", {}),
    "learned positions, no linear class": ("GPT2LMHeadModel", {}),
    "decoder below the base model": ("OPTForCausalLM", {"word_embed_proj_dim": 64}),
    "scaled logits": ("GraniteForCausalLM", {"logits_scaling": 0.5}),
    "window": ("Starcoder2ForCausalLM", {"sliding_window": 10}),
    "experts": ("MixtralForCausalLM", {"num_local_experts": 4, "num_key_value_heads": 2}),
    "keys longer than values": (
        "DeepseekV3ForCausalLM",
        {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
        },
    ),
    # No module of ours turns by LongRoPE, so Llama goes this way too.
    "longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0 + index / 8 for index in range(8)],
                "long_factor": [2.0 + index / 8 for index in range(8)],
            }
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    build_tiny_checkpoint(tmp_path, family, seed=3, **overrides)
    backend = select_backend("cpu", CPU)
    model = load(tmp_path, backend)
    assert isinstance(model, TransformersForCausalLM)
    prompts = make_prompts(LENGTHS)
    results = run_in_steps(model, backend, prompts, STEPS)
    reference = build_tiny_model(family, seed=3, **overrides)
    assert_same_logits(reference, prompts, results, least_spread=0.1)


def test_packed_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "gpt_neox")
    backend = select_backend("cpu", CPU)
    prompts = make_prompts(LENGTHS)
    runs = [
        run_in_steps(load(tmp_path, backend, dtype), backend, prompts, STEPS, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for exact, rounded in zip(*runs, strict=True):
        assert (exact - rounded).abs().mean() < 0.05 * exact.std()


@pytest.mark.parametrize(
    ("class_name", "reason"),
    [
        ("Gemma2ForCausalLM", "softcap"),
        ("BertLMHeadModel", "not causal"),
        ("BloomForCausalLM", "attention registry"),
        ("MambaForCausalLM", "attention registry"),
        ("MiniMaxForCausalLM", "outside of attention"),
    ],
)
def test_what_a_flat_batch_would_get_wrong_is_refused(
    class_name: str, reason: str, tmp_path: Path
) -> None:
    build_tiny_checkpoint(tmp_path, class_name)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path, select_backend("cpu", CPU))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "gpt_neox")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if "dense_h_to_4h.weight" in name)
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(tmp_path, select_backend("cpu", CPU))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "gpt_neox")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=tmp_path.name):
        load(tmp_path, select_backend("cpu", CPU))
