"""What models write when they call tools: each family's form, whole and in every kind of pieces."""

import json
import random
import time
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from engine.errors import ConfigError
from engine.server.openai.tools.chat_output import ChatOutputParser
from engine.server.openai.tools.definitions import Tool, check_tools
from engine.server.openai.tools.formats import CALL_FORMAT_NAMES, CALL_FORMATS, find_call_format
from engine.server.openai.tools.json_calls import MAX_OBJECT
from engine.server.openai.tools.pieces import (
    ChatOutput,
    Content,
    ToolCallArguments,
    ToolCallStart,
    gather,
)
from engine.server.openai.tools.pythonic import MAX_LIST
from engine.server.openai.tools.scanner import MAX_HEADER
from engine.server.openai.tools.template import read_template


def tools_of(*names: str, **schema: object) -> list[Tool]:
    """Tools with these names; the schema's properties are those of all of them."""
    parameters = {"type": "object", "properties": schema}
    return check_tools(
        [{"type": "function", "function": {"name": n, "parameters": parameters}} for n in names]
    )


TOOLS = tools_of(
    "get_weather",
    "add",
    "now",
    "files.write",
    city={"type": "string"},
    a={"type": "integer"},
    b={"type": ["integer", "null"]},
    flag={"type": "boolean"},
    items={"type": "array"},
    note={"anyOf": [{"type": "string"}, {"type": "null"}]},
    free={},
)


class Case(NamedTuple):
    """A text, and what is to be read from it."""

    format: str
    text: str
    content: str | None
    calls: list[tuple[str, str]]
    """Names, and arguments: JSON text, to the letter."""


PARIS = '{"city": "Paris"}'
NESTED = r'{"city": "a {b} \"[c]\" \\", "items": [{"x": {}}, [1, 2]], "free": "\u00e9\n"}'
TAGS_INSIDE = '{"city": "<tool_call></tool_call>[TOOL_CALLS]; <|python_tag|> </function>"}'


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


