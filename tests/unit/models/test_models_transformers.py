"""The Transformers backend against Transformers itself, and what it must refuse."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.registry import select_backend
from engine.errors import CheckpointError, UnsupportedModelError
from engine.models.transformers_backend import TransformersForCausalLM
from tests.support.paged_runs import (
    CPU,
    LENGTHS,
    STEPS,
    assert_same_logits,
    load,
    make_prompts,
    run_in_steps,
)
from tests.tiny_models import build_tiny_checkpoint, build_tiny_model

pytestmark = pytest.mark.usefixtures("several_threads")

_EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
_LATENT = {
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
}
CASES = {
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "phi, part of a head turned": ("PhiForCausalLM", {}),
    "learned positions, no linear class": ("GPT2LMHeadModel", {}),
    "decoder below the base model": ("OPTForCausalLM", {"word_embed_proj_dim": 64}),
    "scaled logits": ("GraniteForCausalLM", {"logits_scaling": 0.5}),
    "window": ("Starcoder2ForCausalLM", {"sliding_window": 10}),
    "experts": ("MixtralForCausalLM", {"num_local_experts": 4, "num_key_value_heads": 2}),
    "keys longer than values": ("DeepseekV3ForCausalLM", _LATENT),
    "values longer than keys": (
        "DeepseekV3ForCausalLM",
        _LATENT | {"qk_nope_head_dim": 8, "v_head_dim": 40},
    ),
    # These two name no window in the attention call, only in the mask.
    "window in every mask": (
        "PhimoeForCausalLM",
        _EXPERTS | {"num_local_experts": 4, "sliding_window": 10},
    ),
    "window in some masks": (
        "Qwen2MoeForCausalLM",
        _EXPERTS
        | {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
    ),
    "window, both kinds of layers": (
        "Gemma3ForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "decoder under another name than the class says": (
        "Llama4ForCausalLM",
        _EXPERTS
        | {
            "head_dim": 16,
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 256,
            "no_rope_layers": [1, 1, 0],
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
    ("class_name", "overrides", "reason"),
    [
        ("Gemma2ForCausalLM", {}, "softcap"),
        ("BertLMHeadModel", {}, "not causal"),
        ("BloomForCausalLM", {}, "attention registry"),
        ("MambaForCausalLM", {}, "state-space"),
        ("RwkvForCausalLM", {}, "state-space or recurrent"),
        ("MiniMaxForCausalLM", {}, "outside of attention, through MiniMaxLightningAttention"),
        ("RobertaForCausalLM", {"is_decoder": True}, "does not count positions from 0"),
        ("Llama4ForCausalLM", {"attention_chunk_size": 32}, "neither causal nor a sliding window"),
        ("GptOssForCausalLM", {"num_local_experts": 4, "head_dim": 16}, "attention sinks"),
        (
            "GlmMoeDsaForCausalLM",
            _LATENT | {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16},
            "an indexer that picks keys",
        ),
    ],
)
def test_what_a_flat_batch_would_get_wrong_is_refused(
    class_name: str, overrides: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    build_tiny_checkpoint(tmp_path, class_name, **overrides)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path, select_backend("cpu", CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_is_refused_however_small_its_weights(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    layer_types = ["full_attention", "conv", "full_attention"]
    build_tiny_checkpoint(tmp_path, "Lfm2ForCausalLM", layer_types=layer_types)
    path = tmp_path / "model.safetensors"
    weights = {name: weight * 1e-3 for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="outside of attention, through Lfm2ShortConv"):
        load(tmp_path, select_backend("cpu", CPU), dtype)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "gpt_neox")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if "dense_h_to_4h.weight" in name)
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(tmp_path, select_backend("cpu", CPU))


def test_tensors_that_transformers_drops_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer that predicts several tokens ahead is left out; an old mask is no loss."""
    build_tiny_checkpoint(tmp_path, "ExaoneMoeForCausalLM", **_EXPERTS | {"num_experts": 4})
    weights = {"mtp.up_proj.weight": torch.ones(2), "mtp.rotary.inv_freq": torch.ones(2)}
    for path in (*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.index.json")):
        if path.suffix == ".safetensors":
            weights |= load_file(path)
        path.unlink()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        load(tmp_path, select_backend("cpu", CPU))
    assert "left out, as Transformers' ExaoneMoeForCausalLM does: mtp.up_proj.weight" in caplog.text
    assert "inv_freq" not in caplog.text


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "gpt_neox")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=tmp_path.name):
        load(tmp_path, select_backend("cpu", CPU))
