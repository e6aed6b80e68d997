"""Input processor: what is refused before it reaches the core, and what the core receives."""

from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from engine.config import EngineConfig
from engine.errors import PromptError, SamplingParamsError
from engine.frontend.input_processor import InputProcessor, ProcessedPrompt
from engine.frontend.parallel_sampling import ParentRequest
from engine.text.tokenizer import Tokenizer
from engine.types.sampling import SamplingParams
from tests.support.model_configs import model_config

WORDS = ["[UNK]", "the", "cat", "sat", "on", "mat"]


def word_tokenizer() -> Tokenizer:
    """One token a word."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend, special_tokens={}, chat_templates={}, source="test")


def make_processor(*, has_tokenizer: bool = True, **settings: Any) -> InputProcessor:
    config = EngineConfig.from_kwargs(**({"max_model_len": 8} | settings))
    model = model_config(eos_token_ids=(0, 7))
    return InputProcessor(config, model, word_tokenizer() if has_tokenizer else None)


PARAMS = SamplingParams()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("the cat sat", ProcessedPrompt("the cat sat", [1, 2, 3], None)),
        ([1, 2, 31], ProcessedPrompt(None, [1, 2, 31], None)),
        ((1, 2), ProcessedPrompt(None, [1, 2], None)),
        (range(3), ProcessedPrompt(None, [0, 1, 2], None)),
        (np.array([1, 2], dtype=np.int32), ProcessedPrompt(None, [1, 2], None)),
        ([np.int64(4)], ProcessedPrompt(None, [4], None)),
        ({"prompt": "cat"}, ProcessedPrompt("cat", [2], None)),
        ({"prompt_token_ids": [3], "cache_salt": "s"}, ProcessedPrompt(None, [3], "s")),
        ({"prompt": "shown", "prompt_token_ids": [3]}, ProcessedPrompt("shown", [3], None)),
        ({"prompt": "cat", "prompt_token_ids": None}, ProcessedPrompt("cat", [2], None)),
    ],
)
def test_prompts_of_every_kind(prompt: Any, expected: ProcessedPrompt) -> None:
    got = make_processor().process_prompt(prompt, PARAMS)
    assert got == expected
    assert all(type(token_id) is int for token_id in got.token_ids)


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("", "empty"),
        ([], "empty"),
        (np.array([], dtype=np.int64), "empty"),
        ([1] * 8, "context length is 8 tokens.*prompt has 8\\."),
        ([32], "token id 32 at position 0"),
        ([1, -1], "token id -1 at position 1"),
        ([1, 2.0], "position 1"),
        ([True], "token id True"),
        (["the", "cat"], "position 0"),
        ([[1, 2]], "position 0"),
        (np.array([[1, 2]]), "position 0"),
        (np.array(5), "scalar"),
        (b"bytes", "got bytes"),
        (5, "got int"),
        (None, "got NoneType"),
        ({1, 2}, "got set"),
        ({}, "needs prompt or prompt_token_ids"),
        ({"text": "cat"}, "'text'"),
        ({"prompt": "cat", "extra": 1}, "extra"),
        ({"prompt": 5}, "prompt must be a string"),
        ({"prompt": None}, "both None"),
        ({"prompt": None, "prompt_token_ids": None}, "both None"),
        ({"prompt_token_ids": "cat"}, "position 0"),
        ({"prompt": "cat", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "cat", "cache_salt": 5}, "cache_salt"),
        ({"prompt": "cat", "add_special_tokens": 0}, "add_special_tokens must be True or False"),
        ("\ud800", "surrogate|UTF-8|unicode"),
    ],
)
def test_bad_prompts_have_a_named_error(prompt: Any, complaint: str) -> None:
    with pytest.raises(PromptError, match=f"(?i){complaint}"):
        make_processor().process_prompt(prompt, PARAMS)


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    assert len(make_processor().process_prompt([1] * 7, PARAMS).token_ids) == 7


def test_truncation_keeps_the_end_and_comes_before_the_length_check() -> None:
    params = SamplingParams(truncate_prompt_tokens=3)
    processor = make_processor()
    assert processor.process_prompt(list(range(20)), params).token_ids == [17, 18, 19]
    assert processor.process_prompt([1, 2], params).token_ids == [1, 2]
    for kept, param in ((None, None), (9, "truncate_prompt_tokens")):
        with pytest.raises(PromptError) as caught:
            processor.process_prompt([1] * 20, SamplingParams(truncate_prompt_tokens=kept))
        assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


def test_without_a_tokenizer_text_is_refused() -> None:
    processor = make_processor(has_tokenizer=False)
    assert processor.process_prompt([1], PARAMS).token_ids == [1]
    with pytest.raises(PromptError, match="skip_tokenizer_init"):
        processor.process_prompt("the cat", PARAMS)
    for params in (SamplingParams(stop="x"), SamplingParams(bad_words=["x"])):
        with pytest.raises(SamplingParamsError, match="skip_tokenizer_init"):
            processor.process_params(params)


def test_parameters_are_copied_completed_and_checked() -> None:
    processor = make_processor()
    given = SamplingParams(stop_token_ids=[3], bad_words=["cat", "on mat"])
    own = processor.process_params(given)
    assert own is not given
    assert own.all_stop_token_ids == {0, 3, 7}
    assert given.all_stop_token_ids == {3}
    assert own.bad_words_token_ids == [[2], [4, 5]]
    assert given.bad_words_token_ids is None
    assert processor.process_params(SamplingParams(ignore_eos=True)).all_stop_token_ids == set()
    for bad in (SamplingParams(stop_token_ids=[32]), SamplingParams(logprobs=33)):
        with pytest.raises(SamplingParamsError, match="32"):
            processor.process_params(bad)
    with pytest.raises(SamplingParamsError, match="got dict"):
        processor.process_params({"temperature": 0})  # type: ignore[arg-type]


def test_the_engine_bounds_logprobs() -> None:
    processor = make_processor(max_logprobs=5)
    processor.process_params(SamplingParams(logprobs=5))
    with pytest.raises(SamplingParamsError, match="max_logprobs"):
        processor.process_params(SamplingParams(prompt_logprobs=6))


def test_an_id_may_be_used_again_at_once() -> None:
    processor = make_processor()
    prompt = processor.process_prompt([1, 2], PARAMS)
    own = processor.process_params(PARAMS)
    first, second = (processor.make_request("a", prompt, own) for _ in range(2))
    assert first.request_id != second.request_id
    assert (first.request_num, second.request_num) == (0, 1)
    # No other pair of id and number can give the same one.
    third = processor.make_request("a-1", prompt, own)
    assert len({first.request_id, second.request_id, third.request_id}) == 3


def test_seeds_come_from_the_engine_differ_and_repeat() -> None:
    def seeds(engine_seed: int, temperature: float = 1.0, **fields: Any) -> list[int | None]:
        processor = make_processor(seed=engine_seed)
        own = processor.process_params(SamplingParams(temperature=temperature, **fields))
        prompt = ProcessedPrompt(None, [1], None)
        return [processor.make_request("r", prompt, own).sampling_params.seed for _ in range(500)]

    assert seeds(1) == seeds(1)
    assert len(set(seeds(1)) | set(seeds(2))) == 1_000
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds(3))
    assert set(seeds(1, temperature=0.0)) == {None}
    assert set(seeds(1, seed=42)) == {42}


def test_what_the_core_receives() -> None:
    processor = make_processor()
    prompt = processor.process_prompt({"prompt": "the cat", "cache_salt": "own"}, PARAMS)
    own = processor.process_params(PARAMS)
    request = processor.make_request(
        "r", prompt, own, arrival_ns=5, priority=-3, traceparent="00-1-2-01"
    )
    assert request.prompt_token_ids == [1, 2]
    assert (request.arrival_ns, request.priority) == (5, -3)
    assert (request.cache_salt, request.traceparent) == ("own", "00-1-2-01")
    assert request.sampling_params.all_stop_token_ids == {0, 7}
    assert processor.make_request("r", prompt, own).arrival_ns > 5


def test_what_has_been_checked_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`n` samples of a request with a long list would check it `2 n` times."""
    processor = make_processor()
    own = processor.process_params(SamplingParams(n=4, seed=2**63 - 2, allowed_token_ids=[1, 2]))
    unseeded = processor.process_params(SamplingParams(n=4))
    prompt = ProcessedPrompt(None, [1], None)

    def refuse(self: SamplingParams) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr(SamplingParams, "__post_init__", refuse)
    parent = ParentRequest("r", own)
    made = [processor.make_request("r", prompt, parent.child_params(i)) for i in range(4)]
    children = [request.sampling_params for request in made]
    assert [child.seed for child in children] == [2**63 - 2, 2**63 - 1, 0, 1]
    assert [child.n for child in children] == [1] * 4
    assert all(child.allowed_token_ids == [1, 2] for child in children)
    drawn = [
        processor.make_request("r", prompt, ParentRequest("r", unseeded).child_params(i))
        for i in range(4)
    ]
    assert len({one.sampling_params.seed for one in drawn}) == 4
    assert (own.n, own.seed, unseeded.n, unseeded.seed) == (4, 2**63 - 2, 4, None)