HERMES = [
    Case("hermes", hermes("get_weather", PARIS), None, [("get_weather", PARIS)]),
    Case(
        "hermes",
        "Let me look.\n\n" + hermes("get_weather", PARIS) + "\n" + hermes("add", '{"a": 1}') + "\n",
        "Let me look.",
        [("get_weather", PARIS), ("add", '{"a": 1}')],
    ),
    Case("hermes", hermes("get_weather", NESTED), None, [("get_weather", NESTED)]),
    Case("hermes", hermes("get_weather", TAGS_INSIDE), None, [("get_weather", TAGS_INSIDE)]),
    Case("hermes", hermes("now", "{}") + " Done. ", " Done.", [("now", "{}")]),
    Case("hermes", hermes("unknown", "{}"), None, [("unknown", "{}")]),
    Case("hermes", '<tool_call>{"name":"now"}</tool_call>', None, [("now", "{}")]),
    Case("hermes", '<tool_call>{"name":"now","arguments":null}</tool_call>', None, [("now", "{}")]),
    Case("hermes", '<tool_call>{"name":"now","arguments":""}</tool_call>', None, [("now", "{}")]),
    Case(  # arguments as JSON text within JSON
        "hermes",
        r'<tool_call>{"name":"add","arguments":"{\"a\": 1}"}</tool_call>',
        None,
        [("add", '{"a": 1}')],
    ),
    Case(  # another order
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        None,
        [("add", '{"a": 1}')],
    ),
    Case(
        "hermes",
        '<tool_call>{"id": "7", "type": "function", "function": {"name": "add", '
        '"arguments": {"a": 1}}}</tool_call>',
        None,
        [("add", '{"a": 1}')],
    ),
    Case(
        "hermes",
        '<tool_call>{"type": "function", "name": "add", "parameters": {"a": 1}, "id": "}"}'
        "</tool_call>",
        None,
        [("add", '{"a": 1}')],
    ),
    Case(  # SmolLM2 writes lists
        "hermes",
        '<tool_call>[{"name": "add", "arguments": {"a": 1}}, '
        '{"name": "now", "arguments": {}}]</tool_call>',
        None,
        [("add", '{"a": 1}'), ("now", "{}")],
    ),
    Case("hermes", "<tool_call>[]</tool_call>", None, []),
    Case(  # two objects in one tag
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n{"name": "now", "arguments": {}}\n'
        "</tool_call>",
        None,
        [("add", '{"a": 1}'), ("now", "{}")],
    ),
    Case(  # a brace too many, one too few, no end tag before the next call
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>',
        None,
        [("add", '{"a": 1}')],
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> ok',
        " ok",
        [("add", '{"a": 1}')],
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}\n' + hermes("now", "{}"),
        None,
        [("add", '{"a": 1}'), ("now", "{}")],
    ),
    Case(
        "hermes",
        '<tool_call>[{"name": "now", "arguments": {}}, {"bad"}]</tool_call> x',
        " x",
        [("now", "{}")],
    ),
    Case("hermes", "<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
    Case("hermes", "<tool_call>{bad}</tool_call>", "<tool_call>{bad}</tool_call>", []),
    Case(
        "hermes",
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        [],
    ),
    Case(  # malformed arguments are the client's to judge
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>',
        None,
        [("add", '{"a": 1,}')],
    ),
    Case("hermes", 'a < b <tool <tool_cal {"name"', 'a < b <tool <tool_cal {"name"', []),
    Case("hermes", " \n", " \n", []),
    Case("hermes", "", None, []),
    # Cut off.
    Case("hermes", "Hm <tool_c", "Hm <tool_c", []),
    Case("hermes", "Hm <tool_call>", "Hm <tool_call>", []),
    Case("hermes", '<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
    Case("hermes", '<tool_call>{"name": "add", "arg', '<tool_call>{"name": "add", "arg', []),
    Case("hermes", '<tool_call>{"name": "add", "arguments": {', None, [("add", "{")]),
    Case(
        "hermes",
        r'<tool_call>{"name": "add", "arguments": {"a": "x\"',
        None,
        [("add", r'{"a": "x\"')],
    ),
    Case("hermes", hermes("now", "{}")[:-5], None, [("now", "{}")]),
    Case("hermes", hermes("now", "{}")[:-15], None, [("now", "{")]),
]

LLAMA = [
    Case(
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        None,
        [("get_weather", PARIS)],
    ),
    Case(
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
        None,
        [("get_weather", PARIS)],
    ),
    Case(
        "llama3_json",
        '\n{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
        None,
        [("add", '{"a": 1}'), ("now", "{}")],
    ),
    Case(
        "llama3_json",
        '{"type": "function", "function": "add", "parameters": {"a": 1}}',
        None,
        [("add", '{"a": 1}')],
    ),
    Case(
        "llama3_json",
        'Sure. <|python_tag|>{"name": "add", "parameters": {"a": 1}} Done',
        "Sure. Done",
        [("add", '{"a": 1}')],
    ),
    Case("llama3_json", '{"name": "Bob", "arguments": {}}', '{"name": "Bob", "arguments": {}}', []),
    Case("llama3_json", '{"answer": {"name": "add"}}', '{"answer": {"name": "add"}}', []),
    Case("llama3_json", "[1, 2]", "[1, 2]", []),
    Case("llama3_json", "[]", "[]", []),
    Case("llama3_json", "Hello {", "Hello {", []),
    Case(
        "llama3_json",
        '<|python_tag|>search.call(query="x")',
        '<|python_tag|>search.call(query="x")',
        [],
    ),
    Case("llama3_json", '{"name": "now", "parameters": {}} ; ', None, [("now", "{}")]),
    Case("llama3_json", '{"name": "now", "parameters": {}}; hi', "; hi", [("now", "{}")]),
    Case("json", '[{"name": "now", "arguments": {}}, {"name": "add"}]', None,
         [("now", "{}"), ("add", "{}")]),
    Case("llama4_json", '{"name": "now", "parameters": {}}{"name": "add"}', None,
         [("now", "{}"), ("add", "{}")]),
    Case("json", '[{"name": "now", "arguments": {}}, {"nam', None, [("now", "{}")]),
]  # fmt: skip

MISTRAL = [
    Case(
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
        None,
        [("add", '{"a": 1}'), ("now", "{}")],
    ),
    Case("mistral", '[TOOL_CALLS]add{"a": 1}', None, [("add", '{"a": 1}')]),
    Case(
        "mistral",
        'Well. [TOOL_CALLS]add{"a": 1}[TOOL_CALLS]now{}',
        "Well.",
        [("add", '{"a": 1}'), ("now", "{}")],
    ),
    Case("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', None, [("add", '{"a": 1}')]),
    Case("mistral", '[TOOL_CALLS]add[CALL_ID]aB3[ARGS]{"a": 1}', None, [("add", '{"a": 1}')]),
    Case(
        "mistral",
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"bad"}] x',
        ', {"bad"}] x',
        [("now", "{}")],
    ),
    Case("mistral", "[TOOL_CALLS] what?", "[TOOL_CALLS] what?", []),
    Case("mistral", "a [TOOL] b", "a [TOOL] b", []),
    Case("mistral", "[TOOL_CALLS]add", "[TOOL_CALLS]add", []),
    Case("mistral", '[TOOL_CALLS]add{"a"', None, [("add", '{"a"')]),
    Case("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]', None, [("now", "{}")]),
    Case("granite-20b-fc", '<function_call> {"name": "now"}', None, [("now", "{}")]),
    Case("phi4_mini_json", 'functools[{"name": "now", "arguments": {}}]', None, [("now", "{}")]),
]

PYTHONIC = [
    Case("pythonic", '[get_weather(city="Paris")]', None, [("get_weather", PARIS)]),
    Case("pythonic", "[add(a=-1), now()]", None, [("add", '{"a": -1}'), ("now", "{}")]),
    Case(
        "pythonic",
        "[add(a=True, b=null, items=[1, (2.5, 'x')], free={'k': {\"l\": None}}, note=false)]\n",
        None,
        [
            (
                "add",
                '{"a": true, "b": null, "items": [1, [2.5, "x"]], "free": {"k": {"l": null}}, '
                '"note": false}',
            )
        ],
    ),
    Case(
        "pythonic",
        r"""[add(note="it's ]) \" \u00e9", free='a"[(')]""",
        None,
        [("add", r'{"note": "it' + "'" + r's ]) \" é", "free": "a\"[("}')],
    ),
    Case("pythonic", '[files.write(note="x")]', None, [("files.write", '{"note": "x"}')]),
    Case("pythonic", "[now()]\nDone", "\nDone", [("now", "{}")]),
    *(
        Case("pythonic", text, text, [])
        for text in (
            "[1, 2]",
            "[unknown()]",
            "[now(1)]",
            "[now(), 3]",
            "[now(a=b)]",
            "[now(a=1, **b)]",
            "[now(a={1: 2})]",
            "[now(a=1e999)]",
            "[now(a=b'x')]",
            "[now(a=1+2)]",
            "[now(a=__import__('os').system('true'))]",
            "[now(",
            "[now()",
            "[no",
            "[",
            "I would say [now()]",
            "[now(a=" + "[" * 300 + "]" * 300 + ")]",
        )
    ),
    Case(
        "llama4_pythonic",
        "<|python_start|>[now()]<|python_end|>",
        None,
        [("now", "{}")],
    ),
    Case("llama4_pythonic", "Look: <|python_start|>[now()]", "Look:", [("now", "{}")]),
]  # fmt: skip


def qwen(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


QWEN = [
    Case("qwen3_coder", qwen("get_weather", city="Paris"), None, [("get_weather", PARIS)]),
    Case("qwen3_coder", qwen("now"), None, [("now", "{}")]),
    Case(
        "qwen3_coder",
        "I'll add.\n" + qwen("add", a="1", b="null", flag="True", items="[1, 'x']", city="7"),
        "I'll add.",
        [("add", '{"a": 1, "b": null, "flag": true, "items": [1, "x"], "city": "7"}')],
    ),
    Case(
        "qwen3_coder",
        qwen("add", note="a\n  <b>\n", free='{"x": "</y>"}', a="many"),
        None,
        [("add", r'{"note": "a\n  <b>\n", "free": {"x": "</y>"}, "a": "many"}')],
    ),
    Case(
        "qwen3_coder",
        qwen("now") + "\n" + qwen("add", a="1") + "\nDone",
        "\nDone",
        [("now", "{}"), ("add", '{"a": 1}')],
    ),
    Case(  # without the outer tags
        "qwen3_coder",
        "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
        None,
        [("add", '{"a": 1}')],
    ),
    Case(  # a parameter that is not closed
        "qwen3_coder",
        "<tool_call><function=add><parameter=a>1</function></tool_call>",
        None,
        [("add", '{"a": 1}')],
    ),
    Case("qwen3_coder", "<tool_call>no", "<tool_call>no", []),
    Case("qwen3_coder", "<function=>", "<function=>", []),
    Case("qwen3_coder", "<function=a\nb>", "<function=a\nb>", []),
    Case("qwen3_coder", qwen("add", a="1", b="2")[:60], None, [("add", '{"a": 1')]),
    Case("qwen3_coder", "<tool_call>\n<function=ad", "<tool_call>\n<function=ad", []),
]

CASES = [*HERMES, *LLAMA, *MISTRAL, *PYTHONIC, *QWEN]


def parser_of(name: str, **options: object) -> ChatOutputParser:
    return ChatOutputParser(CALL_FORMATS[name].new_parser(TOOLS, **options))


def parse_all(parser: ChatOutputParser, texts: Iterable[str]) -> ChatOutput:
    """The answer of a text that comes in parts."""
    pieces = [piece for text in texts for piece in parser.feed(text)]
    return gather([*pieces, *parser.finish()])


def read(output: ChatOutput) -> tuple[str | None, list[tuple[str, str]]]:
    return output.content, [(call.name, call.arguments) for call in output.tool_calls]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.text[:40]!r}")
def test_texts_are_read_the_same_whole_and_in_pieces(case: Case) -> None:
    wanted = (case.content, case.calls)
    assert read(parser_of(case.format).parse(case.text)) == wanted
    assert read(parse_all(parser_of(case.format), case.text)) == wanted
    random_ = random.Random(case.text)
    for _ in range(10):
        places = sorted(random_.choices(range(len(case.text) + 1), k=random_.randrange(1, 9)))
        pairs = zip([0, *places], [*places, None], strict=True)
        parts = [case.text[start:end] for start, end in pairs]
        assert read(parse_all(parser_of(case.format), parts)) == wanted, parts


def test_arguments_are_streamed_while_the_model_writes_them() -> None:
    parser = parser_of("hermes")
    pieces = []
    for character in hermes("get_weather", PARIS):
        pieces.append(parser.feed(character))
    streamed = [piece for few in pieces for piece in few]
    assert isinstance(streamed[0], ToolCallStart)
    assert len(streamed) == 1 + len(PARIS)
    assert all(isinstance(piece, ToolCallArguments) for piece in streamed[1:])
    assert parser.finish() == []


def test_content_is_not_held_back_longer_than_a_tag_may_be_coming() -> None:
    parser = parser_of("hermes")
    assert parser.feed("Hello") == [Content("Hello")]
    assert parser.feed(" ") == []
    assert parser.feed("a<") == [Content(" a")]
    assert parser.feed("b") == [Content("<b")]


def test_json_that_is_no_call_is_content_as_soon_as_that_is_clear() -> None:
    parser = parser_of("llama3_json")
    assert parser.feed('{"answer": ') == [Content('{"answer":')]
    assert parser.feed("1}") == [Content(" 1}")]


def test_what_is_held_back_is_bounded() -> None:
    endless = '<tool_call>{"arguments": {"a": "' + "x" * MAX_OBJECT
    pieces = parser_of("hermes").feed(endless)
    assert gather(pieces).content == endless
    named = '<tool_call>{"name": "' + "x" * MAX_OBJECT
    streamed = [piece for part in named for piece in parser_of("hermes").feed(part)]
    assert not any(isinstance(piece, ToolCallStart) for piece in streamed)
    late = '<tool_call>{"id": "' + "x" * MAX_HEADER + '", "name": "add", "arguments": {"a": 1}}'
    assert read(parser_of("hermes").parse(late)) == (None, [("add", '{"a": 1}')])
    assert read(parse_all(parser_of("hermes"), late)) == (None, [("add", '{"a": 1}')])
    listed = "[now(note='" + "x" * MAX_LIST
    assert gather(parser_of("pythonic").feed(listed)).content == listed


@pytest.mark.parametrize("name", sorted(CALL_FORMATS))
def test_no_text_takes_long(name: str) -> None:
    """Thousands of tokens of the worst kind, one by one, cost far below a step each."""
    for morsel in ('<tool_call>{"name": "', "[TOOL_CALLS]", "[now(", "<parameter=x>", "{\n", "]]"):
        start_ns = time.process_time_ns()
        parse_all(parser_of(name), [morsel] * 4000)
        parser_of(name).parse(morsel * 4000)
        assert (time.process_time_ns() - start_ns) / 4000 < 200_000, morsel


def test_ids_and_indices() -> None:
    text = hermes("now", "{}") * 3
    calls = parser_of("hermes").parse(text).tool_calls
    assert len({call.id for call in calls}) == 3
    assert all(call.id.startswith("call_") for call in calls)
    starts = [p for p in parser_of("hermes").feed(text) if isinstance(p, ToolCallStart)]
    assert [start.index for start in starts] == [0, 1, 2]
    # Mistral's templates refuse ids of any other kind.
    mistral = parser_of("mistral").parse("[TOOL_CALLS]now{}").tool_calls[0].id
    assert len(mistral) == 9
    assert mistral.isalnum()


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if len(case.calls) > 1],
    ids=lambda case: f"{case.format}: {case.text[:40]!r}",
)
def test_calls_beyond_the_limit_are_dropped(case: Case) -> None:
    parser = parser_of(case.format, max_calls=1)
    assert read(parser.parse(case.text)) == (case.content, case.calls[:1])
    assert parser.has_calls


