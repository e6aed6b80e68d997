"""The server as OpenAI's own client sees it: both APIs, streamed and not, against `LLM` offline."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from engine import LLM, SamplingParams
from engine.server.openai.protocol.chat import ChatCompletionChunk, ChatCompletionResponse
from engine.server.openai.protocol.completion import CompletionChunk, CompletionResponse
from tests.integration.conftest import EXACT
from tests.support.server_process import ServerProcess, stream_lines
from tests.waiting import PATIENCE_S

PROMPTS = ["The capital of France is", "Once upon a time", "2 + 2 =", "Emoji: 🙂🙃"]
CHAT: list[Any] = [{"role": "user", "content": "Name three colours."}]
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def client(embedded_server: ServerProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's client, without second attempts that would hide a fault."""
    with openai.OpenAI(
        base_url=f"{embedded_server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


@pytest.fixture(scope="module")
def http(embedded_server: ServerProcess) -> Iterator[httpx.Client]:
    """A plain client."""
    with httpx.Client(base_url=embedded_server.url, timeout=PATIENCE_S) as http:
        yield http


@pytest.fixture(scope="module")
def offline() -> dict[str, Any]:
    """What `LLM` says greedily to the same prompts, and to the conversation."""
    llm = LLM(kv_cache_memory_bytes=512 << 20, **EXACT)
    try:
        params = SamplingParams(temperature=0, max_tokens=24, logprobs=3)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        chat = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
        return {
            "texts": [output.outputs[0].text for output in outputs],
            "ids": [list(output.outputs[0].token_ids) for output in outputs],
            "prompt_ids": [output.prompt_token_ids for output in outputs],
            "logprobs": [
                [[(e.decoded_token, e.logprob) for e in p.values()] for p in o.outputs[0].logprobs]
                for o in outputs
            ],
            "chat": chat[0].outputs[0].text,
        }
    finally:
        del llm


def stream_completion(client: openai.OpenAI, **options: Any) -> tuple[dict[int, str], list[Any]]:
    """Texts by index, and all chunks."""
    texts: dict[int, str] = {}
    with client.completions.create(model=MODEL, stream=True, **options) as stream:
        chunks = list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts, chunks


# -- completions -----------------------------------------------------------------------------------


def test_completions_are_those_of_llm(client: openai.OpenAI, offline: dict[str, Any]) -> None:
    greedy: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}
    one = client.completions.create(prompt=PROMPTS[0], **greedy)
    assert one.choices[0].text == offline["texts"][0]
    assert one.usage is not None
    assert one.usage.prompt_tokens == len(offline["prompt_ids"][0])
    assert one.usage.completion_tokens == len(offline["ids"][0])
    assert one.usage.total_tokens == one.usage.prompt_tokens + one.usage.completion_tokens
    batch = client.completions.create(prompt=PROMPTS, **greedy)
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in batch.choices] == offline["texts"]
    by_ids = client.completions.create(prompt=offline["prompt_ids"], **greedy)
    assert [choice.text for choice in by_ids.choices] == offline["texts"]
    assert (
        client.completions.create(prompt=offline["prompt_ids"][1], **greedy).choices[0].text
        == (offline["texts"][1])
    )


