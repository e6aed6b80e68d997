"""Chats' answers: one document or events, the same message by both ways, and their forms."""

import json
import random
from typing import Any

import pytest

from engine.checkpoint.locate import resolve_model
from engine.server.openai.chat_answers import (
    ChatAnswerPlan,
    ChatCollector,
    ChatWriter,
    merged_deltas,
)
from engine.server.openai.protocol.chat import ChatCompletionChunk, ChatCompletionResponse
from engine.server.openai.tools.pieces import Content, Reasoning, ToolCallArguments, ToolCallStart
from engine.server.openai.tools.plan import ChatFormats, plan_chat
from engine.text.tokenizer import Tokenizer, get_tokenizer
from engine.types.logprobs import Logprob
from engine.types.outputs import CompletionOutput, RequestOutput

USER = [{"role": "user", "content": "Weather?"}]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THOUGHT = "<think>\nIt rains 🙂.\n</think>\n\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return get_tokenizer(resolve_model(None))


def plan_of(
    tokenizer: Tokenizer, *, tools: bool = False, thinks: bool = False, **changes: Any
) -> ChatAnswerPlan:
    formats = ChatFormats.resolve(
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        tool_call_parser="hermes",
        reasoning_parser="qwen3" if thinks else "none",
    )
    chat = plan_chat(formats, USER, tools=TOOLS if tools else None)
    values: dict[str, Any] = {
        "response_id": "chatcmpl-1",
        "created": 7,
        "model": "m",
        "tokenizer": tokenizer,
        "output": chat.after_render("Weather?"),
        "echo": "",
        "num_top_logprobs": None,
        "wants_prompt_logprobs": False,
        "returns_token_ids": False,
        "names_tokens_by_id": False,
        "include_usage": False,
        "continuous_usage": False,
    }
    return ChatAnswerPlan(**(values | changes))


def output(
    text: str,
    *,
    index: int = 0,
    ids: tuple[int, ...] = (30,),
    reason: str | None = None,
    logprobs: bool = False,
) -> RequestOutput:
    positions = [{one: Logprob(-0.5, 1, "a"), 31: Logprob(-1.0, 2, "b")} for one in ids]
    completion = CompletionOutput(
        index,
        text,
        list(ids),
        logprobs=positions if logprobs else None,
        finish_reason=reason,
        stop_reason="!" if reason == "stop" else None,
    )
    asked = [None, {6: Logprob(-2.0, 3, "c")}]
    return RequestOutput(
        "r", "p", [5, 6], [completion], reason is not None, asked, num_cached_tokens=1
    )


def whole(plan: ChatAnswerPlan, *outputs: RequestOutput) -> dict[str, Any]:
    collector = ChatCollector(plan)
    for one in outputs:
        collector.add(0, one)
    document = json.loads(json.dumps(collector.document()))
    ChatCompletionResponse.model_validate(document)
    return dict(document)


def events_of(data: bytes) -> list[dict[str, Any]]:
    lines = data.decode().split("\n\n")
    assert lines.pop() == ""
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    for one in events:
        ChatCompletionChunk.model_validate(one)
    return events


