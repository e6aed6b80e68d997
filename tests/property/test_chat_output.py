"""Any text, cut anyhow: streamed and whole answers are the same, and calls survive a round trip."""

import json
import keyword
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.server.openai.reasoning.registry import REASONING_FORMATS
from engine.server.openai.tools.chat_output import ChatOutputParser
from engine.server.openai.tools.definitions import check_tools
from engine.server.openai.tools.formats import CALL_FORMATS
from engine.server.openai.tools.pieces import ChatOutput, Content, Reasoning, ToolCallStart, gather
from engine.server.openai.tools.whole_output import NamedCallParser, RequiredCallParser

NAMES = ("f", "get_weather", "a.b")
TOOLS = check_tools([{"type": "function", "function": {"name": name}} for name in NAMES])
FORMATS = sorted(CALL_FORMATS)
REASONING = [None, *sorted(REASONING_FORMATS)]

MORSELS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "functools",
        "<function=f>", "<function=", "</function>", "<parameter=x>", "</parameter>",
        "<|tool_call|>", "<|/tool_call|>", "<|python_start|>", "<|python_end|>", "<think>",
        "</think>", "[THINK]", "[/THINK]", "Here is my thought process:", "Here is my response:",
        "Here's",
        '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"x": "}"}}', '{"name": "f"',
        '{"arguments": {"a": [1]}, "name": "f"}', '"arguments": ', '{"name": "g"}', "f", "[f(", "[",
        "[f(x=1), get_weather(a='\"')]", ")", "]", "{", "}", '"', "'", "\\", "\\\"", ",", ";", " ",
        "\n", "\n\n", "é", "x", "1", "null", "<", "</", "<t", ">", ":",
    ]
)  # fmt: skip
TEXTS = st.lists(st.one_of(MORSELS, st.text(max_size=3)), max_size=14).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=5), inner,
                      max_size=3),
    max_leaves=8,
)  # fmt: skip
KEYS = st.sampled_from(keyword.kwlist) | st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(KEYS, JSON, max_size=3)),
    min_size=1,
    max_size=3,
)
ESCAPE = re.compile(r"\\(.)")
LINE_ENDS = {"n": "\n", "r": "\r"}
MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def parse_all(parser: ChatOutputParser, texts: Iterable[str]) -> ChatOutput:
    """The answer of a text that comes in parts."""
    pieces = [piece for text in texts for piece in parser.feed(text)]
    return gather([*pieces, *parser.finish()])


def new_parser(name: str | None, reasoning: str | None, *, is_open: bool) -> ChatOutputParser:
    thought = None if reasoning is None else REASONING_FORMATS[reasoning].new_parser(is_open)
    return ChatOutputParser(None if name is None else CALL_FORMATS[name].new_parser(TOOLS), thought)


def without_ids(output: ChatOutput) -> Any:
    calls = [(call.name, call.arguments) for call in output.tool_calls]
    return output.content, output.reasoning, calls


def cut(text: str, places: list[int]) -> list[str]:
    inner = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *inner], [*inner, len(text)], strict=True)]


@MANY
@given(
    text=TEXTS,
    places=st.lists(st.integers(0, 10_000), max_size=12),
    name=st.sampled_from([None, *FORMATS]),
    reasoning=st.sampled_from(REASONING),
    is_open=st.booleans(),
)
def test_however_a_text_is_cut_the_answer_is_the_same(
    text: str, places: list[int], name: str | None, reasoning: str | None, is_open: bool
) -> None:
    whole = new_parser(name, reasoning, is_open=is_open).parse(text)
    for parts in (cut(text, places), list(text)):
        parser = new_parser(name, reasoning, is_open=is_open)
        assert without_ids(parse_all(parser, parts)) == without_ids(whole)
        assert parser.has_calls == bool(whole.tool_calls)


@MANY
@given(text=TEXTS, places=st.lists(st.integers(0, 10_000), max_size=12), named=st.booleans())
def test_required_answers_are_calls_or_else_all_text(
    text: str, places: list[int], named: bool
) -> None:
    def parser() -> ChatOutputParser:
        return ChatOutputParser(NamedCallParser("f") if named else RequiredCallParser(names=NAMES))

    whole = parser().parse(text)
    assert whole.content == (None if whole.tool_calls else text or None)
    assert without_ids(parse_all(parser(), cut(text, places))) == without_ids(whole)
    if named:
        assert [call.arguments for call in whole.tool_calls] == [text.strip()]