def test_special_tokens_that_open_no_call_stay_hidden() -> None:
    tag = "<|python_tag|>"
    text = f"{tag}search.call(query='x')"
    parser = parser_of("llama3_json", hidden=frozenset((tag,)))
    assert parser.parse(text).content == "search.call(query='x')"


@pytest.mark.parametrize(
    ("name", "text", "is_broken"),
    [
        ("hermes", hermes("add", '{"a": 1}'), False),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}', False),  # before a stop tag
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', True),
        ("hermes", hermes("now", "{}") + '<tool_call>{"name": "add", "arguments": {"a', True),
        ("hermes", hermes("now", "{}") + '<tool_call>{"name": "add', False),  # it is dropped
        ("llama3_json", '{"name": "add", "parameters": {"a": [', True),
        ("mistral", '[TOOL_CALLS]add{"a": ', True),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1", True),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter>", True),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter></function>", False),
        ("pythonic", "[add(a=1), add(a=", False),  # which is content
        ("hermes", "No call.", False),
    ],
)
def test_whether_a_call_was_broken_off(name: str, text: str, is_broken: bool) -> None:
    for size in (len(text), 1):
        parser = ChatOutputParser(CALL_FORMATS[name].new_parser(TOOLS))
        for start in range(0, len(text), size):
            parser.feed(text[start : start + size])
        parser.finish()
        assert parser.is_within_call is is_broken
    only_one = ChatOutputParser(CALL_FORMATS["hermes"].new_parser(TOOLS, max_calls=1))
    only_one.parse(hermes("now", "{}") + '<tool_call>{"name": "add", "arguments": {"a')
    assert not only_one.is_within_call, "the one that is dropped does not count"


