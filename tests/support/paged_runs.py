"""Runs models through a paged cache in steps that a test lays out; shared by the model tests."""

from pathlib import Path

import numpy as np
import torch

from engine.attention.base import AttentionBackend, BatchLayout
from engine.attention.forward_context import forward_context
from engine.checkpoint.architecture import read_model_config
from engine.checkpoint.locate import resolve_model
from engine.models.base import CausalLM
from engine.models.loader import load_model
from tests.tiny_models import VOCAB_SIZE

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
            backend.kv_cache_shape(sum(needed) + 3, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim),
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
        ids = np.concatenate(
            [np.array(prompts[row])[where] for row, where in zip(rows, positions, strict=True)]
        )
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
            hidden = model(torch.from_numpy(ids), torch.from_numpy(np.concatenate(positions)))
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


def assert_same_logits(
    reference: torch.nn.Module,
    prompts: list[list[int]],
    results: list[torch.Tensor],
    *,
    least_spread: float,
) -> None:
    """Each prompt's logits equal the Transformers model's, and differ enough to mean something."""
    for prompt, result in zip(prompts, results, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        assert expected.std() > least_spread
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