def test_streamed_completions_are_the_same(client: openai.OpenAI, offline: dict[str, Any]) -> None:
    texts, chunks = stream_completion(client, prompt=PROMPTS, temperature=0, max_tokens=24)
    assert [texts[index] for index in range(4)] == offline["texts"]
    reasons = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert reasons == ["length"] * 4
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_options_count_tokens(client: openai.OpenAI, offline: dict[str, Any]) -> None:
    _, chunks = stream_completion(
        client,
        prompt=PROMPTS[:2],
        temperature=0,
        max_tokens=6,
        stream_options={"include_usage": True},
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert last.choices == []
    assert last.usage.completion_tokens == 12
    assert last.usage.prompt_tokens == sum(map(len, offline["prompt_ids"][:2]))
    _, chunks = stream_completion(
        client,
        prompt=PROMPTS[0],
        temperature=0,
        max_tokens=6,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 5, 6, 6]


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    prompt = "Seven sorts of mica are known to the trade, of which five are of use here. " * 4
    details = []
    for _ in range(2):
        usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        details.append((usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens))
    assert details[0][0] == 0
    assert 0 < details[1][0] < details[1][1]


def test_logprobs_of_completions(client: openai.OpenAI, offline: dict[str, Any]) -> None:
    options: dict[str, Any] = {"prompt": PROMPTS[3], "temperature": 0, "max_tokens": 24}
    choice = client.completions.create(model=MODEL, logprobs=3, **options).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == choice.text
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert choice.text[offset : offset + len(token)] == token
    for token, logprob, top, wanted in zip(
        logprobs.tokens,
        logprobs.token_logprobs or [],
        logprobs.top_logprobs or [],
        offline["logprobs"][3],
        strict=True,
    ):
        assert (token, logprob) == (wanted[0][0], pytest.approx(wanted[0][1], abs=1e-4))
        assert top[token] == pytest.approx(max(top.values()))
        assert set(top) <= {name for name, _ in wanted}
    streamed, chunks = stream_completion(client, logprobs=3, **options)
    assert streamed[0] == choice.text
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    for name in ("tokens", "text_offset"):
        joined = [item for part in parts for item in getattr(part, name)]
        assert joined == getattr(logprobs, name)


def test_echo_shows_the_prompt(client: openai.OpenAI, http: httpx.Client) -> None:
    options: dict[str, Any] = {"prompt": PROMPTS[:2], "temperature": 0, "max_tokens": 3}
    plain = client.completions.create(model=MODEL, **options)
    echoed = client.completions.create(model=MODEL, echo=True, logprobs=1, **options)
    for prompt, one, other in zip(PROMPTS, plain.choices, echoed.choices, strict=False):
        assert other.text == prompt + one.text
        assert other.logprobs is not None
        assert "".join(other.logprobs.tokens or []) == other.text
        assert (other.logprobs.token_logprobs or [])[0] is None
        assert all(value is not None for value in (other.logprobs.token_logprobs or [])[1:])
    streamed, _ = stream_completion(client, echo=True, logprobs=1, **options)
    assert [streamed[0], streamed[1]] == [choice.text for choice in echoed.choices]
    scored = client.completions.create(
        model=MODEL, prompt=PROMPTS[0], max_tokens=0, echo=True, logprobs=0
    )
    assert scored.choices[0].text == PROMPTS[0]
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    body = {"prompt": "首都", "max_tokens": 0, "echo": True, "logprobs": 0, "prompt_logprobs": 0}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    tokens = choice["logprobs"]["tokens"]
    assert (len(tokens) > 3, "".join(tokens)) == (True, "首都")
    told = [
        entry["decoded_token"] for one in choice["prompt_logprobs"][1:] for entry in one.values()
    ]
    assert told == tokens[1:]
    ids = http.post("/tokenize", json={"prompt": PROMPTS[0]}).json()["tokens"]
    by_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=1, echo=True)
    assert by_ids.choices[0].text.startswith(PROMPTS[0])


