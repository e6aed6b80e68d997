"""Logprobs of prompts and outputs are Transformers' own, in every mode and along every path."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, Logprob, RequestOutput, SamplingParams
from tests.integration.conftest import QUIET, SMALL
from tests.support.measures import counter
from tests.support.processors import EvenTokensOnly
from tests.support.reference import ReferenceModel, random_prompts
from tests.tiny_models import VOCAB_SIZE

TOLERANCE = 1e-3
LENGTHS = [1, 2, 17, 40, 90]


def in_process(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, enable_multiprocessing=False, **(SMALL | settings))


def check_position(
    entries: Mapping[int, Logprob], token_id: int, expected: torch.Tensor, num_logprobs: int
) -> None:
    """Assert one position: which tokens are there, their values and their ranks.

    Args:
        expected: the reference's value of each token; [vocab].
    """
    values = expected.numpy()
    wanted = len(values) if num_logprobs == -1 else num_logprobs
    token_ids = np.fromiter(entries, int)
    logprobs = np.array([entry.logprob for entry in entries.values()])
    ranks = np.array([entry.rank for entry in entries.values()])
    assert token_ids[0] == token_id
    assert len(entries) in {wanted, wanted + (num_logprobs != -1)}
    # allclose takes infinities of one sign as equal.
    np.testing.assert_allclose(logprobs, values[token_ids], rtol=0, atol=TOLERANCE)
    # Another float32 sum may swap neighbours, so a place is checked within the tolerance.
    ascending = np.sort(values)
    mine = values[token_ids]
    finite = np.isfinite(mine)
    most_above = len(values) - np.searchsorted(ascending, mine - TOLERANCE)
    surely_above = len(values) - np.searchsorted(ascending, mine + TOLERANCE, side="right")
    assert (surely_above < ranks).all()
    assert (ranks <= most_above)[finite].all()
    top = sorted(ranks[ranks <= wanted].tolist())
    assert top == list(range(1, wanted + 1)), "the most likely tokens, each with its rank"


def check_output(
    output: RequestOutput,
    reference: ReferenceModel,
    *,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
) -> None:
    """Assert all logprobs of a request, of each of its sequences."""
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        token_ids = list(completion.token_ids)
        expected = reference.logits(prompt + token_ids).log_softmax(-1)
        if num_logprobs is not None:
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(token_ids)
            for index, token_id in enumerate(token_ids):
                check_position(
                    completion.logprobs[index],
                    token_id,
                    expected[len(prompt) - 1 + index],
                    num_logprobs,
                )
            total = sum(
                position[token_id].logprob
                for position, token_id in zip(completion.logprobs, token_ids, strict=True)
            )
            assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
    if num_prompt_logprobs is not None:
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for index in range(1, len(prompt)):
            check_position(
                output.prompt_logprobs[index],
                prompt[index],
                expected[index - 1],
                num_prompt_logprobs,
            )


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, -1])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 17},
        {"async_scheduling": False},
        {"num_gpu_blocks_override": 8, "max_model_len": 120},
    ],
    ids=["whole", "chunked", "synchronous", "preempted"],
)
def test_prompt_and_output(
    num_logprobs: int,
    settings: dict[str, Any],
    tiny_llama: Path,
    tiny_references: dict[str, ReferenceModel],
) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=20, logprobs=num_logprobs, prompt_logprobs=num_logprobs
    )
    with in_process(tiny_llama, **settings) as llm:
        outputs = llm.generate(random_prompts(3, LENGTHS, VOCAB_SIZE), params, use_tqdm=False)
        if "num_gpu_blocks_override" in settings:
            assert counter(llm, "isinglass_preemptions_total") > 0
    for output in outputs:
        check_output(
            output,
            tiny_references["llama"],
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_logprobs,
        )


def test_requests_with_and_without_in_one_batch(
    tiny_llama: Path, tiny_references: dict[str, ReferenceModel]
) -> None:
    wanted = [(None, None), (3, None), (None, 2), (-1, 0), (0, -1)]
    params = [
        SamplingParams(temperature=0.8, seed=5, max_tokens=8, logprobs=k, prompt_logprobs=p)
        for k, p in wanted
    ]
    with in_process(tiny_llama, max_num_batched_tokens=23) as llm:
        outputs = llm.generate(random_prompts(4, LENGTHS, VOCAB_SIZE), params, use_tqdm=False)
    for output, (num_logprobs, num_prompt_logprobs) in zip(outputs, wanted, strict=True):
        assert (output.outputs[0].logprobs is None) == (num_logprobs is None)
        assert (output.outputs[0].cumulative_logprob is None) == (num_logprobs is None)
        assert (output.prompt_logprobs is None) == (num_prompt_logprobs is None)
        check_output(
            output,
            tiny_references["llama"],
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        )


def test_a_cached_prefix_hides_no_prompt_logprobs(
    tiny_llama: Path, tiny_references: dict[str, ReferenceModel]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    prompts = random_prompts(5, [90, 49], VOCAB_SIZE)
    with in_process(tiny_llama) as llm:
        plain = SamplingParams(temperature=0, max_tokens=2)
        llm.generate(prompts, plain, use_tqdm=False)
        assert llm.generate(prompts, plain, use_tqdm=False)[0].num_cached_tokens > 0
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        check_output(output, tiny_references["llama"], num_prompt_logprobs=2)


def test_each_of_n_sequences_has_its_own(
    tiny_llama: Path, tiny_references: dict[str, ReferenceModel]
) -> None:
    params = SamplingParams(
        n=3, temperature=1.3, seed=7, max_tokens=10, logprobs=4, prompt_logprobs=1
    )
    with in_process(tiny_llama) as llm:
        (output,) = llm.generate(random_prompts(6, [33], VOCAB_SIZE), params, use_tqdm=False)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    assert any(
        position[token_id].rank > 4
        for one in output.outputs
        for position, token_id in zip(one.logprobs, one.token_ids, strict=True)
    ), "a drawn token beside the most likely ones"
    check_output(output, tiny_references["llama"], num_logprobs=4, num_prompt_logprobs=1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    "mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
)
def test_modes_with_a_processor_that_masks(
    mode: str,
    temperature: float,
    tiny_llama: Path,
    tiny_references: dict[str, ReferenceModel],
) -> None:
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=6, logprobs=-1)
    with in_process(tiny_llama, logits_processors=[EvenTokensOnly], logprobs_mode=mode) as llm:
        outputs = llm.generate(random_prompts(7, LENGTHS, VOCAB_SIZE), params, use_tqdm=False)
    for output in outputs:
        completion, prompt = output.outputs[0], output.prompt_token_ids
        assert all(token_id % 2 == 0 for token_id in completion.token_ids)
        logits = tiny_references["llama"].logits(prompt + list(completion.token_ids))
        for index, token_id in enumerate(completion.token_ids):
            expected = logits[len(prompt) - 1 + index].clone()
            if mode.startswith("processed"):
                expected[1::2] = -torch.inf
                expected /= temperature or 1.0
            if mode.endswith("logprobs"):
                expected = expected.log_softmax(-1)
            check_position(completion.logprobs[index], token_id, expected, -1)


@pytest.mark.slow
@pytest.mark.usefixtures("cores_with_threads")
def test_embedded_model_across_processes(
    embedded_reference: ReferenceModel, embedded_prompts: list[list[int]]
) -> None:
    """Whole vocabularies and texts of tokens arrive in the caller's process."""
    settings = QUIET | {"kv_cache_memory_bytes": 128 << 20, "max_num_batched_tokens": 64}
    wanted = [(-1, 0), (20, 3), (0, 20)]
    params = [
        SamplingParams(temperature=0, max_tokens=4, logprobs=k, prompt_logprobs=p)
        for k, p in wanted
    ]
    with LLM(dtype="float32", **settings) as llm:
        outputs = llm.generate(embedded_prompts[8:14:2], params, use_tqdm=False)
        tokenizer = llm.get_tokenizer()
    for output, (num_logprobs, num_prompt_logprobs) in zip(outputs, wanted, strict=True):
        check_output(
            output,
            embedded_reference,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        )
    entries = outputs[1].outputs[0].logprobs[0]
    for token_id, entry in entries.items():
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        assert entry.decoded_token.strip() == text.strip() or "\ufffd" in text