def test_the_pieces_of_an_answer_are_never_empty() -> None:
    for case in CASES:
        parser = parser_of(case.format)
        pieces = [piece for part in case.text for piece in parser.feed(part)] + parser.finish()
        for piece in pieces:
            assert isinstance(piece, ToolCallStart) or piece.text
        assert gather(pieces).content == case.content


@pytest.mark.parametrize("name", sorted(CALL_FORMATS))
def test_arguments_of_complete_calls_are_json(name: str) -> None:
    for case in CASES:
        if case.format == name:
            for call in parser_of(name).parse(case.text).tool_calls:
                if call.arguments.endswith("}") and ",}" not in call.arguments:
                    assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{% for tool in tools %}<tool_call>{% endfor %}", "hermes"),
        ("{% if tools %}<tool_call>\n<function=example>{% endif %}", "qwen3_coder"),
        ("{{ '[AVAILABLE_TOOLS]' + tools | tojson }}[TOOL_CALLS]", "mistral"),
        ('{% if tools is not none %}<|python_tag|> "parameters": {% endif %}', "llama3_json"),
        ("{% if tools %}[func_name1(params_name1=1)]{% endif %}", "pythonic"),
        ("{{ tools }}<function_call>", "granite-20b-fc"),
        ("{{ tools }}", "json"),
        ("{{ 'tools' }}", "hermes"),
        ("{{ messages }}", "hermes"),
        ("The word tools is no variable here. {{ messages }}", "hermes"),
        ("", "hermes"),
    ],
)
def test_the_template_tells_the_format(text: str, name: str) -> None:
    found = find_call_format("auto", read_template(text))
    assert found is not None
    assert found.name == name


def test_formats_are_found_by_name() -> None:
    facts = read_template("")
    assert find_call_format("none", facts) is None
    for name in CALL_FORMAT_NAMES[2:]:
        assert find_call_format(name, facts) is CALL_FORMATS[name]
    with pytest.raises(ConfigError, match="tool_call_parser must be one of auto, none, hermes"):
        find_call_format("hermess", facts)
