"""Models against Transformers in float32, through a paged cache in every arrangement.

A wrong rotary angle, mask, head order or slot changes logits of this size by far more than the
tolerance; agreement over all positions by luck is out of the question.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.base import AttentionBackend, BatchLayout
from engine.attention.forward_context import forward_context
from engine.attention.registry import select_backend
from engine.checkpoint.architecture import ModelConfig, read_model_config
from engine.checkpoint.locate import resolve_model
from engine.errors import CheckpointError, UnsupportedModelError
from engine.models.base import CausalLM
from engine.models.loader import load_model
from engine.models.registry import supported_architectures
from tests.tiny_models import VOCAB_SIZE, build_tiny_checkpoint, build_tiny_model

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def load(folder: Path, backend: AttentionBackend, dtype: torch.dtype = torch.float32) -> CausalLM:
    source = resolve_model(str(folder))
    config = read_model_config(source)
    return load_model(source, config, dtype=dtype, device=CPU, attention_backend=backend)


def run_in_steps(
    model: CausalLM,
    backend: AttentionBackend,
    prompts: list[list[int]],
    steps: list[list[int]],
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Logits of all tokens of all prompts; `steps` lists tokens per prompt and step."""
    generator = np.random.default_rng(0)
    needed = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    order = generator.permutation(sum(needed) + 3)
    tables = np.full((len(prompts), max(needed)), 10**6, np.int32)
    for row, count in enumerate(needed):
        tables[row, :count], order = order[:count], order[count:]
    caches = [
        torch.full(
            backend.kv_cache_shape(
                sum(needed) + 3, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim
            ),
            77.0,
            dtype=dtype,
        )
        for layer in model.attention_layers
    ]
    done, logits = [0] * len(prompts), [[] for _ in prompts]
    for step in steps:
        rows = [row for row, count in enumerate(step) if count]
        positions = [np.arange(done[row], done[row] + step[row]) for row in rows]
        slots = [
            tables[row][where // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + where % BLOCK_SIZE
            for row, where in zip(rows, positions, strict=True)
        ]
        ids = np.concatenate([np.array(prompts[r])[p] for r, p in zip(rows, positions)])
        for row in rows:
            done[row] += step[row]
        layout = BatchLayout(
            query_start_loc=np.cumsum([0] + [step[row] for row in rows]).astype(np.int32),
            seq_lens=np.array([done[row] for row in rows], np.int32),
            block_table=tables[rows],
            slot_mapping=np.concatenate(slots),
            block_size=BLOCK_SIZE,
        )
        metadata = backend.build_metadata(layout, CPU)
        with torch.inference_mode(), forward_context(metadata, caches):
            hidden = model(
                torch.from_numpy(ids), torch.from_numpy(np.concatenate(positions))
            )
            parts = model.compute_logits(hidden).split([step[row] for row in rows])
        for row, part in zip(rows, parts, strict=True):
            logits[row].append(part)
    assert done == [len(prompt) for prompt in prompts]
    return [torch.cat(parts) for parts in logits]


def make_prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


# Chunks, whole prompts and single tokens, apart and mixed, for prompts of 33, 20 and 7 tokens.
LENGTHS = (33, 20, 7)
STEPS = [
    [13, 0, 1],
    [1, 6, 1],
    [1, 1, 2],
    [10, 1, 1],
    [1, 1, 1],
    [7, 11, 1],
]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama gelu": ("llama", {"hidden_act": "gelu"}),
    "llama head_dim": ("llama", {"head_dim": 24}),
    "llama no groups": ("llama", {"num_key_value_heads": 4}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}),
    "llama yarn": ("llama", {"rope_parameters": YARN | {"rope_theta": 1000.0}}),
    "llama yarn mscale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 bias": ("qwen3", {"attention_bias": True}),
    "qwen3 layer types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mistral window": ("mistral", {}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "phi": ("PhiForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "opt": ("OPTForCausalLM", {"word_embed_proj_dim": 64, "ffn_dim": 96}),
    # Its head scales the logits, its decoder the embeddings.
    "granite": ("GraniteForCausalLM", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "starcoder2 window": ("Starcoder2ForCausalLM", {"sliding_window": 10}),
    "mixtral experts": (
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    ),
}


@pytest.mark.parametrize("backend_name", ["cpu", "torch_reference"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(
    case: str, backend_name: str, tmp_path: Path
) -> None:
    family, overrides = CASES[case]
    reference = build_tiny_model(family, seed=3, **overrides)
    build_tiny_checkpoint(tmp_path, family, seed=3, **overrides)
    backend = select_backend(backend_name, CPU)
    model = load(tmp_path, backend)
    prompts = make_prompts(LENGTHS)
    results = run_in_steps(model, backend, prompts, STEPS)
    for prompt, result in zip(prompts, results, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        assert expected.std() > 0.3  # distinct enough for the comparison to mean something
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
