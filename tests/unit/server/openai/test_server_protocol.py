"""Bodies of the OpenAI routes: what is accepted, and which `SamplingParams` come of it."""

import gc
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from engine.api.chat import template_variables
from engine.errors import (
    ConfigError,
    PromptError,
    QueueFullError,
    RequestError,
    SamplingParamsError,
    TokenizerError,
)
from engine.server.http.errors import ApiError
from engine.server.http.json_body import MAX_CONTAINERS, decode_json
from engine.server.openai.chat import chat_params
from engine.server.openai.completions import completion_params
from engine.server.openai.logprobs import CompletionLogprobs, TokenNames, chat_logprobs, most_likely
from engine.server.openai.protocol.chat import ChatCompletionRequest
from engine.server.openai.protocol.completion import CompletionRequest
from engine.server.openai.protocol.tokenize import TokenizeRequest
from engine.server.openai.sampling import SAME_NAME, make_params, naming_fields, wanted_form
from engine.structured.forms.params import StructuredOutputsParams
from engine.text.chat_messages import check_messages
from engine.text.token_bytes import new_utf8_decoder
from engine.types.logprobs import Logprob
from engine.types.sampling import RequestOutputKind, SamplingParams

DEFAULTS = SamplingParams(temperature=0.6, top_k=20)
GIVEN: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "seed": 4,
    "stop": ["x"],
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "logit_bias": {"7": 2.0},
    "allowed_token_ids": [7, 8],
    "bad_words": ["bad"],
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 6,
}


@pytest.fixture
def engine() -> Any:
    """As much of an engine as parameters are made of."""
    return SimpleNamespace(
        get_default_sampling_params=lambda: DEFAULTS,
        config=SimpleNamespace(model=SimpleNamespace(max_model_len=100, generation_config="auto")),
        llm_engine=SimpleNamespace(model_config=SimpleNamespace(generation_defaults={})),
    )


def test_every_field_arrives(engine: Any) -> None:
    assert set(GIVEN) == set(SAME_NAME)
    body = CompletionRequest.model_validate({"prompt": "a", "max_tokens": 9} | GIVEN)
    _, params = completion_params(body, engine)
    for name, value in GIVEN.items():
        wanted = {7: 2.0} if name == "logit_bias" else value
        assert getattr(params, name) == wanted, name
    assert params.max_tokens == 9
    assert params.output_kind is RequestOutputKind.FINAL_ONLY


def test_silence_leaves_the_models_defaults(engine: Any) -> None:
    silent = CompletionRequest.model_validate(
        {"prompt": "a", "stream": True} | dict.fromkeys(GIVEN)
    )
    _, params = completion_params(silent, engine)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 20, 16)
    assert params.output_kind is RequestOutputKind.DELTA


def test_special_cases_of_completions(engine: Any) -> None:
    def params(**fields: Any) -> SamplingParams:
        return completion_params(CompletionRequest(prompt="a", **fields), engine)[1]

    assert params(echo=True, max_tokens=0).max_tokens == 1
    assert params(echo=True, logprobs=3).prompt_logprobs == 3
    assert params(echo=True, logprobs=3, prompt_logprobs=1).prompt_logprobs == 1
    assert params(logprobs=3).prompt_logprobs is None
    assert params(truncate_prompt_tokens=-1).truncate_prompt_tokens == 99
    with pytest.raises(ApiError) as caught:
        params(max_tokens=0)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1], [2, 3], [4]], 3)]
)
def test_forms_of_prompts(prompt: Any, count: int) -> None:
    assert len(CompletionRequest(prompt=prompt).prompts) == count


