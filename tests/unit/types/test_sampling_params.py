"""SamplingParams: every check with its message, the wire, and what the engine fills in."""

import logging
import math

import msgspec
import numpy as np
import pytest

from engine.errors import SamplingParamsError
from engine.types.sampling import RequestOutputKind, SamplingParams


def nested(depth: int) -> dict:
    """A dictionary of lists, so deep."""
    value: list = []
    for _ in range(depth):
        value = [value]
    return {"a": value}


REJECTED = [
    ("n", 0, "from 1 to"),
    ("n", 100_000, "from 1 to"),
    ("n", True, "integer"),
    ("n", 1.0, "integer"),
    ("presence_penalty", 2.1, r"\[-2, 2\]"),
    ("presence_penalty", math.nan, r"\[-2, 2\]"),
    ("frequency_penalty", -2.1, r"\[-2, 2\]"),
    ("repetition_penalty", 0.0, "above 0"),
    ("repetition_penalty", -1.0, "above 0"),
    ("repetition_penalty", math.inf, "1e30"),
    ("temperature", -0.1, r"\[0, 1e30\]"),
    ("temperature", 1e39, r"\[0, 1e30\]"),
    ("temperature", math.nan, "1e30"),
    ("temperature", math.inf, "1e30"),
    ("temperature", "hot", "number"),
    ("temperature", True, "number"),
    ("temperature", None, "number"),
    ("temperature", 10**400, "1e30"),
    ("top_p", 0.0, r"\(0, 1\]"),
    ("top_p", 1.01, r"\(0, 1\]"),
    ("top_p", math.nan, r"\(0, 1\]"),
    ("top_k", -2, "at least 1"),
    ("top_k", 2.5, "integer"),
    ("top_k", False, "integer"),
    ("min_p", -0.1, r"\[0, 1\]"),
    ("min_p", 1.1, r"\[0, 1\]"),
    ("seed", 1.5, "integer"),
    ("seed", 2**64, "64 bits"),
    ("seed", -(2**63) - 1, "64 bits"),
    ("stop", "", "not empty"),
    ("stop", ["a", ""], "not empty"),
    ("stop", [1], "strings"),
    ("stop", 7, "list"),
    ("stop_token_ids", [1.0], "token ids"),
    ("stop_token_ids", [True], "token ids"),
    ("stop_token_ids", [-1], "token ids"),
    ("stop_token_ids", "12", "list"),
    ("stop_token_ids", 3, "list"),
    ("ignore_eos", 1, "True or False"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -5, "at least 1"),
    ("max_tokens", True, "at least 1"),
    ("min_tokens", -1, "at least 0"),
    ("logprobs", -2, "at least 0"),
    ("logprobs", True, "at least 0"),
    ("logprobs", 1.0, "at least 0"),
    ("prompt_logprobs", -2, "at least 0"),
    ("detokenize", None, "True or False"),
    ("skip_special_tokens", "yes", "True or False"),
    ("spaces_between_special_tokens", 0, "True or False"),
    ("include_stop_str_in_output", 1, "True or False"),
    ("logit_bias", [1, 2], "mapping"),
    ("logit_bias", {1: math.nan}, "finite"),
    ("logit_bias", {1: math.inf}, "finite"),
    ("logit_bias", {"one": 1.0}, "token ids"),
    ("logit_bias", {-1: 1.0}, "token ids"),
    ("logit_bias", {1: "x"}, "finite numbers"),
    ("allowed_token_ids", [], "at least one"),
    ("allowed_token_ids", ["1"], "token ids"),
    ("bad_words", [""], "not empty"),
    ("bad_words", "word", "list"),
    ("output_kind", "delta", "RequestOutputKind"),
    ("extra_args", [1], "dictionary"),
    ("extra_args", {1: 2}, "string keys"),
    ("extra_args", {"a": object()}, "MessagePack"),
    ("extra_args", {"a": msgspec.Raw(b"\x01")}, "MessagePack .* a Raw"),
    ("extra_args", {"a": [msgspec.msgpack.Ext(5, b"x")]}, "MessagePack .* a Ext"),
    ("extra_args", {"a": {"b": {1, 2}}}, "MessagePack .* a set"),
    ("extra_args", {"a": np.float32(1)}, "MessagePack .* a float32"),
    ("extra_args", {"a": np.zeros(2)}, "MessagePack .* a ndarray"),
    ("extra_args", {"a": {(1, (2,)): 3}}, "nested deeper than 32"),
    ("extra_args", {"a": "\udc80"}, "MessagePack"),
    ("extra_args", nested(40), "nested deeper than 32"),
    ("extra_args", nested(100_000), "nested deeper than 32"),
    ("stop", ["a\ud800"], "lone surrogates"),
    ("bad_words", ["\udfff"], "lone surrogates"),
    ("bad_words_token_ids", [[]], "none of them empty"),
    ("bad_words_token_ids", [[1], []], "none of them empty"),
    ("bad_words_token_ids", 5, "list"),
    ("bad_words_token_ids", [5], "lists of token ids"),
    ("bad_words_token_ids", ["12"], "lists of token ids"),
    ("bad_words_token_ids", [[1.5]], "lists of token ids"),
    ("extra_args", {"a": 2**70}, "MessagePack"),
    ("truncate_prompt_tokens", 0, "at least 1"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), REJECTED)
