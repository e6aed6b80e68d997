"""Many of Transformers' decoders, each tiny and random: right logits or a refusal that says why.

Prompts are longer than every window, in chunks and single tokens of several requests at once.
Logits in float32 are compared at all positions, so greedy tokens are the same too.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.attention.registry import select_backend
from engine.errors import UnsupportedModelError
from tests.support.paged_runs import (
    CPU,
    LENGTHS,
    STEPS,
    assert_same_logits,
    load,
    make_prompts,
    run_in_steps,
)
from tests.tiny_models import build_tiny_model

pytestmark = pytest.mark.slow

# Whichever of these a class's configuration has is set.
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_inner": 96,
    "dff": 96,
    "intermediate_size_mlp": 96,
    "sliding_window": 10,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "attention_chunk_size": 12,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "embedding_size": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 40,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
    "is_decoder": True,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "tie_word_embeddings": False,
}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}

RUN: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {},
    "ApertusForCausalLM": {},
    "ArceeForCausalLM": {},
    "AriaTextForCausalLM": {},
    "BertLMHeadModel": {},
    "BitNetForCausalLM": {},
    "CTRLLMHeadModel": {},
    "CodeGenForCausalLM": {"rotary_dim": 8},
    "CohereForCausalLM": {},
    "Cohere2ForCausalLM": {},
    "CwmForCausalLM": {},
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Dots1ForCausalLM": {},
    "ElectraForCausalLM": {},
    "Ernie4_5ForCausalLM": {},
    "Ernie4_5_MoeForCausalLM": {},
    "Exaone4ForCausalLM": {},
    "ExaoneMoeForCausalLM": {},
    "FlexOlmoForCausalLM": {},
    "GPT2LMHeadModel": {},
    "GPTBigCodeForCausalLM": {},
    "GPTJForCausalLM": {"rotary_dim": 8},
    "GPTNeoXForCausalLM": {},
    "GemmaForCausalLM": {},
    "Gemma3ForCausalLM": _ALTERNATING,
    "Gemma3nForCausalLM": _ALTERNATING | {"num_kv_shared_layers": 2},
    "GlmForCausalLM": {},
    "Glm4ForCausalLM": {},
    "Glm4MoeForCausalLM": {},
    "Glm4MoeLiteForCausalLM": _LATENT,
    "GraniteForCausalLM": {},
    "GraniteMoeForCausalLM": {},
    "GraniteMoeSharedForCausalLM": {},
    "HeliumForCausalLM": {},
    "HunYuanDenseV1ForCausalLM": {},
    "HunYuanMoEV1ForCausalLM": {},
    "JetMoeForCausalLM": {},
    "LagunaForCausalLM": {},
    "LlamaForCausalLM": {},
    "LongcatFlashForCausalLM": _LATENT
    | {"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 1},
    "MiniCPM3ForCausalLM": _LATENT,
    "MiniMaxM2ForCausalLM": {},
    "MinistralForCausalLM": {},
    "Ministral3ForCausalLM": {},
    "MistralForCausalLM": {},
    "MixtralForCausalLM": {},
    "ModernBertDecoderForCausalLM": {},
    "NanoChatForCausalLM": {},
    "NemotronForCausalLM": {},
    "OPTForCausalLM": {},
    "OlmoForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": {},
    "OlmoeForCausalLM": {},
    "PersimmonForCausalLM": {},
    "PhiForCausalLM": {},
    "Phi3ForCausalLM": {},
    "PhimoeForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen2MoeForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "SeedOssForCausalLM": {},
    "SmolLM3ForCausalLM": {},
    "SolarOpenForCausalLM": {},
    "Starcoder2ForCausalLM": {},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "BambaForCausalLM": ({}, "keeps a state"),
    "BloomForCausalLM": ({}, "attention registry"),
    "CamembertForCausalLM": ({}, "does not count positions from 0"),
    "DeepseekV32ForCausalLM": (_LATENT, "an indexer that picks keys"),
    "DiffLlamaForCausalLM": ({}, "more than one attention call"),
    "DogeForCausalLM": ({}, "neither causal nor a sliding window"),
    "FalconMambaForCausalLM": ({}, "keeps a state"),
    "Gemma2ForCausalLM": ({}, "softcap"),
    "GlmMoeDsaForCausalLM": (_LATENT, "an indexer that picks keys"),
    "GptOssForCausalLM": ({}, "attention sinks"),
    "GraniteMoeHybridForCausalLM": ({"layer_types": ["mamba", "attention"] * 2}, "MambaLayer"),
    "JambaForCausalLM": ({}, "keeps a state"),
    "Lfm2ForCausalLM": (_CONVOLUTIONS, "Lfm2ShortConv"),
    "Lfm2MoeForCausalLM": (_CONVOLUTIONS | {"num_dense_layers": 1}, "Lfm2MoeShortConv"),
    "Llama4ForCausalLM": ({"no_rope_layers": [1, 1, 1, 0]}, "neither causal nor a sliding window"),
    "MiniMaxForCausalLM": ({}, "MiniMaxLightningAttention"),
    "MptForCausalLM": ({}, "attention registry"),
    "Qwen3NextForCausalLM": ({}, "keeps a state"),
    "RecurrentGemmaForCausalLM": ({}, "outside of attention"),
    "RobertaForCausalLM": ({}, "does not count positions from 0"),
    "RwkvForCausalLM": ({}, "keeps a state"),
    "VaultGemmaForCausalLM": ({}, "softcap"),
    "XGLMForCausalLM": ({}, "attention registry"),
}


def build(class_name: str, overrides: dict[str, Any]) -> Any:
    if not hasattr(transformers, class_name):
        pytest.skip(f"no {class_name} in Transformers {transformers.__version__}")
    defaults = getattr(transformers, class_name).config_class()
    settings = {name: value for name, value in _SMALL.items() if hasattr(defaults, name)}
    torch.manual_seed(0)  # for buffers that are drawn
    return build_tiny_model(class_name, seed=3, **settings | overrides)


@pytest.mark.parametrize("class_name", RUN)
def test_logits_equal_those_of_transformers(class_name: str, tmp_path: Path) -> None:
    reference = build(class_name, RUN[class_name])
    reference.save_pretrained(tmp_path)
    backend = select_backend("cpu", CPU)
    prompts = make_prompts(LENGTHS)
    results = run_in_steps(load(tmp_path, backend), backend, prompts, STEPS)
    assert_same_logits(reference, prompts, results, least_spread=0.05)


@pytest.mark.parametrize("class_name", REFUSED)
def test_what_cannot_run_says_why(class_name: str, tmp_path: Path) -> None:
    overrides, reason = REFUSED[class_name]
    build(class_name, overrides).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"{class_name}.*{reason}"):
        load(tmp_path, select_backend("cpu", CPU))
