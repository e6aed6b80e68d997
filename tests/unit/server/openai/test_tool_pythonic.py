"""Calls written as Python that Python itself would not run: names and strings that it refuses."""

import json
import keyword

import pytest

from engine.server.openai.tools.chat_output import ChatOutputParser
from engine.server.openai.tools.definitions import Tool, check_tools
from engine.server.openai.tools.formats import CALL_FORMATS
from engine.server.openai.tools.pieces import gather

NAMES = ("f", "files.write", "import", "files.class")
FORMS = ("pythonic", "llama4_pythonic")


def tools() -> list[Tool]:
    return check_tools([{"type": "function", "function": {"name": name}} for name in NAMES])


def read(form: str, text: str, size: int) -> tuple[str | None, list[tuple[str, object]]]:
    """Content and calls of a text that comes in pieces of a size."""
    parser = ChatOutputParser(CALL_FORMATS[form].new_parser(tools()))
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    output = gather([piece for part in parts for piece in parser.feed(part)] + parser.finish())
    return output.content, [(call.name, json.loads(call.arguments)) for call in output.tool_calls]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f(from=1)]", [("f", {"from": 1})]),
        ("[f(class='x')]", [("f", {"class": "x"})]),
        ("[f( x=1,\n  in = [1], None=None )]", [("f", {"x": 1, "in": [1], "None": None})]),
        ("[f(a='(from=1', b='x, in=2', is='y==z')]",
         [("f", {"a": "(from=1", "b": "x, in=2", "is": "y==z"})]),
        ("[import(x=1), files.class(def='a'), files.write(x=2)]",
         [("import", {"x": 1}), ("files.class", {"def": "a"}), ("files.write", {"x": 2})]),
        ("[f(a='1\n2')]", [("f", {"a": "1\n2"})]),
        ('[f(a="1\n\n\'2\'", b="\\n\\"\n")]', [("f", {"a": "1\n\n'2'", "b": '\n"\n'})]),
        ("[f(a='1\r\n2\r')]", [("f", {"a": "1\r\n2\r"})]),
        ("[f(a='1\\\n2\n3')]", [("f", {"a": "12\n3"})]),  # the first one is escaped, so is none
        ("[f(a=r'\\d\n\\n', b='''x\ny''', c=\"\"\"\n\"\"\")]",
         [("f", {"a": "\\d\n\\n", "b": "x\ny", "c": "\n"})]),
        ("[f(lambda={'k\n': ['\n']}, x='')]", [("f", {"lambda": {"k\n": ["\n"]}, "x": ""})]),
    ],
)  # fmt: skip
def test_keywords_are_names_and_strings_have_line_ends(
    text: str, calls: list[tuple[str, object]]
) -> None:
    for size in (len(text), 1, 2, 3, 7):
        assert read("pythonic", text, size) == (None, calls)
        tagged = f"<|python_start|>{text}<|python_end|>"
        assert read("llama4_pythonic", tagged, size) == (None, calls)


def test_every_keyword_is_a_parameter() -> None:
    for word in keyword.kwlist:
        text = f"[f({word}='a', x=1), f(x=1,{word} = 'b')]"
        wanted = [("f", {word: "a", "x": 1}), ("f", {"x": 1, word: "b"})]
        assert read("pythonic", text, len(text)) == (None, wanted)


@pytest.mark.parametrize(
    "text",
    [
        "[f(from)]",
        "[f(from==1)]",
        "[f(x from=1)]",
        "[f(from=1, from=2)]",
        "[f(from=lambda: 1)]",
        "[f(x=not (1))]",
        "[f(x=[1, from=2])]",
        "[f(x={from=2})]",
        "[f(x=import(y=1))]",
        "[f(from=1, **x)]",
        "[f(from=b'\n')]",
        "[f(x=f'\n')]",
        "[f(x=1\n2)]",
        "[f(x='\n' + 'a')]",
        "[f(), lambda(x=1)]",  # no function of this name
        "[files.import(x=1)]",
        "[f(from=a)]",
        "[f(from=__import__('os').system('true'))]",
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    for size in (len(text), 1, 3):
        assert read("pythonic", text, size) == (text, [])