def test_a_bad_value_is_named_with_what_is_allowed(name, value, allowed):
    with pytest.raises(SamplingParamsError, match=allowed) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [("temprature", "'temperature'"), ("max_token", "'max_tokens'"), ("xyzzy", None)],
)
def test_an_unknown_parameter_gets_a_hint(name, hint):
    for make in (SamplingParams, SamplingParams().clone):
        with pytest.raises(SamplingParamsError, match=f"unknown sampling parameter '{name}'") as e:
            make(**{name: 1})
        assert ("Did you mean" in str(e.value)) == (hint is not None)
        assert (hint or "") in str(e.value)


def test_values_come_by_name():
    with pytest.raises(SamplingParamsError, match=r"by name, such as temperature=0.8; got 0.5"):
        SamplingParams(0.5)


def test_what_is_put_into_extra_args_later_is_found_when_the_engine_copies():
    params = SamplingParams(extra_args={"a": 1})
    for bad in (params.extra_args, object(), nested(50_000)):
        params.extra_args["a"] = bad
        with pytest.raises(SamplingParamsError, match="extra_args"):
            params.clone()


def test_plain_extra_args_arrive_as_they_are():
    extra = {"a": [None, True, -5, 2**64 - 1, 1.5, "é", b"\xff", {"deep": {"er": [[]]}}]}
    params = SamplingParams(extra_args=extra)
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert back.extra_args == extra


def test_numbers_too_long_to_print_are_rejected_by_name():
    with pytest.raises(SamplingParamsError, match=r"top_k must be an integer.*too long to show"):
        SamplingParams(top_k=10**5000)
    with pytest.raises(SamplingParamsError, match="logit_bias must be keyed by token ids"):
        SamplingParams(logit_bias={"9" * 5000: 1.0})


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        1,
        1,
        1,
        0,
        0,
    )
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    assert params.detokenize
    assert params.skip_special_tokens
    assert params.spaces_between_special_tokens
    assert not params.ignore_eos
    assert not params.include_stop_str_in_output
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert not params.is_greedy


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ("x", "y", "x")}, {"stop": ["x", "y"]}),
        ({"stop_token_ids": np.array([3, 3, 4])}, {"stop_token_ids": [3, 4]}),
        ({"stop_token_ids": [5]}, {"all_stop_token_ids": frozenset({5})}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": np.int64(3)}, {"seed": 3}),
        ({"temperature": np.float32(0.5)}, {"temperature": 0.5}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"logit_bias": {"7": 200, 8: -200}}, {"logit_bias": {7: 100.0, 8: -100.0}}),
        ({"logprobs": -1}, {"logprobs": -1}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"max_tokens": None, "min_tokens": 99}, {"max_tokens": None, "min_tokens": 99}),
        ({"allowed_token_ids": (2, 1, 2)}, {"allowed_token_ids": [2, 1]}),
    ],
)
def test_values_are_normalised(given, kept):
    params = SamplingParams(**given)
    for name, value in kept.items():
        assert getattr(params, name) == value
        assert type(getattr(params, name)) is type(value)


def test_greedy_ignores_truncation_and_refuses_several_completions():
    params = SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.2)
    assert params.is_greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)
    with pytest.raises(SamplingParamsError, match="n must be 1 when using greedy sampling, got 3"):
        SamplingParams(temperature=0, n=3)


def test_a_tiny_temperature_is_raised_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        params = SamplingParams(temperature=0.001)
    assert params.temperature == 0.01
    assert "temperature" in caplog.text
    caplog.clear()
    msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert not caplog.text


def test_contradictions():
    with pytest.raises(SamplingParamsError, match="detokenize=True"):
        SamplingParams(stop=["x"], detokenize=False)
    with pytest.raises(SamplingParamsError, match="min_tokens must be at most max_tokens=4, got 5"):
        SamplingParams(max_tokens=4, min_tokens=5)


def full_params() -> SamplingParams:
    return SamplingParams(
        n=2,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=2**64 - 1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.3,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        max_tokens=None,
        min_tokens=3,
        logprobs=5,
        prompt_logprobs=-1,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        include_stop_str_in_output=True,
        logit_bias={3: 1.5},
        allowed_token_ids=[3, 4],
        bad_words=["bad"],
        output_kind=RequestOutputKind.DELTA,
        extra_args={"deep": {"list": [1, "two", None, 2.5]}},
        truncate_prompt_tokens=9,
        structured_outputs={"regex": "[ab]+"},
    )


def test_everything_survives_the_wire():
    params = full_params().update_from_model(eos_token_ids=(7,))
    params.update_from_tokenizer(lambda text: [len(text), 6])
    encoded = msgspec.msgpack.encode(params)
    decoded = msgspec.msgpack.decode(encoded, type=SamplingParams)
    assert decoded == params
    defaults = SamplingParams()
    for name in SamplingParams.__struct_fields__:
        changed = getattr(params, name) != getattr(defaults, name)
        assert changed or name == "detokenize", f"{name} is not covered by this test"
    assert len(msgspec.msgpack.encode(SamplingParams())) < 60