@pytest.mark.parametrize("prompt", [None, 5, {}, [], [1, "a"], [True], [["a"]], [[1], 2], [1.0]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest(prompt=prompt)


def test_types_are_strict() -> None:
    for wrong in ({"n": "1"}, {"n": 1.5}, {"stream": 1}, {"temperature": "1"}, {"stop": 5}):
        with pytest.raises(ValidationError):
            CompletionRequest.model_validate({"prompt": "a"} | wrong)
    assert CompletionRequest.model_validate({"prompt": "a", "temperature": 1}).temperature == 1


def test_known_fields_that_cannot_be_honoured() -> None:
    message = [{"role": "user", "content": "Hi"}]
    for name, harmless in ChatCompletionRequest.REFUSED.items():
        for value in (None, *harmless):
            ChatCompletionRequest.model_validate({"messages": message, name: value})
        with pytest.raises(ValidationError, match=name):
            ChatCompletionRequest.model_validate({"messages": message, name: {"x": 1}})
    ChatCompletionRequest.model_validate({"messages": message, "unheard_of": 1})


def test_forms_of_output() -> None:
    def form(**fields: Any) -> Any:
        return wanted_form(CompletionRequest(prompt="a", **fields))

    schema = {"type": "object"}
    assert form() == (None, None)
    assert form(response_format={"type": "text"}) == (None, None)
    assert form(guided_json=schema) == ("guided_json", {"json": schema})
    assert form(response_format={"type": "json_object"})[1] == {"json_object": True}
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert form(response_format=wrapped)[1] == {"json": schema}
    for kind, value in (("regex", "a+"), ("choice", ["a"]), ("grammar", 'root ::= "a"')):
        assert form(response_format={"type": kind, kind: value})[1] == {kind: value}
        assert form(structured_outputs={kind: value})[1] == {kind: value}
    for wrong in ({}, {"type": "xml"}, {"type": "regex"}, {"type": "json_schema"}):
        with pytest.raises(ApiError):
            form(response_format=wrong)
    with pytest.raises(ApiError, match="not both"):
        form(guided_regex="a", response_format={"type": "json_object"})


def test_bodies_of_the_other_route_are_sent_there() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(ValidationError, match="messages go to /v1/chat/completions"):
        CompletionRequest.model_validate(chat)
    with pytest.raises(ValidationError, match="a prompt goes to /v1/completions"):
        ChatCompletionRequest.model_validate({"prompt": "a"})
    CompletionRequest.model_validate(chat | {"prompt": "a"})


@pytest.mark.parametrize("kind", ["regex", "choice", "grammar", "structural_tag"])
def test_a_format_without_its_value_is_told_of_one_that_is_taken(kind: str) -> None:
    wrong = {"type": kind, kind: "x", "pattern": "x"}
    with pytest.raises(ApiError, match=r"needs .* and nothing else, such as ") as caught:
        wanted_form(CompletionRequest(prompt="a", response_format=wrong))
    example = json.loads(caught.value.message.partition(", such as ")[2].replace("{…}", "{}"))
    form = wanted_form(CompletionRequest(prompt="a", response_format=example))[1]
    assert form == {kind: example[kind]}
    if kind != "structural_tag":
        StructuredOutputsParams.from_any(form)


def test_no_tokens_may_be_asked_for_with_echo_only(engine: Any) -> None:
    body = CompletionRequest(prompt="a", max_tokens=0)
    with pytest.raises(ApiError, match="or 0 with echo") as caught:
        completion_params(body, engine)
    assert caught.value.param == "max_tokens"
    assert completion_params(body.model_copy(update={"echo": True}), engine)[1].max_tokens == 1


@pytest.mark.parametrize("form", ["completion", "chat", "old chat"])
def test_more_tokens_than_the_context_holds_are_refused(engine: Any, form: str) -> None:
    """Not more than it holds behind the prompt, which the engine cuts, as vLLM does."""
    field = "max_completion_tokens" if form == "chat" else "max_tokens"

    def params(asked: int | None) -> SamplingParams:
        if form == "completion":
            return completion_params(CompletionRequest(prompt="a", max_tokens=asked), engine)[1]
        messages = [{"role": "user", "content": "a"}]
        body = ChatCompletionRequest(messages=messages, **{field: asked})
        free: Any = SimpleNamespace(structured_outputs=None, needs_special_tokens=False)
        return chat_params(body, engine, free, {})[1]

    assert params(100).max_tokens == 100
    for asked in (101, 10**9):
        with pytest.raises(ApiError) as caught:
            params(asked)
        assert (caught.value.param, caught.value.code) == (field, "context_length_exceeded")
        assert f"context length is 100 tokens, and {field}={asked}" in caught.value.message
    # What the client has not asked for, such as a generation config's limit, refuses nothing.
    engine.llm_engine.model_config.generation_defaults["max_new_tokens"] = 5000
    assert params(None).max_tokens == (16 if form == "completion" else 5000)


def test_what_processors_of_ones_own_read_comes_as_vllm_names_it(engine: Any) -> None:
    body = CompletionRequest(prompt="a", vllm_xargs={"strength": 2.5, "words": ["a"]})
    assert completion_params(body, engine)[1].extra_args == {"strength": 2.5, "words": ["a"]}
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ApiError, match="vllm_xargs must not be nested") as caught:
        completion_params(CompletionRequest(prompt="a", vllm_xargs={"x": deep}), engine)
    assert caught.value.param == "vllm_xargs"


def test_errors_of_the_engine_name_the_bodys_field(engine: Any) -> None:
    body = CompletionRequest(prompt="a", top_p=5.0)
    with pytest.raises(ApiError) as caught:
        make_params(body, engine, max_tokens=1, stream=False, names={"top_p": "nucleus"})
    assert caught.value.param == "nucleus"
    for error, param, code in (
        (PromptError("cache_salt is a word of it"), "prompt", None),
        (PromptError("no", param="cache_salt", code="no_salt"), "cache_salt", "no_salt"),
        (RequestError("top_p is a word of it"), None, None),
        (ConfigError("no", param="priority"), "priority", None),
        (SamplingParamsError("no", param="top_p"), "nucleus", None),
        (SamplingParamsError("no", param="form.json.x-top_p"), "body.form.json.x-top_p", None),
    ):
        names = {"top_p": "nucleus", "form.json": "body.form.json"}
        with pytest.raises(ApiError) as caught, naming_fields(names):
            raise error
        assert (caught.value.param, caught.value.code) == (param, code)
    with (
        pytest.raises(ApiError, match="--skip-tokenizer-init") as caught,
        naming_fields({}, prompt="messages"),
    ):
        raise TokenizerError("the engine has no tokenizer (skip_tokenizer_init=True)")
    assert (caught.value.status, caught.value.param) == (400, "messages")
    with pytest.raises(QueueFullError), naming_fields({}):
        raise QueueFullError("full", retry_after_s=1)


def test_errors_speak_of_the_request(engine: Any) -> None:
    """The body's fields, the server's flags and JSON's words, and what was sent as it was."""

    def said(make: Callable[[], Any], **names: str) -> str:
        with pytest.raises(ApiError) as caught, naming_fields(names):
            make()
        return caught.value.message

    chat = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}
    message = said(lambda: SamplingParams(max_tokens=3, min_tokens=4), **chat)
    assert message == "min_tokens must be at most max_completion_tokens=3, got 4."
    assert said(lambda: SamplingParams(max_tokens=0), **chat) == (
        "max_completion_tokens must be null or an integer of at least 1, got 0."
    )
    message = said(lambda: SamplingParams(logprobs=9).verify(100, 5), **chat)
    assert message == (
        "top_logprobs must be at most 5, got 9; raise --max-logprobs of the server or ask for "
        "fewer."
    )
    assert said(lambda: SamplingParams(prompt_logprobs=-2), **chat).startswith("prompt_logprobs ")
    assert said(lambda: SamplingParams(stop=["None", 5])) == (
        "stop must be null or a list of strings that are not empty, got ['None', 5]."
    )
    assert said(lambda: SamplingParams(ignore_eos=None)).endswith("true or false, got null.")
    for messages, wanted in (
        ([5], "messages[0] must be an object with"),
        ([{"role": "a", "content": [{"type": "text"}]}], "messages[0].content[0].text must be a "),
    ):
        assert said(lambda messages=messages: check_messages(messages)).startswith(wanted)
    refused = said(lambda: template_variables({"tools": []}))
    assert refused.endswith("give the field of that name, if there is one.")
    own = "the chat template refused the messages: None is no role"
    with pytest.raises(ApiError) as caught, naming_fields({}):
        raise PromptError(own)
    assert caught.value.message == own


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex must"),
        ({"guided_regex": ""}, "guided_regex must"),
        ({"guided_choice": []}, "guided_choice must"),
        ({"response_format": {"type": "regex", "regex": 5}}, "response_format.regex must"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            "response_format.json_schema.schema.type: ",
        ),
    ],
)
def test_forms_are_called_what_the_request_calls_them(
    engine: Any, fields: dict[str, Any], message: str
) -> None:
    body = CompletionRequest.model_validate({"prompt": "a"} | fields)
    with pytest.raises(ApiError) as caught:
        completion_params(body, engine)
    assert caught.value.message.startswith(message)
    assert caught.value.param == message.split()[0].rstrip(":")