def streamed(plan: ChatAnswerPlan, *outputs: RequestOutput) -> list[dict[str, Any]]:
    writer = ChatWriter(plan)
    data = b"".join([writer.write(0, one) for one in outputs])
    return events_of(data + writer.end())


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client that joins deltas makes of them."""
    message: dict[str, Any] = {}
    for one in events:
        for choice in one["choices"]:
            for key, value in choice["delta"].items():
                if key != "tool_calls":
                    message[key] = message.get(key, "") + value
                    continue
                calls = message.setdefault("tool_calls", [])
                for call in value:
                    if call["index"] == len(calls):
                        calls.append(
                            {"id": call["id"], "name": call["function"]["name"], "args": ""}
                        )
                    calls[call["index"]]["args"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize(
    "text",
    ["", "Plain <b>text</b> 🙂", THOUGHT + "Rain.", CALL, "Well: " + CALL, THOUGHT + CALL + CALL],
)
def test_both_ways_tell_the_same_message(tokenizer: Tokenizer, text: str) -> None:
    plan = plan_of(tokenizer, tools=True, thinks=True)
    (choice,) = whole(plan, output(text, reason="stop"))["choices"]
    rng = random.Random(1)
    for _ in range(30):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 5)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        outputs = [output(part) for part in parts[:-1]] + [output(parts[-1], reason="stop")]
        events = streamed(plan, *outputs)
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert events[-1]["choices"][0]["delta"] == {}  # which many clients do not look at
        message = message_of(events)
        told = choice["message"]
        assert message["role"] == told["role"] == "assistant"
        assert message["content"] == (told["content"] or "")
        for name in ("reasoning", "reasoning_content"):
            assert message.get(name) == told.get(name)
        calls = [(call["name"], call["args"]) for call in message.get("tool_calls", [])]
        assert calls == [
            (call["function"]["name"], call["function"]["arguments"])
            for call in told.get("tool_calls") or []
        ]
        last = events[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == (
            choice["finish_reason"],
            choice["stop_reason"],
        )
        assert [one["choices"][0]["finish_reason"] for one in events[:-1]] == [None] * (
            len(events) - 1
        )
    assert choice["finish_reason"] == ("tool_calls" if CALL in text else "stop")


def test_content_is_null_only_beside_calls(tokenizer: Tokenizer) -> None:
    plan = plan_of(tokenizer, tools=True)
    for text, content in (("", ""), ("Hi", "Hi"), (CALL, None)):
        (choice,) = whole(plan, output(text, reason="stop"))["choices"]
        assert choice["message"]["content"] == content
        assert ("tool_calls" in choice["message"]) is (text == CALL)


def test_plain_and_full_events_have_one_form(tokenizer: Tokenizer) -> None:
    for counts in (False, True):
        plan = plan_of(tokenizer, include_usage=counts)
        outputs = [output("a"), output('b"\n🙂'), output("c", reason="length")]
        begin, first, plain, last, ending, *usage = streamed(plan, *outputs)
        assert begin.keys() == first.keys() == plain.keys() == last.keys() == ending.keys()
        assert last["choices"][0] == plain["choices"][0] | {"delta": {"content": "c"}}
        assert first["choices"][0] | {"delta": {"content": 'b"\n🙂'}} == plain["choices"][0]
        assert ("usage" in plain) is counts
        assert [one["usage"]["completion_tokens"] for one in usage] == [3] * counts
    assert usage[0]["choices"] == []
    assert usage[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_an_output_without_text_makes_no_event(tokenizer: Tokenizer) -> None:
    writer = ChatWriter(plan_of(tokenizer))
    assert len(events_of(writer.write(0, output("")))) == 1  # whose message it is
    assert writer.write(0, output("")) == b""
    assert writer.usage.completion_tokens == 2
    parsed = ChatWriter(plan_of(tokenizer, tools=True))
    parsed.write(0, output("a"))
    assert parsed.write(0, output("<tool_ca")) == b""  # nobody knows yet


def test_samples_have_their_index_and_parser(tokenizer: Tokenizer) -> None:
    plan = plan_of(tokenizer, tools=True)
    half = len(CALL) // 2
    events = streamed(
        plan,
        output(CALL[:half], index=1),
        output("text", index=0),
        output(CALL[half:], index=1, reason="stop"),
        output("", index=0, reason="stop"),
    )
    for index, reason in ((0, "stop"), (1, "tool_calls")):
        mine = [one for one in events if one["choices"][0]["index"] == index]
        assert mine[0]["choices"][0]["delta"]["role"] == "assistant"
        assert mine[-1]["choices"][0]["finish_reason"] == reason
    document = whole(
        plan, output(CALL, index=0, reason="stop"), output("b", index=1, reason="stop")
    )
    assert [choice["index"] for choice in document["choices"]] == [0, 1]
    assert document["usage"]["prompt_tokens"] == 2


def test_what_is_gone_on_with_is_repeated_once(tokenizer: Tokenizer) -> None:
    plan = plan_of(tokenizer, echo="The sky ")
    events = streamed(plan, output("is"), output(" blue", reason="stop"))
    assert message_of(events)["content"] == "The sky is blue"
    (choice,) = whole(plan, output("is blue", reason="stop"))["choices"]
    assert choice["message"]["content"] == "The sky is blue"


def test_logprobs_and_ids_are_told_with_their_tokens(tokenizer: Tokenizer) -> None:
    plan = plan_of(
        tokenizer, num_top_logprobs=1, returns_token_ids=True, wants_prompt_logprobs=True
    )
    document = whole(plan, output("ab", ids=(40, 41, 42), reason="length", logprobs=True))
    (choice,) = document["choices"]
    for texts in (("", "ab"), ("a", "b"), ("ab", "")):  # the last token may be without text
        parts = [(texts[0], (40, 41), None), (texts[1], (42,), "length")]
        outputs = [output(t, ids=ids, reason=r, logprobs=True) for t, ids, r in parts]
        events = streamed(plan, *outputs)
        told = [one["choices"][0] for one in events]
        assert [(one["delta"], one.get("token_ids")) for one in told] == [
            ({"role": "assistant", "content": ""}, None),
            ({"content": texts[0]} if texts[0] else {}, [40, 41]),
            ({"content": texts[1]} if texts[1] else {}, [42]),
            ({}, None),
        ]
        assert told[-1]["logprobs"] is None
    assert choice["token_ids"] == [40, 41, 42]
    entries = [entry for one in told for entry in (one["logprobs"] or {"content": []})["content"]]
    assert entries == choice["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [1, 1, 1]
    for holder in (events[0], document):
        assert holder["prompt_token_ids"] == [5, 6]
        assert holder["prompt_logprobs"][1] == {
            "6": {"logprob": -2.0, "rank": 3, "decoded_token": "c"}
        }
    assert not any("prompt_token_ids" in one for one in events[1:])
    by_id = plan_of(tokenizer, num_top_logprobs=0, names_tokens_by_id=True)
    (choice,) = whole(by_id, output("a", reason="stop", logprobs=True))["choices"]
    assert choice["logprobs"]["content"][0]["token"] == "token_id:30"


def test_counts_so_far_are_in_every_event(tokenizer: Tokenizer) -> None:
    plan = plan_of(tokenizer, include_usage=True, continuous_usage=True)
    outputs = [
        *(output("a"), output("b", index=1, ids=(30, 31)), output("c")),
        *(output("", index=1, ids=(), reason="stop"), output("d", reason="length")),
    ]
    events = streamed(plan, *outputs)
    assert [one["usage"]["completion_tokens"] for one in events] == [0, 1, 1, 3, 4, 4, 5, 5, 5]


def test_neighbours_become_one_delta() -> None:
    pieces = [
        *(Reasoning("a"), Reasoning("b"), Content("c"), Content("d"), Reasoning("e")),
        *(ToolCallStart(0, "x", "f"), ToolCallArguments(0, "{"), ToolCallArguments(0, "}")),
        *(ToolCallStart(1, "y", "g"), Content("h"), ToolCallArguments(1, "{}")),
    ]
    deltas = merged_deltas(pieces)
    assert [next(iter(delta)) for delta in deltas] == [
        *("reasoning_content", "content", "reasoning_content", "tool_calls", "tool_calls"),
        *("content", "tool_calls"),
    ]
    assert deltas[0] == {"reasoning_content": "ab", "reasoning": "ab"}
    (first,), (second,), (rest,) = (deltas[i]["tool_calls"] for i in (3, 4, 6))
    assert first["function"] == {"name": "f", "arguments": "{}"}
    assert second["function"] == {"name": "g", "arguments": ""}
    assert rest == {"index": 1, "function": {"arguments": "{}"}}
    assert merged_deltas([]) == []