def test_a_bad_value_on_the_wire_is_rejected():
    with pytest.raises(msgspec.ValidationError, match="top_p"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"top_p": 7.0}), type=SamplingParams)


def test_instances_are_frozen_and_clones_are_independent():
    params = full_params()
    with pytest.raises(AttributeError):
        params.n = 3
    clone = params.clone()
    assert clone == params
    clone.stop.append("c")
    clone.extra_args["deep"]["list"].append(1)
    assert params == full_params()
    changed = params.clone(n=1, seed=3)
    assert (changed.n, changed.seed, changed.top_k) == (1, 3, params.top_k)
    with pytest.raises(SamplingParamsError, match="top_p"):
        params.clone(top_p=2.0)


@pytest.mark.parametrize(
    "given",
    [{"stop_token_ids": [100]}, {"allowed_token_ids": [1, 100]}, {"logit_bias": {100: 1.0}}],
)
def test_token_ids_must_be_in_the_vocabulary(given):
    (name,) = given
    params = SamplingParams(**given)
    params.verify(vocab_size=101, max_logprobs=20)
    with pytest.raises(SamplingParamsError, match=f"{name}.*size 100, got .*100"):
        params.verify(vocab_size=100, max_logprobs=20)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_the_number_of_logprobs_is_limited(name):
    SamplingParams(**{name: 20}).verify(vocab_size=100, max_logprobs=20)
    SamplingParams(**{name: -1}).verify(vocab_size=100, max_logprobs=-1)
    SamplingParams(**{name: -1}).verify(vocab_size=100, max_logprobs=100)
    for value, limit in ((21, 20), (-1, 20), (101, -1)):
        with pytest.raises(SamplingParamsError, match=f"{name} must be at most"):
            SamplingParams(**{name: value}).verify(vocab_size=100, max_logprobs=limit)


def test_stop_tokens_of_the_model():
    params = SamplingParams(stop_token_ids=[1])
    assert params.update_from_model(eos_token_ids=(7, 8)).all_stop_token_ids == {1, 7, 8}
    ignoring = SamplingParams(stop_token_ids=[1], ignore_eos=True)
    assert ignoring.update_from_model(eos_token_ids=(7, 8)).all_stop_token_ids == {1}
    with pytest.raises(SamplingParamsError, match="only stop tokens"):
        SamplingParams(allowed_token_ids=[7], min_tokens=1).update_from_model(eos_token_ids=(7,))


def test_bad_words_are_encoded_at_the_start_and_after_a_space():
    table = {
        "cat": [5],
        " cat": [6],  # the space melts into the token: both forms count
        "ox": [7],
        " ox": [1, 7],  # longer: the start form covers it
        "long word": [8, 9],
        " long word": [10, 9],
    }
    params = SamplingParams(bad_words=["cat", " ox", "long word"])
    params.update_from_tokenizer(table.__getitem__)
    assert params.bad_words_token_ids == [[5], [6], [7], [8, 9], [10, 9]]
    with pytest.raises(SamplingParamsError, match="bad_words must be words"):
        SamplingParams(bad_words=["x"]).update_from_tokenizer(lambda text: [])
    with pytest.raises(SamplingParamsError, match="all forbidden by bad_words"):
        SamplingParams(bad_words=["cat"], allowed_token_ids=[5, 6]).update_from_tokenizer(
            table.__getitem__
        )


def test_generation_config_gives_defaults():
    params = SamplingParams.from_generation_defaults(
        {
            "temperature": 0.6,
            "top_k": 20,
            "top_p": None,
            "max_new_tokens": 77,
            "repetition_penalty": 1.1,
            "eos_token_id": 2,
            "do_sample": True,
        }
    )
    assert params == SamplingParams(
        temperature=0.6, top_k=20, max_tokens=77, repetition_penalty=1.1
    )


@pytest.mark.parametrize("bad", [True, 1.0, "1", None, -1, 2**31])
def test_one_wrong_id_in_a_long_list_is_found(bad):
    token_ids = list(range(1000))
    with pytest.raises(SamplingParamsError, match="allowed_token_ids must be a list of token ids"):
        SamplingParams(allowed_token_ids=[*token_ids, bad])


def test_a_list_as_long_as_a_vocabulary_is_not_gone_through_in_python(monkeypatch):
    token_ids = list(range(50_000, 0, -1)) * 2

    def one_by_one(name, *arguments):
        raise AssertionError(f"{name} was checked one by one")

    monkeypatch.setattr("engine.types.sampling_checks.checked_integer", one_by_one)
    params = SamplingParams(allowed_token_ids=token_ids)
    assert params.allowed_token_ids == token_ids[:50_000]
    copy = params.clone()
    copy.allowed_token_ids.append(7)
    assert params.allowed_token_ids == token_ids[:50_000]
