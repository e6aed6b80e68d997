"""Greedy tokens are those of Transformers' own generate in float32, whatever path they take."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, RequestOutput, SamplingParams
from tests.integration.conftest import QUIET, SMALL
from tests.support.measures import counter
from tests.support.reference import ReferenceModel, count_ties, random_prompts
from tests.tiny_models import FAMILIES, VOCAB_SIZE
from traces.journal_reader import read_run

# The ways through the engine, by what is set for each.
MODES: dict[str, dict[str, Any]] = {
    "alone": {},
    "batch": {},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "chunks_of_64": {"max_num_batched_tokens": 64},
    "chunks_of_17": {"max_num_batched_tokens": 17},
    "long_prompts_capped": {"long_prefill_token_threshold": 23},
    "whole_prompts": {"enable_chunked_prefill": False},
    "prefix_cached": {},
    "preempted": {},
    "preempted_synchronous": {"async_scheduling": False},
    "synchronous": {"async_scheduling": False},
    "small_blocks": {"block_size": 3},
    "few_sequences": {"max_num_seqs": 3},
    "traced": {},
    "no_statistics": {"disable_log_stats": True},
}

TINY_LENGTHS = [1, 2, 3, 15, 16, 17, 31, 33, 48, 64, 77, 90]
TINY_TOKENS = 12


def run_mode(
    llm: LLM, mode: str, prompts: list[list[int]], params: SamplingParams
) -> list[RequestOutput]:
    """Generate for all prompts and assert that the mode's own feature was at work."""
    if mode == "alone":
        return [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    if mode == "prefix_cached":
        again = llm.generate(prompts, params, use_tqdm=False)
        # A hit is of whole blocks, and never of the whole prompt.
        assert [output.num_cached_tokens for output in again] == [
            (len(prompt) - 1) // 16 * 16 for prompt in prompts
        ]
        assert [output.outputs[0].token_ids for output in again] == [
            output.outputs[0].token_ids for output in outputs
        ]
        return again
    if mode.startswith("preempted"):
        assert counter(llm, "isinglass_preemptions_total") > 0
    if mode == "traced":
        assert llm.run_dir is not None
        llm.shutdown()  # writes out what is still in memory
        assert sum(step.num_sampled_tokens for step in read_run(llm.run_dir).steps) == sum(
            len(output.outputs[0].token_ids) for output in outputs
        )
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_tiny_models_in_process(
    family: str,
    mode: str,
    tiny_folders: dict[str, Path],
    tiny_references: dict[str, ReferenceModel],
    tmp_path: Path,
    count_tie: Callable[[int], None],
) -> None:
    settings = SMALL | {"skip_tokenizer_init": True} | MODES[mode]
    if mode.startswith("preempted"):
        settings |= {"num_gpu_blocks_override": 15, "max_model_len": 112}
    if mode == "traced":
        settings["trace_dir"] = tmp_path
    prompts = random_prompts(11, TINY_LENGTHS, VOCAB_SIZE)
    params = SamplingParams(temperature=0, max_tokens=TINY_TOKENS)
    with LLM(tiny_folders[family], enable_multiprocessing=False, **settings) as llm:
        outputs = run_mode(llm, mode, prompts, params)
    references = [tiny_references[family].greedy(prompt, TINY_TOKENS) for prompt in prompts]
    count_tie(count_ties(outputs, references))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_tiny_models_spawned(
    family: str,
    tiny_folders: dict[str, Path],
    tiny_references: dict[str, ReferenceModel],
    count_tie: Callable[[int], None],
) -> None:
    prompts = random_prompts(12, TINY_LENGTHS, VOCAB_SIZE)
    params = SamplingParams(temperature=0, max_tokens=TINY_TOKENS)
    with LLM(tiny_folders[family], skip_tokenizer_init=True, **SMALL) as llm:
        outputs = run_mode(llm, "prefix_cached", prompts, params)
    references = [tiny_references[family].greedy(prompt, TINY_TOKENS) for prompt in prompts]
    count_tie(count_ties(outputs, references))


EMBEDDED_TOKENS = 10


def check_embedded(
    reference: ReferenceModel,
    prompts: list[list[int]],
    mode: str,
    *,
    num_tokens: int = EMBEDDED_TOKENS,
    **settings: Any,
) -> int:
    """Compare the embedded model in float32 with the reference; returns the ties accepted."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    settings = (
        QUIET
        | {"max_model_len": 1600, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 2000}
        | MODES[mode]
        | settings
    )
    with LLM(dtype="float32", skip_tokenizer_init=True, **settings) as llm:
        outputs = run_mode(llm, mode, prompts, params)
    return count_ties(outputs, [reference.greedy(prompt, num_tokens) for prompt in prompts])


@pytest.mark.usefixtures("cores_with_threads")
def test_embedded_model_in_short(
    embedded_reference: ReferenceModel,
    embedded_prompts: list[list[int]],
    count_tie: Callable[[int], None],
) -> None:
    """A batch in chunks, spawned and asynchronous: the fast tests' share of what follows."""
    prompts = embedded_prompts[:16:3]
    count_tie(check_embedded(embedded_reference, prompts, "chunks_of_64"))


@pytest.mark.slow
@pytest.mark.usefixtures("cores_with_threads")
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("alone", {}),
        ("batch", {"max_num_batched_tokens": 2048}),
        ("chunks_of_64", {}),
        ("chunks_of_17", {}),
        ("prefix_cached", {}),
        ("preempted", {"num_gpu_blocks_override": 101, "num_tokens": 24}),
        ("preempted_synchronous", {"num_gpu_blocks_override": 101, "num_tokens": 24}),
        ("synchronous", {}),
        ("batch", {"enable_multiprocessing": False}),
        ("traced", {}),
        ("whole_prompts", {"max_num_batched_tokens": 2048}),
    ],
)
def test_embedded_model(
    mode: str,
    settings: dict[str, Any],
    embedded_reference: ReferenceModel,
    embedded_prompts: list[list[int]],
    tmp_path: Path,
    count_tie: Callable[[int], None],
) -> None:
    if mode == "traced":
        settings = settings | {"trace_dir": tmp_path}
    count_tie(check_embedded(embedded_reference, embedded_prompts, mode, **settings))