@pytest.mark.parametrize("kept", [0, -2, 100, 10**30])
def test_what_is_kept_of_a_prompt_must_fit(engine: Any, kept: int) -> None:
    with pytest.raises(ApiError, match="from 1 to 99") as caught:
        completion_params(CompletionRequest(prompt="a", truncate_prompt_tokens=kept), engine)
    assert caught.value.param == "truncate_prompt_tokens"
    assert "-1 for as many" in caught.value.message


def test_tokenize_wants_one_of_two() -> None:
    message = [{"role": "user", "content": "Hi"}]
    TokenizeRequest(prompt="")
    TokenizeRequest(messages=message)
    for wrong in ({}, {"prompt": "a", "messages": message}):
        with pytest.raises(ValidationError):
            TokenizeRequest(**wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("chat_template", "default"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("documents", [{"title": "a", "text": "b"}]),
        ("add_generation_prompt", True),
        ("continue_final_message", True),
    ],
)
def test_what_belongs_to_a_conversation_is_refused_beside_a_text(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=f"{name} belongs to messages"):
        TokenizeRequest(prompt="a", **{name: value})
    for harmless in (None, type(value)()) if name != "chat_template" else (None,):
        TokenizeRequest(prompt="a", add_special_tokens=True, **{name: harmless})
    TokenizeRequest(messages=[{"role": "user", "content": "Hi"}], **{name: value})


