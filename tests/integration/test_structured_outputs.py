"""Structured outputs on the embedded model: form, company, async scheduling, preemption, faults."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from engine import LLM, RequestOutput, SamplingParams, SamplingParamsError, StructuredOutputsParams
from tests.integration.conftest import EXACT, QUIET
from tests.support.measures import counter, series

SETTINGS = EXACT | {"kv_cache_memory_bytes": 128 << 20, "max_num_batched_tokens": 96}
PROMPT = "A short answer, please. "
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = r"[a-z]{3,8}@[a-z]{2,9}\.(com|org)"
CHOICES = ["yes", "no", 'may"be\n\\é']
NESTED = 'root ::= "(" root ")" | "[" root root "]" | "x"'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The engine as users have it: a process of its own, two steps in flight."""
    with LLM(**SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    """One step in flight, in this process, and a KV pool in which requests are preempted."""
    with LLM(
        **SETTINGS,
        enable_multiprocessing=False,
        async_scheduling=False,
        num_gpu_blocks_override=13,
        max_model_len=192,
        enable_prefix_caching=False,
    ) as engine:
        yield engine


def params(seed: int | None = None, **values: Any) -> SamplingParams:
    defaults = {"temperature": 0.0 if seed is None else 1.0, "seed": seed, "max_tokens": 60}
    return SamplingParams(**(defaults | values))


def generate(llm: LLM, prompts: Any, wanted: Any) -> list[RequestOutput]:
    return llm.generate(prompts, wanted, use_tqdm=False)


def texts(outputs: list[RequestOutput]) -> list[str]:
    for output in outputs:
        assert output.error is None, output.error
    return [output.outputs[0].text for output in outputs]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def is_nested(text: str) -> bool:
    """A recursive descent through `NESTED`."""

    def after(position: int) -> int:
        head = text[position]
        if head == "x":
            return position + 1
        assert head in "([", text
        end = after(position + 1)
        end = after(end) if head == "[" else end
        assert text[end] == {"(": ")", "[": "]"}[head], text
        return end + 1

    return after(0) == len(text)


def mixed_load() -> tuple[list[str], list[SamplingParams]]:
    """Bound and free requests, greedy and drawn, short prompts and such as are split."""
    forms: list[dict[str, Any] | None] = [
        {"json": SCHEMA},
        None,
        {"regex": REGEX},
        {"grammar": NESTED},
        {"choice": CHOICES},
        None,
        {"json": SCHEMA, "disable_any_whitespace": True},
    ]
    prompts, wanted = [], []
    for number in range(8):
        form = forms[number % len(forms)]
        prompts.append(PROMPT + "word " * (number % 4 * 40))
        wanted.append(
            params(
                None if number % 3 == 0 else number,
                structured_outputs=form,
                max_tokens=16,
                logprobs=2 if number % 2 else None,
                repetition_penalty=1.1 if number % 5 == 0 else 1.0,
            )
        )
    return prompts, wanted


def test_json_follows_its_schema(llm: LLM) -> None:
    outputs = generate(
        llm,
        [PROMPT] * 6,
        [params(s, structured_outputs={"json": SCHEMA}) for s in [None, *range(5)]],
    )
    for text, output in zip(texts(outputs), outputs, strict=True):
        assert output.outputs[0].finish_reason == "stop", text
        value = json.loads(text)
        assert {"name", "age"} <= value.keys() <= SCHEMA["properties"].keys()
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 12
        assert isinstance(value["age"], int)
        assert 0 <= value["age"] <= 150
        assert len(value.get("tags", [])) <= 3
        assert set(value.get("tags", [])) <= {"red", "green"}
    assert len(set(texts(outputs))) > 3, "the seeds make no difference"


def test_the_other_constraints_hold(llm: LLM) -> None:
    seeds = range(3)

    def run(form: StructuredOutputsParams) -> list[str]:
        load = [params(seed, structured_outputs=form, max_tokens=50) for seed in seeds]
        outputs = generate(llm, [PROMPT] * len(load), load)
        assert {output.outputs[0].finish_reason for output in outputs} <= {"stop", "length"}
        return [
            t
            for t, o in zip(texts(outputs), outputs, strict=True)
            if o.outputs[0].stop_reason is None and o.outputs[0].finish_reason == "stop"
        ]

    found = run(StructuredOutputsParams(regex=REGEX))
    assert len(found) == 3
    assert all(re.fullmatch(REGEX, text) for text in found)
    assert set(run(StructuredOutputsParams(choice=CHOICES))) <= set(CHOICES)
    nested = run(StructuredOutputsParams(grammar=NESTED))
    assert nested
    assert all(is_nested(text) for text in nested)
    objects = run(StructuredOutputsParams(json_object=True))
    assert objects
    assert all(isinstance(json.loads(text), dict) for text in objects)


@pytest.mark.slow
def test_company_and_scheduling_change_no_token(llm: LLM, small: LLM) -> None:
    """Two steps in flight or one, spawned or not, preempted or not, alone or in a batch."""
    prompts, wanted = mixed_load()
    together = generate(llm, prompts, wanted)
    texts(together)
    alone = [
        generate(llm, [prompt], one)[0]
        for prompt, one in list(zip(prompts, wanted, strict=True))[:3]
    ]
    assert tokens(alone) == tokens(together[:3])
    num_before = counter(small, "isinglass_preemptions_total")
    preempted = generate(small, prompts, wanted)
    assert tokens(preempted) == tokens(together)
    assert texts(preempted) == texts(together)
    assert counter(small, "isinglass_preemptions_total") > num_before, "nobody was preempted"


def test_a_bad_constraint_ends_only_its_own_request(llm: LLM) -> None:
    bad = [
        {"structural_tag": {"format": {"type": "regex", "pattern": "(a"}}},
        {"grammar": "root ::= missing"},
        {"grammar": 'root ::= ""'},
    ]
    free, bound = params(max_tokens=6), params(structured_outputs={"choice": CHOICES})
    expected = tokens(generate(llm, [PROMPT] * 2, [free, bound]))
    load = [free, *(params(structured_outputs=one) for one in bad), bound]
    for _ in range(2):  # the second time from memory
        outputs = generate(llm, [PROMPT] * len(load), load)
        assert tokens([outputs[0], outputs[-1]]) == expected
        for output, form in zip(outputs[1:-1], bad, strict=True):
            assert output.outputs[0].finish_reason == "error"
            assert output.error_kind == "input"
            assert output.error is not None
            assert output.error.startswith(f"structured_outputs.{next(iter(form))} cannot be used")
    name = "isinglass_structured_output_compiles_total"
    assert series(llm, name)[("invalid",)] == len(bad)


def test_several_samples_share_one_grammar(llm: LLM) -> None:
    def num_compiled() -> float:
        return series(llm, "isinglass_structured_output_compiles_total")[("compiled",)]

    before = num_compiled()
    load = params(3, n=4, structured_outputs={"regex": "[0-9]{4}-[a-f]{3}"})
    (output,) = generate(llm, [PROMPT], load)
    found = [one.text for one in output.outputs]
    assert len(found) == 4
    assert all(re.fullmatch("[0-9]{4}-[a-f]{3}", text) for text in found)
    assert len(set(found)) > 1
    assert num_compiled() == before + 1
    assert counter(llm, "isinglass_structured_output_sampled_rows_total") > 4
    assert series(llm, "isinglass_phase_seconds_total")[("grammar_bitmask",)] > 0


def test_when_a_request_ends(llm: LLM) -> None:
    digits = {"regex": "[0-9]{2,6}"}
    (plain, whole, long, cut) = generate(
        llm,
        [PROMPT] * 4,
        [
            params(structured_outputs=digits),
            # End tokens are not allowed, so that the text is as long as it may be.
            params(structured_outputs=digits, ignore_eos=True),
            # The form goes before the least length.
            params(structured_outputs=digits, min_tokens=50),
            params(structured_outputs={"regex": "[0-9]{200}"}, max_tokens=5),
        ],
    )
    assert re.fullmatch("[0-9]{2,6}", plain.outputs[0].text)
    for output in (whole, long):
        assert re.fullmatch("[0-9]{6}", output.outputs[0].text)
        assert output.outputs[0].finish_reason == "stop"
    assert cut.outputs[0].finish_reason == "length"
    # A stop string within the form ends it there.
    (stopped,) = generate(
        llm, [PROMPT], params(structured_outputs={"regex": "ab,cd,ef"}, stop=[",ef", ",cd"])
    )
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("ab", ",cd")


def test_nothing_allowed_is_left_by_another_parameter(llm: LLM) -> None:
    (letter,) = llm.encode("z")[0][-1:]
    outputs = generate(
        llm,
        [PROMPT] * 2,
        [
            params(structured_outputs={"regex": "[0-9]{3}"}, allowed_token_ids=[letter]),
            params(max_tokens=3),
        ],
    )
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[0].error_kind == "input"
    assert "left by the other parameters" in str(outputs[0].error)
    assert outputs[1].error is None


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    free = params(max_tokens=1, logprobs=3)
    bound = params(max_tokens=1, logprobs=3, structured_outputs={"regex": "qqq"})
    outputs = generate(llm, [PROMPT] * 2, [free, bound])
    rows = [output.outputs[0].logprobs[0] for output in outputs]  # type: ignore[index]
    top = sorted(rows[0].items(), key=lambda item: item[1].rank or 0)[:3]
    for token_id, entry in top:
        assert rows[1][token_id].logprob == pytest.approx(entry.logprob, abs=1e-4)
    (taken,) = outputs[1].outputs[0].token_ids
    assert rows[1][taken].rank > 3, "raw logprobs must not show the mask"


def test_without_a_tokenizer_there_is_no_structured_output(tiny_llama: Any) -> None:
    small = QUIET | {"kv_cache_memory_bytes": 8 << 20, "enable_multiprocessing": False}
    with (
        LLM(tiny_llama, skip_tokenizer_init=True, **small) as engine,
        pytest.raises(SamplingParamsError, match="structured_outputs needs to know the text"),
    ):
        generate(engine, [[1, 2, 3]], params(structured_outputs={"regex": "a"}))
