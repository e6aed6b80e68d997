"""A tour of the offline interface on real engines: what a user of `LLM` may ask and gets."""

import dataclasses
import itertools
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import (
    LLM,
    ConfigError,
    EngineDeadError,
    IsinglassError,
    LogitsProcessor,
    PromptError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    SamplingParamsError,
    TokenizerError,
)
from tests.integration.conftest import EXACT, SMALL
from tests.support.measures import counter, histogram, series
from tests.support.processors import EvenTokensOnly, OnlyToken, RepeatPrompt
from tests.support.reference import random_prompts
from tests.tiny_models import VOCAB_SIZE
from tests.waiting import PATIENCE_S

GREEDY = SamplingParams(temperature=0, max_tokens=8)
FRANCE = "The capital of France is"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The embedded model in a process of its own."""
    settings = EXACT | {"kv_cache_memory_bytes": 256 << 20, "max_num_batched_tokens": 256}
    with LLM(**settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Iterator[LLM]:
    """A tiny model in a process of its own, without a tokenizer."""
    with LLM(tiny_llama, skip_tokenizer_init=True, **SMALL) as engine:
        yield engine


def in_process(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, enable_multiprocessing=False, **(SMALL | settings))


def generate(llm: LLM, prompts: Any, params: Any = GREEDY, **more: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, **more)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


# -- prompts and parameters ------------------------------------------------------------------------


def test_every_form_of_a_prompt(llm: LLM) -> None:
    ids = llm.encode(FRANCE)[0]
    forms = [
        FRANCE,
        ids,
        tuple(ids),
        {"prompt": FRANCE},
        {"prompt_token_ids": ids},
        {"prompt": FRANCE, "prompt_token_ids": ids},
        {"prompt": FRANCE, "cache_salt": "mine"},
    ]
    outputs = generate(llm, forms)
    assert {output.outputs[0].text for output in outputs} == {outputs[0].outputs[0].text}
    assert "Paris" in outputs[0].outputs[0].text
    assert [output.prompt_token_ids for output in outputs] == [ids] * len(forms)
    has_text = [True, False, False, True, False, True, True]
    assert [output.prompt for output in outputs] == [FRANCE if has else None for has in has_text]
    for alone in forms[:2] + forms[3:5]:
        (output,) = generate(llm, alone)
        assert output.outputs[0].text == outputs[0].outputs[0].text
    assert generate(llm, []) == []


def test_outputs_come_in_the_order_of_the_prompts(tiny: LLM) -> None:
    prompts = random_prompts(20, [3, 60, 1, 33, 9], VOCAB_SIZE)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 1, 4, 2, 7)]
    outputs = generate(tiny, prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    ids = [int(output.request_id) for output in outputs]
    assert ids == list(range(ids[0], ids[0] + 5))
    for output, one in zip(outputs, params, strict=True):
        assert output.finished
        completion = output.outputs[0]
        assert len(completion.token_ids) == one.max_tokens or completion.finish_reason == "stop"
    with pytest.raises(PromptError, match="5 prompts, 2 sampling_params"):
        generate(tiny, prompts, params[:2])


def test_without_parameters_the_models_own_are_used(llm: LLM, tiny: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams.from_generation_defaults(
        llm.llm_engine.model_config.generation_defaults
    )
    (output,) = tiny.generate([[5, 6, 7]], use_tqdm=False)
    limit = tiny.get_default_sampling_params().max_tokens
    assert output.outputs[0].finish_reason == "stop" or len(output.outputs[0].token_ids) == limit


def test_truncated_prompt(tiny: LLM) -> None:
    (prompt,) = random_prompts(21, [50], VOCAB_SIZE)
    outputs = generate(tiny, [prompt], GREEDY.clone(truncate_prompt_tokens=7))
    assert outputs[0].prompt_token_ids == prompt[-7:]
    assert tokens(outputs) == tokens(generate(tiny, [prompt[-7:]]))


# -- several sequences, seeds ----------------------------------------------------------------------


def test_n_sequences_differ_and_share_the_prompt(tiny_llama: Path) -> None:
    (prompt,) = random_prompts(22, [50], VOCAB_SIZE)
    params = SamplingParams(n=4, temperature=1.5, max_tokens=12, ignore_eos=True)
    with in_process(tiny_llama) as llm:
        (output,) = generate(llm, [prompt], params)
        assert [one.index for one in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(one.token_ids) for one in output.outputs}) == 4
        # Three of the four find the prompt's full blocks, 48 of its 50 tokens.
        hits = series(llm, "isinglass_prefix_cache_hit_tokens_total")
        assert hits["first",] == 3 * 48
        assert series(llm, "isinglass_requests_finished_total")["length",] == 4
        with pytest.raises(SamplingParamsError, match="greedy"):
            GREEDY.clone(n=2)


def test_a_seed_means_the_same_tokens_everywhere(tiny: LLM, tiny_llama: Path) -> None:
    prompts = random_prompts(23, [20, 3, 45, 30, 41, 1], VOCAB_SIZE)
    params = [
        SamplingParams(temperature=1.1, top_p=0.95, seed=n, max_tokens=30, ignore_eos=True)
        for n in range(6)
    ]
    together = tokens(generate(tiny, prompts, params))
    assert together == tokens(generate(tiny, prompts, params)), "again, from cached prefixes"
    alone = [tokens(generate(tiny, [p], one))[0] for p, one in zip(prompts, params, strict=True)]
    assert together == alone
    for settings in (
        {"num_gpu_blocks_override": 8, "max_model_len": 120},
        {"num_gpu_blocks_override": 8, "max_model_len": 120, "async_scheduling": False},
        {"max_num_batched_tokens": 11},
    ):
        with in_process(tiny_llama, **settings) as other:
            assert tokens(generate(other, prompts, params)) == together
            if "num_gpu_blocks_override" in settings:
                assert counter(other, "isinglass_preemptions_total") > 0
    first, again = params[0], params[0].clone(seed=77)
    assert tokens(generate(tiny, [prompts[0]], again)) != tokens(
        generate(tiny, [prompts[0]], first)
    )


def test_seeds_of_sequences_are_fixed_too(tiny: LLM) -> None:
    (prompt,) = random_prompts(24, [9], VOCAB_SIZE)
    params = SamplingParams(n=3, temperature=1.5, seed=4, max_tokens=10, ignore_eos=True)
    assert tokens(generate(tiny, [prompt], params)) == tokens(generate(tiny, [prompt], params))


def test_the_engines_seed_decides_where_a_request_brings_none(tiny_llama: Path) -> None:
    (prompt,) = random_prompts(25, [9], VOCAB_SIZE)
    params = SamplingParams(temperature=1.5, max_tokens=10, ignore_eos=True)
    texts = []
    for seed in (0, 0, 1):
        with in_process(tiny_llama, seed=seed) as llm:
            texts.append(tokens(generate(llm, [prompt] * 2, params)))
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1], "requests of one engine draw apart"


# -- ends --------------------------------------------------------------------------------------


def stream(llm: LLM, prompt: Any, params: SamplingParams) -> list[RequestOutput]:
    """All outputs of one request, driven through `LLMEngine`."""
    engine = llm.llm_engine
    engine.add_request("streamed", prompt, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_are_never_streamed_in_part(llm: LLM, include: bool) -> None:
    prompt = "Once upon a time there was a little girl who"
    params = SamplingParams(temperature=0, max_tokens=32, output_kind=RequestOutputKind.DELTA)
    text = "".join(output.outputs[0].text for output in stream(llm, prompt, params))
    assert len(text) > 60
    for begin, length in [(12, 1), (20, 4), (33, 17)]:
        stop = text[begin : begin + length]
        end = text.find(stop) + (length if include else 0)
        more = params.clone(stop=["never said", stop], include_stop_str_in_output=include)
        outputs = stream(llm, prompt, more)
        pieces = [output.outputs[0].text for output in outputs]
        assert "".join(pieces) == text[:end]
        for streamed in itertools.accumulate(pieces):
            assert text[:end].startswith(streamed)
        assert outputs[-1].outputs[0].finish_reason == "stop"
        assert outputs[-1].outputs[0].stop_reason == stop
        whole = generate(llm, prompt, more)[0].outputs[0]
        assert (whole.text, whole.stop_reason) == (text[:end], stop)
    (plain,) = generate(llm, prompt, params.clone(stop=None))
    assert plain.outputs[0].text == text, "the engine forgets a request that a stop string ended"


def test_cumulative_and_delta_streams_agree(llm: LLM) -> None:
    cumulative = stream(llm, FRANCE, GREEDY)
    delta = stream(llm, FRANCE, GREEDY.clone(output_kind=RequestOutputKind.DELTA))
    final = stream(llm, FRANCE, GREEDY.clone(output_kind=RequestOutputKind.FINAL_ONLY))
    assert len(final) == 1
    text, token_ids = final[0].outputs[0].text, list(final[0].outputs[0].token_ids)
    assert cumulative[-1].outputs[0].text == text
    assert "".join(output.outputs[0].text for output in delta) == text
    assert [i for output in delta for i in output.outputs[0].token_ids] == token_ids
    lengths = [len(output.outputs[0].token_ids) for output in cumulative]
    assert lengths == sorted(lengths)
    assert lengths[-1] == len(token_ids)


def test_stop_token_ids(tiny: LLM) -> None:
    (prompt,) = random_prompts(26, [12], VOCAB_SIZE)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (token_ids,) = tokens(generate(tiny, prompt, params))[0]
    wanted = token_ids[4]
    (output,) = generate(tiny, prompt, params.clone(stop_token_ids=[wanted]))
    completion = output.outputs[0]
    assert list(completion.token_ids) == token_ids[: token_ids.index(wanted) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", wanted)


def test_end_of_sequence_is_obeyed_ignored_or_put_off(llm: LLM) -> None:
    (eos,) = llm.llm_engine.model_config.eos_token_ids
    ending = GREEDY.clone(logit_bias={eos: 100.0})
    (obeyed,) = generate(llm, FRANCE, ending)[0].outputs
    assert (list(obeyed.token_ids), obeyed.text) == ([eos], "")
    assert (obeyed.finish_reason, obeyed.stop_reason) == ("stop", None)
    (ignored,) = generate(llm, FRANCE, ending.clone(ignore_eos=True))[0].outputs
    assert list(ignored.token_ids) == [eos] * 8
    assert ignored.finish_reason == "length"
    (later,) = generate(llm, FRANCE, ending.clone(min_tokens=5))[0].outputs
    assert list(later.token_ids).index(eos) == 5 == len(later.token_ids) - 1
    for include in (False, True):
        more = ending.clone(skip_special_tokens=False, include_stop_str_in_output=include)
        (shown,) = generate(llm, FRANCE, more)[0].outputs
        assert shown.text == (llm.decode([eos], skip_special_tokens=False) if include else "")


def test_choice_of_tokens(llm: LLM) -> None:
    plain = generate(llm, FRANCE)[0].outputs[0]
    assert "Paris" in plain.text
    banned = generate(llm, FRANCE, GREEDY.clone(bad_words=["Paris"]))[0].outputs[0]
    assert "Paris" not in banned.text
    allowed = sorted(set(llm.encode("red green blue")[0]))
    only = generate(llm, FRANCE, GREEDY.clone(allowed_token_ids=allowed))[0].outputs[0]
    assert set(only.token_ids) <= set(allowed)
    (blue,) = llm.encode(" blue")[0][-1:]
    biased = generate(llm, FRANCE, GREEDY.clone(logit_bias={blue: 100.0}))[0].outputs[0]
    assert set(biased.token_ids) == {blue}


def test_text_can_be_left_out(llm: LLM) -> None:
    (output,) = generate(llm, FRANCE, GREEDY.clone(detokenize=False))
    assert output.outputs[0].text == ""
    assert tokens([output]) == tokens(generate(llm, FRANCE))


# -- around generation -----------------------------------------------------------------------------


def test_chat(llm: LLM) -> None:
    def ask(country: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"What is the capital of {country}?"}]

    params = SamplingParams(temperature=0, max_tokens=24)
    (output,) = llm.chat(ask("Japan"), params, use_tqdm=False)
    assert "Tokyo" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.prompt is not None
    assert output.prompt.endswith("<|im_start|>assistant\n")
    both = llm.chat([ask("Peru"), ask("Japan")], params, use_tqdm=False)
    assert both[1].outputs[0].text == output.outputs[0].text
    assert "Peru" in llm.decode(both[0].prompt_token_ids)
    for wrong in ([], "What?", [{"content": "no role"}]):
        with pytest.raises(PromptError):
            llm.chat(wrong, params, use_tqdm=False)


def test_encode_and_decode(llm: LLM) -> None:
    texts = ["Hello, world!", " Grüße aus Köln 🙂", ""]
    encoded = llm.encode(texts)
    assert [llm.decode(ids) for ids in encoded] == texts
    assert llm.encode(texts[0]) == encoded[:1]


def test_reset_prefix_cache(tiny: LLM) -> None:
    prompts = random_prompts(27, [70, 40], VOCAB_SIZE)
    generate(tiny, prompts)
    assert [output.num_cached_tokens for output in generate(tiny, prompts)] == [64, 32]
    assert tiny.reset_prefix_cache() is True
    assert [output.num_cached_tokens for output in generate(tiny, prompts)] == [0, 0]


@pytest.mark.parametrize("multiprocessing", [True, False])
def test_a_handler_of_a_signal_cannot_call_the_engine_that_it_interrupts(
    tiny: LLM, tiny_llama: Path, multiprocessing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny if multiprocessing else in_process(tiny_llama)
    expected = generate(llm, [1, 2, 3])
    step, errors = llm.llm_engine.step, []

    def interrupted() -> Any:
        signal.raise_signal(signal.SIGALRM)
        return step()

    def handle(*_: Any) -> None:
        for call in (lambda: generate(llm, [4, 5]), llm.reset_prefix_cache, llm.profile_status):
            with pytest.raises(IsinglassError, match="Call from another thread") as caught:
                call()
            errors.append(caught.value)

    monkeypatch.setattr(llm.llm_engine, "step", interrupted)
    before = signal.signal(signal.SIGALRM, handle)
    try:
        assert tokens(generate(llm, [1, 2, 3])) == tokens(expected)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(errors) >= 3
    monkeypatch.undo()
    assert tokens(generate(llm, [1, 2, 3])) == tokens(expected)
    if not multiprocessing:
        llm.shutdown()


def test_prefixes_are_not_reset_amid_another_threads_generation(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = random_prompts(30, [40], VOCAB_SIZE)
    step = tiny.llm_engine.step
    has_begun = threading.Event()
    resets: list[bool] = []

    def slow_step() -> Any:
        outputs = step()
        has_begun.set()
        if not resets:
            time.sleep(0.02)
        return outputs

    def reset() -> None:
        assert has_begun.wait(PATIENCE_S)
        resets.append(tiny.reset_prefix_cache())

    monkeypatch.setattr(tiny.llm_engine, "step", slow_step)
    thread = threading.Thread(target=reset)
    thread.start()
    generate(tiny, prompt, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    is_over = not thread.is_alive()
    thread.join()
    assert (resets, is_over) == ([False], True)
    monkeypatch.undo()
    assert generate(tiny, prompt)[0].num_cached_tokens == 32


def test_the_audit_has_every_option_of_observability(tiny: LLM) -> None:
    lines = {line.option: line for line in tiny.observability_audit()}
    options = {option for names in lines for option in names.split(", ")}
    assert options >= {spec.name for spec in dataclasses.fields(tiny.config.observability)}
    assert str(lines["trace_dir"]) == "trace_dir: off (start_trace() begins one)"
    assert str(lines["log_format"]).startswith("log_format: on (")
    assert lines["otlp_traces_endpoint"].state == "off"
    assert not [line for line in lines.values() if line.state == "without effect"]


def test_a_cache_salt_keeps_prefixes_apart(tiny: LLM) -> None:
    (ids,) = random_prompts(28, [40], VOCAB_SIZE)

    def cached(salt: str | None) -> int:
        prompt = {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {})
        return generate(tiny, prompt)[0].num_cached_tokens

    assert [cached(salt) for salt in ("a", "b", "a", None, None)] == [0, 0, 32, 0, 32]


@pytest.mark.parametrize("multiprocessing", [True, False])
def test_metrics_agree_with_the_outputs(tiny_llama: Path, multiprocessing: bool) -> None:
    prompts = random_prompts(29, [1, 20, 64, 90, 33], VOCAB_SIZE)
    params = SamplingParams(temperature=0, max_tokens=11)
    with LLM(
        tiny_llama,
        skip_tokenizer_init=True,
        enable_multiprocessing=multiprocessing,
        num_gpu_blocks_override=60,
        **SMALL,
    ) as llm:
        outputs = generate(llm, prompts, params) + generate(llm, prompts[2:], params)
        num_requests = len(outputs)
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert num_cached == 48 + 80 + 32

        def total(name: str) -> float:
            return counter(llm, f"isinglass_{name}")

        assert total("prompt_tokens_total") == num_prompt
        assert total("cached_prompt_tokens_total") == num_cached
        assert total("generation_tokens_total") == num_output
        finished = series(llm, "isinglass_requests_finished_total")
        assert {reason: finished[reason,] for reason in set(reasons)} == {
            reason: reasons.count(reason) for reason in reasons
        }
        assert sum(finished.values()) == num_requests
        assert series(llm, "isinglass_prefix_cache_hit_tokens_total")["first",] == num_cached
        assert series(llm, "isinglass_prefix_cache_query_tokens_total")["first",] == num_prompt
        blocks = series(llm, "isinglass_kv_blocks")
        assert sum(blocks.values()) == llm.llm_engine.ready.num_gpu_blocks == 60
        assert blocks["used",] == 0
        assert blocks["cached_free",] > 0
        # A request's last token is never computed; one that the end-of-sequence token ended may
        # have been computed once more by the step that was in flight.
        scheduled = series(llm, "isinglass_scheduled_tokens_total")
        assert scheduled["context",] == num_prompt - num_cached
        surplus = scheduled["generation",] - (num_output - num_requests)
        assert 0 <= surplus <= reasons.count("stop")
        num_steps, num_tokens = histogram(llm, "isinglass_step_tokens")
        assert num_steps == total("steps_total")
        assert num_tokens == sum(scheduled.values())
        assert histogram(llm, "isinglass_step_duration_seconds")[0] == num_steps
        for name in ("time_to_first_token", "request_e2e", "request_queue", "request_decode"):
            assert histogram(llm, f"isinglass_{name}_seconds")[0] == num_requests
        parts = ("queue", "prefill", "decode", "preempted")
        assert histogram(llm, "isinglass_request_e2e_seconds")[1] == pytest.approx(
            sum(histogram(llm, f"isinglass_request_{part}_seconds")[1] for part in parts)
        )
        assert histogram(llm, "isinglass_inter_token_latency_seconds")[0] == (
            num_output - num_requests
        )
        assert histogram(llm, "isinglass_request_generation_tokens") == (num_requests, num_output)
        assert total("requests_running") == total("requests_waiting") == 0
        assert total("telemetry_drops_total") == total("telemetry_negative_values_total") == 0


def test_metrics_can_be_left_out(tiny_llama: Path) -> None:
    with in_process(tiny_llama, disable_log_stats=True) as llm:
        assert len(generate(llm, [[4, 5]])) == 1
        with pytest.raises(IsinglassError, match="disable_log_stats"):
            llm.get_metrics()


# -- limits and errors -----------------------------------------------------------------------------


def test_a_context_that_does_not_fit_is_reduced_and_said(
    tiny_llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = SMALL | {"num_gpu_blocks_override": 4}
    with LLM(tiny_llama, skip_tokenizer_init=True, **settings) as llm:
        assert llm.config.model.max_model_len == 64
        assert llm.llm_engine.ready.max_model_len == 64
        with pytest.raises(PromptError, match="64"):
            generate(llm, random_prompts(30, [64], VOCAB_SIZE))
        prompt = random_prompts(30, [60], VOCAB_SIZE)
        (output,) = generate(llm, prompt, GREEDY.clone(ignore_eos=True, max_tokens=None))
        assert len(output.outputs[0].token_ids) == 4
        assert output.outputs[0].finish_reason == "length"
    assert "max_model_len is reduced from 256 to 64" in capfd.readouterr().err


def test_bad_input_is_named_and_hurts_nobody(tiny: LLM) -> None:
    (good,) = random_prompts(31, [10], VOCAB_SIZE)
    before = tokens(generate(tiny, [good]))
    bad_prompts: list[Any] = [
        [],
        [VOCAB_SIZE],
        [-1],
        [1, "2"],
        [True],
        [3] * 256,
        "text without a tokenizer",
        {"prompt_token_id": [1]},
        {"prompt_token_ids": [1], "cache_salt": ""},
        3.5,
        None,
    ]
    for bad in bad_prompts:
        with pytest.raises(PromptError):
            generate(tiny, [good, bad])
    bad_params: list[Any] = [
        {"logit_bias": {VOCAB_SIZE: 1.0}},
        {"allowed_token_ids": [VOCAB_SIZE]},
        {"stop": ["x"]},
        {"bad_words": ["x"]},
        {"logprobs": VOCAB_SIZE + 1},
    ]
    for fields in bad_params:
        with pytest.raises(SamplingParamsError):
            generate(tiny, [good], GREEDY.clone(**fields))
    with pytest.raises(SamplingParamsError, match="SamplingParams"):
        generate(tiny, [good], [{"temperature": 0}])
    with pytest.raises(ConfigError, match="priority"):
        generate(tiny, [good], priority=[1])
    assert tokens(generate(tiny, [good])) == before
    assert tiny.llm_engine.call_utility("check_integrity") is True


def test_a_single_bad_prompt_is_refused_too(llm: LLM) -> None:
    for bad in ("", [], {"prompt": 3}, ["ok", ""]):
        if bad == []:
            continue  # no prompts at all: nothing to do
        with pytest.raises(PromptError):
            generate(llm, bad)
    assert "Paris" in generate(llm, FRANCE)[0].outputs[0].text


def test_a_prompt_of_the_longest_length(tiny: LLM) -> None:
    (prompt,) = random_prompts(32, [255], VOCAB_SIZE)
    (output,) = generate(tiny, [prompt], GREEDY.clone(ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_an_unknown_utility_fails_alone(tiny: LLM) -> None:
    with pytest.raises(IsinglassError, match="no utility"):
        tiny.llm_engine.call_utility("shutdown")
    assert len(generate(tiny, [[4, 5]])) == 1


# -- scheduling, processors ------------------------------------------------------------------------


def test_priorities_decide_who_goes_first(tiny_llama: Path) -> None:
    prompts = random_prompts(33, [5, 5, 5, 5], VOCAB_SIZE)
    settings = {"scheduling_policy": "priority", "max_num_seqs": 1}
    with in_process(tiny_llama, **settings) as llm:
        outputs = generate(llm, prompts, priority=[2, -1, 1, 2])
        by_start = sorted(range(4), key=lambda i: outputs[i].metrics.first_scheduled_ns)
        assert by_start == [1, 2, 0, 3]
        with_equal = generate(llm, prompts)
        starts = [output.metrics.first_scheduled_ns for output in with_equal]
        assert starts == sorted(starts)


def test_low_priority_gives_way_and_comes_back(tiny_llama: Path) -> None:
    prompts = random_prompts(34, [40, 40, 40], VOCAB_SIZE)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with in_process(tiny_llama) as llm:
        expected = tokens(generate(llm, prompts, params))
    settings = {
        "scheduling_policy": "priority",
        "num_gpu_blocks_override": 14,
        "max_model_len": 112,
    }
    with in_process(tiny_llama, **settings) as llm:
        outputs = generate(llm, prompts, params, priority=[5, 0, 0])
        assert tokens(outputs) == expected
        assert len(outputs[0].metrics.preemptions) > 0
        assert outputs[1].metrics.preemptions == []


@pytest.mark.parametrize("processor", [EvenTokensOnly, "tests.support.processors:EvenTokensOnly"])
@pytest.mark.parametrize("multiprocessing", [True, False])
def test_logits_processor_by_class_and_by_name(
    processor: str | type[LogitsProcessor], multiprocessing: bool, tiny_llama: Path
) -> None:
    with LLM(
        tiny_llama,
        skip_tokenizer_init=True,
        enable_multiprocessing=multiprocessing,
        logits_processors=[processor],
        **SMALL,
    ) as llm:
        outputs = generate(llm, random_prompts(35, [3, 20], VOCAB_SIZE))
    assert all(token_id % 2 == 0 for (one,) in tokens(outputs) for token_id in one)


def test_processors_of_single_requests(tiny_llama: Path) -> None:
    prompts = random_prompts(36, [4, 7, 5, 6], VOCAB_SIZE)
    extras = [None, {"only_token": 17}, {"only_token": 40, "after": 3}, {"repeat_prompt": True}]
    params = [
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, extra_args=extra)
        for extra in extras
    ]
    processors = [OnlyToken, RepeatPrompt]
    with LLM(tiny_llama, skip_tokenizer_init=True, logits_processors=processors, **SMALL) as llm:
        (plain,), (only,), (later,), (repeated,) = tokens(generate(llm, prompts, params))
        with pytest.raises(SamplingParamsError, match="only_token must be an integer"):
            generate(llm, prompts, SamplingParams(extra_args={"only_token": "x"}))
    with in_process(tiny_llama) as llm:
        bare = [one.clone(extra_args=None) for one in params]
        (plain_alone,), _, (unforced,), _ = tokens(generate(llm, prompts, bare))
    assert plain == plain_alone
    assert only == [17] * 9
    assert later[:3] == unforced[:3]
    assert later[3:] == [40] * 6
    assert repeated == (prompts[3] * 2)[:9]


@pytest.mark.slow
def test_processors_that_cannot_be_loaded(tiny_llama: Path) -> None:
    class Local(EvenTokensOnly):
        pass

    for wrong in (Local, "no.such.module:Thing", "tests.support.processors:Nothing", int):
        with pytest.raises(ConfigError):
            LLM(tiny_llama, skip_tokenizer_init=True, logits_processors=[wrong], **SMALL)


# -- lifetimes ---------------------------------------------------------------------------------


def test_without_a_tokenizer(tiny: LLM) -> None:
    (output,) = generate(tiny, [[4, 5]])
    assert output.outputs[0].text == ""
    for call in (tiny.get_tokenizer, lambda: tiny.encode("x"), lambda: tiny.decode([4])):
        with pytest.raises(TokenizerError, match="skip_tokenizer_init"):
            call()


@pytest.mark.parametrize("multiprocessing", [True, False])
def test_after_the_context_manager_the_engine_is_gone(
    tiny_llama: Path, multiprocessing: bool
) -> None:
    with LLM(
        tiny_llama, skip_tokenizer_init=True, enable_multiprocessing=multiprocessing, **SMALL
    ) as llm:
        generate(llm, [[4, 5]])
    llm.shutdown()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="shut down"):
            generate(llm, [[4, 5]])


def test_two_engines_side_by_side(llm: LLM, tiny: LLM) -> None:
    assert llm.llm_engine.engine_core.core_pid != tiny.llm_engine.engine_core.core_pid
    text, (ids,) = generate(llm, FRANCE)[0].outputs[0].text, random_prompts(37, [8], VOCAB_SIZE)
    other = tokens(generate(tiny, ids))
    results: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda: results.update(large=generate(llm, [FRANCE] * 3))),
        threading.Thread(target=lambda: results.update(small=generate(tiny, [ids] * 3))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    assert [output.outputs[0].text for output in results["large"]] == [text] * 3
    assert tokens(results["small"]) == other * 3


def test_two_threads_share_an_engine(tiny: LLM) -> None:
    batches = [random_prompts(seed, [5, 30, 17], VOCAB_SIZE) for seed in range(40, 48)]
    expected = [tokens(generate(tiny, prompts)) for prompts in batches]
    results: list[Any] = [None] * len(batches)

    def work(numbers: range) -> None:
        for number in numbers:
            results[number] = tokens(generate(tiny, batches[number]))

    threads = [threading.Thread(target=work, args=(range(k, 8, 2),)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    assert results == expected


def test_aborted_requests_end_and_their_ids_are_free_again(tiny: LLM) -> None:
    engine = tiny.llm_engine
    (prompt,) = random_prompts(38, [12], VOCAB_SIZE)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    engine.add_request("a", prompt, params)
    engine.add_request("b", prompt, params.clone(max_tokens=5))
    with pytest.raises(PromptError, match="unfinished"):
        engine.add_request("a", prompt, params)
    outputs = engine.step()
    engine.abort_request(["a", "unknown"])
    while engine.has_unfinished_requests():
        outputs += engine.step()
    last = {output.request_id: output.outputs[0] for output in outputs}
    assert last["a"].finish_reason == "abort"
    assert len(last["a"].token_ids) < 200
    assert (last["b"].finish_reason, len(last["b"].token_ids)) == ("length", 5)
    engine.add_request("a", prompt, params)
    engine.discard_request(["a"])
    assert not engine.has_unfinished_requests()
    engine.add_request("a", prompt, params.clone(max_tokens=5))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert list(outputs[-1].outputs[0].token_ids) == list(last["b"].token_ids)
    assert engine.call_utility("check_integrity") is True