@pytest.mark.parametrize("by_id", [False, True])
def test_text_offsets_are_places_in_the_echo(client: openai.OpenAI, by_id: bool) -> None:
    """Behind characters of several tokens and special tokens, whatever the tokens are called."""
    prompt = "Say 🙂🙃 中文<|im_end|>\nÅ. Then"
    options: dict[str, Any] = {"prompt": prompt, "temperature": 0, "max_tokens": 4, "echo": True}
    extra = {"return_tokens_as_token_ids": by_id}
    (choice,) = client.completions.create(
        model=MODEL, logprobs=0, extra_body=extra, **options
    ).choices
    assert choice.text.startswith(prompt)
    assert choice.logprobs is not None
    offsets = choice.logprobs.text_offset or []
    assert offsets == sorted(offsets)
    assert max(offsets) < len(choice.text)
    for word in (" 🙂", "🙃", " 中", "<|im_end|>", "Å", ".", " Then"):
        assert choice.text.index(word) in offsets, word
    for offset, name in zip(offsets, choice.logprobs.tokens or [], strict=True):
        assert by_id or choice.text.startswith(name, offset)
    streamed, chunks = stream_completion(client, logprobs=0, extra_body=extra, **options)
    parts = [chunk.choices[0].logprobs.text_offset for chunk in chunks]
    assert (streamed[0], [one for part in parts for one in part]) == (choice.text, offsets)


def test_n_and_seed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"prompt": PROMPTS[:2], "max_tokens": 12, "n": 3, "seed": 11}
    first = client.completions.create(model=MODEL, temperature=1.5, **options)
    assert [choice.index for choice in first.choices] == list(range(6))
    assert len({choice.text for choice in first.choices}) == 6
    again, chunks = stream_completion(client, temperature=1.5, **options)
    assert [again[index] for index in range(6)] == [choice.text for choice in first.choices]
    finished = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert sorted(finished) == list(range(6))
    other = client.completions.create(model=MODEL, temperature=1.5, **(options | {"seed": 12}))
    assert [choice.text for choice in other.choices] != [choice.text for choice in first.choices]


def test_stop(client: openai.OpenAI, offline: dict[str, Any], http: httpx.Client) -> None:
    text = offline["texts"][1]
    stop = text.split()[4]
    options: dict[str, Any] = {"prompt": PROMPTS[1], "temperature": 0, "max_tokens": 24}
    for streamed in (False, True):
        if streamed:
            got = stream_completion(client, stop=[stop], **options)[0][0]
        else:
            choice = client.completions.create(model=MODEL, stop=stop, **options).choices[0]
            assert choice.finish_reason == "stop"
            assert choice.stop_reason == stop  # type: ignore[attr-defined]
            got = choice.text
        assert got == text[: text.index(stop)]
    kept = client.completions.create(
        model=MODEL, stop=stop, extra_body={"include_stop_str_in_output": True}, **options
    )
    assert kept.choices[0].text == text[: text.index(stop)] + stop
    stop_id = offline["ids"][1][5]
    answer = http.post("/v1/completions", json=options | {"stop_token_ids": [stop_id]}).json()
    assert answer["choices"][0]["stop_reason"] == stop_id


def test_extras_have_effect(http: httpx.Client, offline: dict[str, Any]) -> None:
    """Each of vLLM's further parameters changes the greedy output as it says."""
    base = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 4, "return_token_ids": True}

    def choice(**extras: Any) -> dict[str, Any]:
        answer = http.post("/v1/completions", json=base | extras)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0])

    usual = choice()
    assert usual["token_ids"] == offline["ids"][0][:4]
    assert usual["prompt_token_ids"] == offline["prompt_ids"][0]
    first = usual["token_ids"][0]
    assert choice(logit_bias={str(first): -100})["token_ids"][0] != first
    assert set(choice(allowed_token_ids=[30, 31])["token_ids"]) <= {30, 31}
    assert choice(bad_words=["Paris"])["token_ids"][0] != first
    cut = choice(truncate_prompt_tokens=2, prompt_logprobs=1)
    assert cut["prompt_token_ids"] == offline["prompt_ids"][0][-2:]
    assert cut["prompt_logprobs"][0] is None
    assert str(cut["prompt_token_ids"][1]) in cut["prompt_logprobs"][1]
    assert choice(structured_outputs={"choice": ["yes", "no"]})["text"] in ("yes", "no")
    assert choice(guided_regex="[ab]{3}")["text"].strip("ab") == ""
    named = choice(logprobs=1, return_tokens_as_token_ids=True)["logprobs"]["tokens"]
    assert named == [f"token_id:{token_id}" for token_id in usual["token_ids"]]
    eos = choice(prompt="<|im_start|>", logit_bias={"2": 100}, skip_special_tokens=False)
    assert (eos["text"], eos["finish_reason"]) == ("", "stop")
    forced = choice(logit_bias={"2": 100}, ignore_eos=True, skip_special_tokens=False)
    assert forced["text"] == "<|im_end|>" * 4


