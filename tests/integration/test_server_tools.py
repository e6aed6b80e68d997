"""Tools and reasoning over HTTP, with OpenAI's own client and the embedded model."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.integration.conftest import EXACT
from tests.support.server_process import ServerProcess
from tests.waiting import wait_until

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
USER: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}

THINKER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n"
)


@pytest.fixture(scope="module")
def client(embedded_server: ServerProcess) -> OpenAI:
    """Of the embedded model's server."""
    return OpenAI(base_url=f"{embedded_server.url}/v1", api_key="-", max_retries=0)


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One whose template opens the reasoning."""
    template: Path = tmp_path_factory.mktemp("template") / "thinker.jinja"
    template.write_text(THINKER)
    flags = ("--chat-template", str(template), "--warm-up-structured-outputs")
    with ServerProcess("--dtype", EXACT["dtype"], *flags) as server:
        yield server


@pytest.fixture(scope="module")
def thinker(thinking_server: ServerProcess) -> OpenAI:
    """Of that server."""
    return OpenAI(base_url=f"{thinking_server.url}/v1", api_key="-", max_retries=0)


def command_lines(session_id: int) -> Iterator[bytes]:
    """Of all processes of a session."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == session_id:
                yield (folder / "cmdline").read_bytes()
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue  # it has just ended, or is somebody else's


def test_grammars_are_got_ready_for_before_anybody_asks_for_one(
    thinking_server: ServerProcess,
) -> None:
    session_id = thinking_server.process.pid
    wait_until(lambda: any(b"trial_child" in line for line in command_lines(session_id)))


def ask(client: OpenAI, **options: Any) -> list[dict[str, Any]]:
    """The choices of an answer in one piece, as the client has them."""
    options = {"messages": USER, "max_tokens": 48, "temperature": 0.0, **options}
    answer = client.chat.completions.create(model="SmolLM2-135M-Instruct", **options)
    return [choice.model_dump() for choice in answer.choices]


def stream(client: OpenAI, **options: Any) -> list[dict[str, Any]]:
    """The same choices, joined from what is streamed."""
    options = {"messages": USER, "max_tokens": 48, "temperature": 0.0, **options}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in client.chat.completions.create(
        model="SmolLM2-135M-Instruct", stream=True, **options
    ):
        for part in chunk.choices:
            choice = choices.setdefault(
                part.index, {"content": "", "reasoning": "", "calls": [], "finish_reason": None}
            )
            delta = part.delta.model_dump()
            choice["content"] += delta.get("content") or ""
            choice["reasoning"] += delta.get("reasoning_content") or ""
            choice["finish_reason"] = part.finish_reason or choice["finish_reason"]
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(choice["calls"]):
                    assert call["id"].startswith("call_")
                    assert call["type"] == "function"
                    choice["calls"].append([call["function"]["name"], ""])
                choice["calls"][call["index"]][1] += call["function"].get("arguments") or ""
    return [choices[index] for index in sorted(choices)]


def joined(choice: dict[str, Any]) -> dict[str, Any]:
    """A whole choice in the form of a streamed one."""
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [
            [call["function"]["name"], call["function"]["arguments"]]
            for call in message["tool_calls"] or []
        ],
        "finish_reason": choice["finish_reason"],
    }


def check_arguments(name: str, text: str) -> None:
    """Arguments are JSON and fit the schema of that function."""
    arguments = json.loads(text)
    if name == "now":
        assert arguments == {}
        return
    assert name == "get_weather"
    assert set(arguments) == {"city", "unit", "days"}
    assert isinstance(arguments["city"], str)
    assert len(arguments["city"]) <= 12
    assert arguments["unit"] in ("celsius", "fahrenheit")
    assert arguments["days"] in range(1, 8)


def test_a_named_call_streamed_and_whole(client: OpenAI) -> None:
    options = {"tools": TOOLS, "tool_choice": NAMED}
    (choice,) = ask(client, **options)
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    check_arguments("get_weather", call["function"]["arguments"])
    assert stream(client, **options) == [joined(choice)]


def test_a_required_call_streamed_and_whole(client: OpenAI) -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = ask(client, **options)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    check_arguments(call["function"]["name"], call["function"]["arguments"])
    assert stream(client, **options) == [joined(choice)]


def test_required_calls_of_several_samples(client: OpenAI) -> None:
    """Each choice has its own calls, all of which fit unless they were cut off."""
    choices = ask(
        client,
        tools=TOOLS,
        tool_choice="required",
        n=2,
        temperature=1.0,
        seed=7,
        max_tokens=60,
    )
    assert len(choices) == 2
    ids = set()
    for choice in choices:
        calls = choice["message"]["tool_calls"]
        assert calls
        complete = calls if choice["finish_reason"] == "tool_calls" else calls[:-1]
        for call in complete:
            check_arguments(call["function"]["name"], call["function"]["arguments"])
        ids.update(call["id"] for call in calls)
    assert len(ids) == sum(len(choice["message"]["tool_calls"]) for choice in choices)


def test_a_call_that_is_cut_off(client: OpenAI) -> None:
    options = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 4}
    (choice,) = ask(client, **options)
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    with pytest.raises(ValueError, match=r".+"):
        json.loads(call["function"]["arguments"])
    assert stream(client, **options) == [joined(choice)]


