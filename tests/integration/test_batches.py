"""Each request of a batch gets the tokens that it gets alone, whatever its neighbours are.

Batches have random sizes and lengths: which rows are computed together, and in which order, depends
on the mix of lengths.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM, RequestOutput, SamplingParams
from tests.integration.conftest import QUIET
from tests.levels import LEVELS
from tests.tiny_models import VOCAB_SIZE, build_tiny_checkpoint

TIE_GAP = 1e-4
"""Natural logarithms: two tokens this close may swap when float32 sums take another order."""
BF16_TIE_GAP = 0.5
"""Rounding of bfloat16 moves log-probabilities by up to about 0.2; another's text by several."""

WINDOW = 250
TINY = {
    "llama": ("llama", {}),
    "window": ("mistral", {"sliding_window": WINDOW}),
    "transformers": ("gpt_neox", {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each kind, with room for long contexts."""
    root = tmp_path_factory.mktemp("batches")
    return {
        name: build_tiny_checkpoint(root / name, family, max_position_embeddings=1024, **overrides)
        for name, (family, overrides) in TINY.items()
    }


def random_batches(
    seed: int, num_batches: int, vocab_size: int, *, longest: int = 600
) -> list[list[list[int]]]:
    """Batches of 2 to 16 prompts: of lengths over orders of magnitude, or a few short, then long.

    The second kind is what a backend that sorts and pads rows may lay out in either order.
    """
    generator = np.random.default_rng(seed)
    batches = []
    for number in range(num_batches):
        size = int(generator.integers(2, 17))
        lengths = np.exp(generator.uniform(0, np.log(longest), size)).astype(int)
        if number % 2:
            num_short = int(generator.integers(1, 1 + size // 2))
            lengths[:num_short] = generator.integers(1, 33)
            lengths[num_short:] = generator.integers(150, longest, 1)
        batches.append([generator.integers(3, vocab_size, length).tolist() for length in lengths])
    return batches


def generate_alone(
    batches: Sequence[list[list[int]]], params: SamplingParams, **settings: Any
) -> list[list[RequestOutput]]:
    """Every request in steps of its own."""
    with LLM(max_num_seqs=1, enable_prefix_caching=False, **settings) as llm:
        return [llm.generate(batch, params, use_tqdm=False) for batch in batches]


def count_swaps(alone: RequestOutput, together: RequestOutput, gap: float) -> int:
    """Assert that both have the same tokens up to a tie; returns the ties, 0 or 1."""
    expected, got = alone.outputs[0], together.outputs[0]
    for step, (wanted, token_id) in enumerate(zip(expected.token_ids, got.token_ids, strict=False)):
        if wanted != token_id:
            entries = expected.logprobs[step]
            distance = (
                entries[wanted].logprob - entries[token_id].logprob
                if token_id in entries
                else float("inf")
            )
            assert distance < gap, (
                f"a prompt of {len(alone.prompt_token_ids)} tokens continues with {got.token_ids} "
                f"in a batch, with {expected.token_ids} alone; at {step} they are {distance} apart"
            )
            return 1
    assert len(expected.token_ids) == len(got.token_ids)
    return 0


def compare_batches(
    batches: list[list[list[int]]], *, num_tokens: int, gap: float = TIE_GAP, **settings: Any
) -> int:
    """Alone against together, prefix caching off and on and on again; returns the ties."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=20)
    settings = QUIET | {"skip_tokenizer_init": True, "max_num_batched_tokens": 512} | settings
    alone = generate_alone(batches, params, **settings)
    swaps = 0
    for caching in (False, True):
        with LLM(enable_prefix_caching=caching, **settings) as llm:
            for _ in range(2 if caching else 1):
                for batch, wanted in zip(batches, alone, strict=True):
                    outputs = llm.generate(batch, params, use_tqdm=False)
                    for one, other in zip(wanted, outputs, strict=True):
                        swaps += count_swaps(one, other, gap)
    return swaps


@pytest.mark.parametrize("kind", TINY)
def test_tiny_models(kind: str, folders: dict[str, Path], count_tie: Callable[[int], None]) -> None:
    ties = compare_batches(
        random_batches(7, 6, VOCAB_SIZE),
        num_tokens=12,
        model=folders[kind],
        kv_cache_memory_bytes=64 << 20,
        enable_multiprocessing=False,
    )
    count_tie(ties)


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_every_level_of_processor(
    level: str | None,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    count_tie: Callable[[int], None],
) -> None:
    for name, value in LEVELS.get(level, {}).items():
        monkeypatch.setenv(name, value)
    ties = compare_batches(
        random_batches(4, 4, VOCAB_SIZE),
        num_tokens=8,
        model=folders["llama"],
        kv_cache_memory_bytes=64 << 20,
    )
    count_tie(ties)


@pytest.mark.slow
@pytest.mark.parametrize("level", [None, *LEVELS])
def test_embedded_model(
    level: str | None, monkeypatch: pytest.MonkeyPatch, count_tie: Callable[[int], None]
) -> None:
    for name, value in LEVELS.get(level, {}).items():
        monkeypatch.setenv(name, value)
    ties = compare_batches(
        random_batches(6, 4, 49152, longest=250),
        num_tokens=4,
        dtype="float32",
        kv_cache_memory_bytes=1 << 30,
    )
    count_tie(ties)


@pytest.mark.slow
@pytest.mark.parametrize("cpu_kernels", ["auto", "torch"])
def test_embedded_model_in_bfloat16(cpu_kernels: str) -> None:
    """The kernels that run by default: they round differently alone, but mix nobody up."""
    compare_batches(
        random_batches(5, 4, 49152, longest=250),
        num_tokens=4,
        gap=BF16_TIE_GAP,
        dtype="bfloat16",
        cpu_kernels=cpu_kernels,
        kv_cache_memory_bytes=1 << 30,
    )