def test_ids_of_answers(http: httpx.Client) -> None:
    body = {"prompt": "Hi", "max_tokens": 1}
    named = http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"})
    assert named.json()["id"] == "cmpl-mine-1"
    assert named.headers["x-request-id"] == "mine-1"
    assert (
        http.post("/v1/completions", json=body | {"request_id": "two"}).json()["id"] == "cmpl-two"
    )


# -- chats -----------------------------------------------------------------------------------------


def test_chat_is_that_of_llm(client: openai.OpenAI, offline: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 0}
    answer = client.chat.completions.create(max_tokens=24, **options)
    assert answer.choices[0].message.content == offline["chat"]
    assert answer.choices[0].message.role == "assistant"
    with client.chat.completions.create(
        max_completion_tokens=24, stream=True, stream_options={"include_usage": True}, **options
    ) as stream:
        chunks = list(stream)
    first = chunks[0].choices[0].delta
    assert (first.role, first.content) == ("assistant", "")
    deltas = [c.delta.content or "" for chunk in chunks for c in chunk.choices]
    assert "".join(deltas) == offline["chat"]
    assert len(deltas) > 10
    assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert answer.usage is not None
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens


def test_chat_goes_to_the_end_of_the_answer(client: openai.OpenAI) -> None:
    """Without a limit the model ends its message itself, far behind 16 tokens."""
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 16


def test_logprobs_of_chats(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Answer with emoji only: 🙂"}],
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
    }
    choice = client.chat.completions.create(top_logprobs=4, **options).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == (
        choice.message.content
    )
    for entry in content:
        assert len(entry.top_logprobs) == 4
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == pytest.approx(values[0])
        assert entry.top_logprobs[0].token == entry.token
    with client.chat.completions.create(stream=True, **options) as stream:
        parts = [c.logprobs for chunk in stream for c in chunk.choices if c.logprobs is not None]
    entries = [entry for part in parts for entry in part.content or []]
    assert [entry.token for entry in entries] == [entry.token for entry in content]
    assert all(entry.top_logprobs == [] for entry in entries)