def test_a_call_that_a_stop_string_breaks_off_is_none_to_run(client: OpenAI) -> None:
    """It is reported as far as it came, but the answer does not end with tool_calls."""
    options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = joined(ask(client, **options)[0])
    ((name, arguments),) = whole["calls"]
    # Another beginning of the arguments would be another end.
    stop = arguments[len(arguments) // 2 :][:6]
    (choice,) = ask(client, **options, stop=[stop])
    broken = joined(choice)
    assert broken["finish_reason"] == "stop"
    ((found, partial),) = broken["calls"]
    assert found == name
    assert arguments.startswith(partial)
    assert len(partial) < len(arguments)
    assert stream(client, **options, stop=[stop]) == [broken]


@pytest.mark.parametrize("title", ["short", "long " * 1000], ids=["at once", "off the loop"])
def test_a_schema_that_cannot_be_held_is_refused_where_it_stands(
    client: OpenAI, title: str
) -> None:
    bad: dict[str, Any] = {"type": "object", "title": title}
    bad |= {"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": bad}}
    for options, param in (
        (
            {"tools": [NOW, tool], "tool_choice": "required"},
            "tools[1].function.parameters.properties.a.pattern",
        ),
        (
            {"response_format": form},
            "response_format.json_schema.schema.properties.a.pattern",
        ),
    ):
        with pytest.raises(BadRequestError, match="lookaheads") as caught:
            ask(client, **options)
        assert caught.value.param == param
        assert param in caught.value.message
    bad["properties"]["a"] = {"type": "string", "minLength": 3, "maxLength": 2}
    with pytest.raises(BadRequestError, match="minLength") as caught:
        ask(client, tools=[tool], tool_choice="required")
    assert caught.value.param == "tools[0].function.parameters.properties.a"


def test_free_answers_are_the_same_streamed_and_whole(client: OpenAI) -> None:
    options = {"tools": TOOLS, "tool_choice": "auto", "max_tokens": 16}
    (choice,) = ask(client, **options)
    assert choice["message"]["content"] or choice["message"]["tool_calls"]
    assert stream(client, **options) == [joined(choice)]


def test_tools_are_left_out_of_the_prompt_where_none_may_be_called(client: OpenAI) -> None:
    without = ask(client, max_tokens=8)
    assert ask(client, max_tokens=8, tools=TOOLS, tool_choice="none") == without


def test_strict_tools_are_taken(client: OpenAI) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    (choice,) = ask(client, tools=[strict], max_tokens=8)
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")


def test_the_whole_conversation_with_a_tool(client: OpenAI) -> None:
    first = client.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=USER,
        tools=TOOLS,
        tool_choice=NAMED,
        temperature=0,
        max_tokens=48,
    )
    message = first.choices[0].message
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "rain"}'}
    (choice,) = ask(client, messages=[*USER, message, result], tools=TOOLS, max_tokens=8)
    assert choice["message"]["content"]


def test_another_form_of_the_answer_goes_before_calls(client: OpenAI) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"enum": ["rain", "sun"]}},
    }
    with pytest.raises(BadRequestError) as caught:
        ask(client, tools=TOOLS, tool_choice="required", response_format=form)
    assert caught.value.param == "tool_choice"
    (choice,) = ask(client, tools=TOOLS, response_format=form)
    assert json.loads(choice["message"]["content"]) in ("rain", "sun")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tools": [NOW], "tool_choice": "maybe"}, "tool_choice"),
    ],
)
def test_wrong_tools_are_refused_with_the_fields_name(
    client: OpenAI, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(client, **options)
    assert caught.value.param == param


def test_a_schema_that_no_grammar_can_be_made_of_is_the_clients_fault(client: OpenAI) -> None:
    broken = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": broken}}
    with pytest.raises(BadRequestError):
        ask(client, tools=[tool], tool_choice={"type": "function", "function": {"name": "f"}})


def test_reasoning_streamed_and_whole(thinker: OpenAI) -> None:
    (choice,) = ask(thinker, max_tokens=12)
    # The model was never taught to stop thinking.
    assert choice["message"]["reasoning_content"]
    assert not choice["message"]["content"]
    assert stream(thinker, max_tokens=12) == [joined(choice)]
    (silent,) = ask(thinker, max_tokens=12, extra_body={"include_reasoning": False})
    assert joined(silent)["reasoning"] == joined(silent)["content"] == ""


def test_a_form_holds_behind_the_reasoning(thinker: OpenAI) -> None:
    """The model thinks nothing but a closing tag, because it is let to use no other tokens."""
    letters = [9617, 17400, 46, 1155, 13312, 2]  # "</", "think", ">", "rain", "sun", the end
    options = {
        "max_tokens": 12,
        "extra_body": {
            "allowed_token_ids": letters,
            "structured_outputs": {"choice": ["rain", "sun"]},
        },
    }
    (choice,) = ask(thinker, **options)
    answer = joined(choice)
    assert answer["finish_reason"] == "stop"
    assert answer["content"] in ("rain", "sun")
    assert stream(thinker, **options) == [answer]