def test_counts_in_every_chunk_need_counts() -> None:
    for kind, rest in (
        (CompletionRequest, {"prompt": "a"}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    ):
        for options in ({}, {"include_usage": False}):
            with pytest.raises(ValidationError, match="needs include_usage=true"):
                kind(**rest, stream=True, stream_options={"continuous_usage_stats": True} | options)
        options = {"continuous_usage_stats": True, "include_usage": True}
        kind(**rest, stream=True, stream_options=options)
        kind(**rest, stream=True, stream_options={"continuous_usage_stats": False})


def test_a_chat_echoes_a_last_message_of_the_assistants_own() -> None:
    user = {"role": "user", "content": "Hi"}
    ChatCompletionRequest(messages=[user, {"role": "assistant", "content": "Well"}], echo=True)
    ChatCompletionRequest(messages=[user], echo=False)
    part = {"type": "text", "text": "Well"}
    for last in (user, {"role": "assistant"}, {"role": "assistant", "content": [part]}):
        with pytest.raises(ValidationError, match="echo needs a last message"):
            ChatCompletionRequest(messages=[user, last], echo=True)


def test_json_by_the_book() -> None:
    kind = "application/json; charset=utf-8"
    assert decode_json('{"a": "é\\ud83d\\ude42"}'.encode(), kind) == {"a": "é🙂"}
    assert decode_json(b"{}", "application/vnd.api+json") == {}
    mark = b"\xef\xbb\xbf"  # in front of what some shells write
    assert decode_json(mark + '{"a": "\ufeff"}'.encode(), kind) == {"a": "\ufeff"}
    for body in (
        *(b'{"a": NaN}', b'{"a": "\\ud800"}', b"[1]", b"", b"{'a': 1}", b'{"a": 1,}'),
        *(mark, 2 * mark + b"{}", '{"a": 1}'.encode("utf-16")),
    ):
        with pytest.raises(ApiError) as caught:
            decode_json(body, kind)
        assert caught.value.status == 400
    with pytest.raises(ApiError) as caught:
        decode_json(b"{}", "text/plain")
    assert caught.value.status == 415


def test_a_body_of_millions_of_lists_is_refused_without_a_collection_of_garbage() -> None:
    collections: list[str] = []

    def watch(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    few = b'{"a": [' + b"[],{}," * (MAX_CONTAINERS // 2 - 4) + b"1]}"
    gc.callbacks.append(watch)
    try:
        for bomb in (b"[],", b"{},", b'{"a":[1]},'):
            many = b'{"a": [' + bomb * ((4 << 20) // len(bomb)) + b"1]}"
            gc.collect()
            collections.clear()
            with pytest.raises(ApiError, match="lists and objects") as caught:
                decode_json(many, "application/json")
            assert caught.value.status == 400
            assert not collections
            assert gc.isenabled()
        gc.collect()
        collections.clear()
        assert len(decode_json(few, "application/json")["a"]) == MAX_CONTAINERS - 7
        assert len(collections) <= 2, "one, once it has been decoded"
    finally:
        gc.callbacks.remove(watch)
    assert decode_json(b'{"a": "' + b"[{" * MAX_CONTAINERS + b'"}', "application/json")


class FakeTokenizer:
    """Two bytes of one character, and letters."""

    TOKENS = (b"a", b"b", b"\xc3", b"\xa9")

    def token_bytes(self, token_id: int) -> bytes:
        return self.TOKENS[token_id]

    def token_text_after(self, context: tuple[int, ...], token_id: int) -> str:
        assert context == ()
        return new_utf8_decoder("replace").decode(self.TOKENS[token_id])


def test_logprobs_of_chats_have_true_bytes() -> None:
    names = TokenNames(FakeTokenizer(), as_ids=False)  # type: ignore[arg-type]
    positions = [
        {2: Logprob(-0.5, 1, ""), 0: Logprob(float("-inf"), 2, "a")},
        {3: Logprob(-1.5, 7, "é"), 0: Logprob(-0.1, 1, "a"), 1: Logprob(-0.2, 2, "b")},
    ]
    content = chat_logprobs(names, positions, 2)["content"]
    assert bytes(content[0]["bytes"] + content[1]["bytes"]).decode() == "é"
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["", "a"]
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert [top["token"] for top in content[1]["top_logprobs"]] == ["a", "b"]
    assert chat_logprobs(names, positions, 0)["content"][0]["top_logprobs"] == []
    assert len(most_likely(positions[1], -1)) == 3


def test_logprobs_in_lists() -> None:
    names = TokenNames(FakeTokenizer(), as_ids=False)  # type: ignore[arg-type]
    logprobs = CompletionLogprobs(names, 1)
    assert logprobs.take([(2, None)], [0])["tokens"] == [""]  # it begins a character
    first = logprobs.take([(0, None), (2, {2: Logprob(-1.0, 1, "")})], [0, 1])
    assert first["tokens"] == ["a", ""]
    assert first["token_logprobs"] == [None, -1.0]
    assert first["top_logprobs"][0] is None
    same_name = {3: Logprob(-3.0, 2, "é"), 1: Logprob(-1.0, 1, "é")}
    second = logprobs.take([(3, same_name), (0, {0: Logprob(-1.0, 1, "a")})], [1, 2])
    assert second["text_offset"] == [1, 2]
    assert second["top_logprobs"][0] == {"é": -1.0}