def test_a_prompt_is_not_the_callers_own_list() -> None:
    given = [1, 2, 3]
    ids = make_processor().process_prompt(given, PARAMS).token_ids
    given.append(99)
    assert ids == [1, 2, 3]


def test_special_tokens_are_left_out_where_a_text_has_them() -> None:
    processor = make_processor()
    assert processor.tokenizer is not None
    processor.tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="[UNK] $A", special_tokens=[("[UNK]", 0)]
    )
    for prompt, ids in (
        ("the cat", [0, 1, 2]),
        ({"prompt": "the cat"}, [0, 1, 2]),
        ({"prompt": "the cat", "add_special_tokens": True}, [0, 1, 2]),
        ({"prompt": "the cat", "add_special_tokens": False}, [1, 2]),
    ):
        assert processor.process_prompt(prompt, PARAMS).token_ids == ids
        cut = SamplingParams(truncate_prompt_tokens=3)
        assert processor.process_prompt(prompt, cut).token_ids == ids[-3:]


def test_a_truncation_that_keeps_too_much_says_so() -> None:
    processor = make_processor()
    for most in (8, 9, 100):
        params = SamplingParams(truncate_prompt_tokens=most)
        assert processor.process_prompt("the cat", params).token_ids == [1, 2]
        for prompt in ("the cat " * 5, [1] * 10):
            with pytest.raises(PromptError, match=f"truncate_prompt_tokens={most} keeps too many"):
                processor.process_prompt(prompt, params)
    kept = SamplingParams(truncate_prompt_tokens=7)
    assert processor.process_prompt("the cat " * 5, kept).token_ids == [2, *[1, 2] * 3]