@MANY
@given(text=TEXTS, name=st.sampled_from(FORMATS), reasoning=st.sampled_from(REASONING))
def test_pieces_come_in_order_and_are_never_empty(
    text: str, name: str, reasoning: str | None
) -> None:
    parser = new_parser(name, reasoning, is_open=False)
    pieces = [piece for part in text for piece in parser.feed(part)] + parser.finish()
    kinds = [type(piece) for piece in pieces]
    if Reasoning in kinds:
        first_other = next((i for i, kind in enumerate(kinds) if kind is not Reasoning), len(kinds))
        assert Reasoning not in kinds[first_other:]
    starts = [piece for piece in pieces if isinstance(piece, ToolCallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    assert all(isinstance(piece, ToolCallStart) or piece.text for piece in pieces)
    gather(pieces)  # asserts that arguments follow the start of their call


@MANY
@given(
    text=st.text(
        st.characters(exclude_categories=("Cs",), exclude_characters="<[{fH"), max_size=40
    ),
    name=st.sampled_from(FORMATS),
    reasoning=st.sampled_from(REASONING),
)
def test_text_without_tags_is_content_to_the_letter(
    text: str, name: str, reasoning: str | None
) -> None:
    answer = parse_all(new_parser(name, reasoning, is_open=False), text)
    assert without_ids(answer) == (text or None, None, [])


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of that family writes them."""
    arguments = [json.dumps(given, ensure_ascii=index % 2 == 0) for index, (_, given) in
                 enumerate(calls)]  # fmt: skip
    pairs = list(zip([function for function, _ in calls], arguments, strict=True))
    objects = [f'{{"name": "{function}", "arguments": {text}}}' for function, text in pairs]
    if name in ("hermes", "qwen3_json"):
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    if name in ("llama3_json", "llama4_json"):
        return "; ".join(objects).replace('"arguments": {', '"parameters": {', 1)
    if name == "mistral":
        return "".join(f"[TOOL_CALLS]{function}{text}" for function, text in pairs)
    if name == "phi4_mini_json":
        return f"functools[{', '.join(objects)}]"
    if name == "granite-20b-fc":
        return "\n".join(f"<function_call>{one}" for one in objects)
    if name == "granite":
        return f"<|tool_call|>[{', '.join(objects)}]"
    if name == "json":
        return f"[{', '.join(objects)}]"
    if "pythonic" in name:
        return f"[{', '.join(python_call(*call) for call in calls)}]"
    return "\n".join(xml_call(*call) for call in calls)


def python_call(function: str, arguments: dict[str, Any]) -> str:
    """A call as models write it, who may leave line ends as they are."""
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    written = ESCAPE.sub(lambda escape: LINE_ENDS.get(escape[1], escape[0]), written)
    return f"{function}({written})"


def xml_call(function: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f"<parameter={key}>\n{json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={function}>\n{values}</function>\n</tool_call>"


@pytest.mark.parametrize("name", FORMATS)
@settings(MANY, max_examples=40)
@given(calls=CALLS, places=st.lists(st.integers(0, 10_000), max_size=12))
def test_calls_survive_the_round_trip(
    name: str, calls: list[tuple[str, dict[str, Any]]], places: list[int]
) -> None:
    text = written(name, calls)
    answer = parse_all(new_parser(name, None, is_open=False), cut(text, places))
    assert answer.content is None
    assert [(c.name, json.loads(c.arguments)) for c in answer.tool_calls] == calls


@MANY
@given(
    thought=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<"), max_size=30),
    content=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<"), max_size=30),
    calls=CALLS,
    places=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_reasoning_content_and_calls_come_apart(
    thought: str, content: str, calls: list[tuple[str, dict[str, Any]]], places: list[int]
) -> None:
    text = f"<think>\n{thought}\n</think>\n\n{content}\n{written('hermes', calls)}"
    answer = parse_all(new_parser("hermes", "qwen3", is_open=False), cut(text, places))
    assert answer.reasoning == (thought.strip() or None)
    assert answer.content == (content.strip() or None)
    assert [(c.name, json.loads(c.arguments)) for c in answer.tool_calls] == calls


def test_without_formats_text_passes_through() -> None:
    parser = ChatOutputParser()
    assert parser.is_plain
    assert parser.feed("<think> <tool_call>") == [Content("<think> <tool_call>")]
    assert parser.feed("") == []
    assert parser.finish() == []