def test_impossible_tokens_have_a_number(http: httpx.Client) -> None:
    """JSON has no infinity."""
    body = {"prompt": "Hi", "max_tokens": 2, "logprobs": 5, "allowed_token_ids": [30, 31]}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def test_chat_samples(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": CHAT, "n": 3, "seed": 5}
    whole = client.chat.completions.create(max_tokens=8, temperature=1.2, **options)
    contents = {choice.index: choice.message.content for choice in whole.choices}
    texts = {0: "", 1: "", 2: ""}
    with client.chat.completions.create(
        max_tokens=8, temperature=1.2, stream=True, **options
    ) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert texts == contents


def test_chat_takes_all_forms_of_messages(client: openai.OpenAI, http: httpx.Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[Any] = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "Please."},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
    assert answer.usage is not None
    tokens = http.post("/tokenize", json={"messages": messages}).json()
    assert answer.usage.prompt_tokens == tokens["count"]
    text = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert text.startswith("<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>\n")
    assert "<|im_start|>assistant\nNo.<|im_end|>\n" in text


def test_final_message_is_continued(http: httpx.Client) -> None:
    started = [*CHAT, {"role": "assistant", "content": "Red, green and"}]
    body = {
        "messages": started,
        "continue_final_message": True,
        "echo": True,
        "temperature": 0,
        "max_tokens": 3,
    }
    content = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert content["content"].startswith("Red, green and ")
    assert "blue" in content["content"].lower()


def test_forms_of_answers(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer"}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    options: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 60, "temperature": 0}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.chat.completions.create(response_format=wanted, **options)
    found = json.loads(answer.choices[0].message.content or "")
    assert found["colour"] in ("red", "blue")
    assert isinstance(found["count"], int)
    read = ""
    for chunk in client.chat.completions.create(response_format=wanted, stream=True, **options):
        if chunk.choices[0].finish_reason:
            break  # as many clients do, before they look at the delta
        read += chunk.choices[0].delta.content or ""
    assert read == answer.choices[0].message.content
    answer = client.chat.completions.create(
        response_format={"type": "json_object"}, logit_bias={"2": 5}, **options
    )
    assert (answer.choices[0].message.content or "").startswith("{")
    choice = client.chat.completions.create(
        response_format={"type": "text"},
        extra_body={"structured_outputs": {"choice": ["red", "blue"]}},
        **options,
    )
    assert choice.choices[0].message.content in ("red", "blue")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(extra_body={"guided_regex": "(a"}, **options)
    assert caught.value.param == "guided_regex"


def test_tools(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
    }
    tools: list[Any] = [
        {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    ]
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Weather in Paris?"}],
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 80,
    }
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "weather"  # type: ignore[union-attr]
    arguments = call.function.arguments  # type: ignore[union-attr]
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    name, streamed, reason = "", "", None
    with client.chat.completions.create(stream=True, **options) as stream:
        for chunk in stream:
            delta = chunk.choices[0].delta
            assert not delta.content
            for part in delta.tool_calls or []:
                assert part.function is not None
                name += part.function.name or ""
                streamed += part.function.arguments or ""
            reason = chunk.choices[0].finish_reason or reason
    assert (name, streamed, reason) == ("weather", arguments, "tool_calls")


# -- shapes, other routes and other clients --------------------------------------------------------


@pytest.mark.parametrize("extras", [{}, {"logprobs": 2, "prompt_logprobs": 1, "echo": True}])
def test_completions_have_the_described_form(http: httpx.Client, extras: dict[str, Any]) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 3, "return_token_ids": True} | extras
    answer = http.post("/v1/completions", json=body)
    CompletionResponse.model_validate_json(answer.text, strict=True)
    answer = http.post("/v1/completions", json=body | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = stream_lines(answer)
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        CompletionChunk.model_validate_json(line, strict=True)


@pytest.mark.parametrize("extras", [{}, {"logprobs": True, "top_logprobs": 2}])
def test_chats_have_the_described_form(http: httpx.Client, extras: dict[str, Any]) -> None:
    body = {"messages": CHAT, "max_tokens": 3, "n": 2, "return_token_ids": True} | extras
    answer = http.post("/v1/chat/completions", json=body)
    ChatCompletionResponse.model_validate_json(answer.text, strict=True)
    lines = stream_lines(http.post("/v1/chat/completions", json=body | {"stream": True}))
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        ChatCompletionChunk.model_validate_json(line, strict=True)


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == MODEL
    assert card.max_model_len == 8192  # type: ignore[attr-defined]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_tokenize_and_back(http: httpx.Client) -> None:
    text = "Isinglass: 🙂 and <|im_end|> " * 200  # so long that it is done beside the event loop
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 8192
    back = http.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": text}


def test_async_clients_at_once(embedded_server: ServerProcess, offline: dict[str, Any]) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{embedded_server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as client:

            async def one(prompt: str) -> str:
                text = ""
                stream = await client.completions.create(
                    model=MODEL, prompt=prompt, temperature=0, max_tokens=24, stream=True
                )
                async for chunk in stream:
                    text += chunk.choices[0].text
                return text

            return await asyncio.gather(*(one(prompt) for prompt in PROMPTS * 4))

    assert asyncio.run(run()) == offline["texts"] * 4
