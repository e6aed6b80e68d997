"""Structural tags: what each format lets through, alone and within others; what is refused."""

from typing import Any

import pytest

from engine import SamplingParamsError, StructuredOutputsParams
from tests.support.grammar_walks import lets_through

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TEXT = {"type": "any_text"}


def word(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(**more: Any) -> dict[str, Any]:
    tags = [tag("<f>", NUMBER, "</f>"), tag("<g>", word("x"), "</g>")]
    return {"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": tags, **more}


def separated(**more: Any) -> dict[str, Any]:
    tags = [tag("(", NUMBER, ")"), tag("[", TEXT, "]")]
    return {"type": "tags_with_separator", "tags": tags, "separator": ", ", **more}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (word('a"\\\n'), ['a"\\\n'], ["", "a"]),
        (NUMBER, ["12"], ['"a"', "12 "]),
        ({"type": "regex", "pattern": "[ab]/+"}, ["a//"], ["a", "c/"]),
        ({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, ["((x))"], ["(x"]),
        ({"type": "grammar", "grammar": 'start: "(" start ")" | "x"'}, ["((x))"], ["(x"]),
        (TEXT, ["", "any <f> é\n"], []),
        (TEXT | {"excludes": ["no", '"']}, ["", "n o"], ["a no b", '"']),
        (
            {
                "type": "sequence",
                "elements": [word("a"), {"type": "regex", "pattern": "b*"}, NUMBER],
            },
            ["abb3", "a-7"],
            ["a", "bb3", "abb"],
        ),
        (
            {"type": "sequence", "elements": [word("a"), NUMBER, TEXT]},
            ["a1", "a1 and more"],
            ["a", "1"],
        ),
        ({"type": "or", "elements": [word("a"), word("ab"), NUMBER]}, ["a", "ab", "3"], ["b", ""]),
        (
            {"type": "sequence", "elements": [{"type": "optional", "content": NUMBER}, word("x")]},
            ["x", "3x"],
            ["3"],
        ),
        ({"type": "optional", "content": word("x")}, ["x", ""], ["xx"]),
        (tag("<a>", TEXT, "</a>"), ["<a>b</</a>"], ["<a>b", "<a></a></a>", "<b></a>"]),
        (tag("<a>", TEXT, ["!", "?"]), ["<a>b!", "<a>b?"], ["<a>b", "<a>b!?"]),
        (tag("<a>", NUMBER, ""), ["<a>3"], ["<a>"]),
        (tag("<a>", tag("<b>", TEXT, ""), "</a>"), ["<a><b>text</a>"], ["<a><b>text"]),
        (
            tag("<a>", {"type": "optional", "content": tag("<b>", TEXT, ";")}, "</a>"),
            ["<a></a>", "<a><b>x;</a>"],
            ["<a><b>x</a>"],
        ),
        (
            triggered(),
            ["", "text < f>", "a <f>3</f> b <g>x</g><f>4</f>"],
            ["<f>x</f>", "<f", "a <g>3</g>", "<f>3</f> <g"],
        ),
        (triggered(excludes=["no"]), ["<f>3</f>"], ["no", "<f>3</f> no", "no <f>3</f>"]),
        (triggered(stop_after_first=True), ["text", "a <f>3</f>"], ["a <f>3</f> ", "<f>3"]),
        (triggered(at_least_one=True), ["a <f>3</f> b"], ["", "a"]),
        (
            triggered(at_least_one=True, stop_after_first=True),
            ["a <g>x</g>"],
            ["a", "a <g>x</g> b", "<g>x</g><g>x</g>"],
        ),
        (
            tag("{", triggered(), "}"),
            ["{}", "{a <f>3</f> b}"],
            ["{a <f>3</f> b", "{a} <f>3</f>", "{a} b"],
        ),
        (separated(), ["", "(3)", "(3), [a]", "[a, b], (4)"], ["(3)(4)", "(3), ", "(a)"]),
        (separated(at_least_one=True), ["(3)"], [""]),
        (separated(stop_after_first=True), ["", "(3)"], ["(3), (4)"]),
    ],
    ids=range(26),
)
def test_what_is_let_through(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    params = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})
    for text in good:
        assert lets_through(params, text), text
    for text in bad:
        assert not lets_through(params, text), text


def test_a_trigger_that_begins_another_is_found_first() -> None:
    tags = [tag("<ab>", NUMBER, "</>"), tag("<ac>", word("x"), "</>")]
    form = {"type": "triggered_tags", "triggers": ["<a", "<ac"], "tags": tags}
    params = StructuredOutputsParams(structural_tag={"format": form})
    assert lets_through(params, "t <ac>x</> <ab>3</>")
    assert not lets_through(params, "<ad>")


@pytest.mark.parametrize(
    ("form", "path", "message"),
    [
        (None, "", 'must have a "format"'),
        ({"type": "qwen_xml_parameter"}, ".format.type", "must be one of const_string"),
        ({"type": "regex"}, ".format.pattern", "a string that is not empty"),
        ({"type": "regex", "pattern": "(?=a)"}, ".format.pattern", "lookaheads"),
        ({"type": "or", "elements": []}, ".format.elements", "a list that is not empty"),
        ({"type": "or", "elements": [3]}, ".format.elements[0].type", "must be one of"),
        ({"type": "optional"}, ".format.content.type", "must be one of"),
        (tag("a", word("b"), 3), ".format.end", "a string, or a list"),
        (tag("a", word("b"), ["c", ""]), ".format.end", "none empty"),
        (tag("a", TEXT | {"excludes": [""]}, "c"), ".format.content.excludes", "strings that are"),
        (triggered(triggers=["<x"]), ".format.tags[0].begin", "begin with one of the triggers"),
        (triggered(tags=[3]), ".format.tags[0].begin", "a string that is not empty"),
        (NUMBER | {"json_schema": 3}, ".format.json_schema", "must be a JSON schema"),
        (NUMBER | {"max_whitespace_cnt": 0}, ".format.max_whitespace_cnt", "from 1 to 10"),
        (
            {"type": "json_schema", "json_schema": {"properties": {"a": {"not": {}}}}},
            ".format.json_schema.properties.a",
            "'not' is not supported",
        ),
    ],
    ids=range(15),
)
def test_what_is_malformed_is_refused_with_its_place(
    form: dict[str, Any] | None, path: str, message: str
) -> None:
    with pytest.raises(SamplingParamsError) as caught:
        StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})
    assert str(caught.value).startswith(f"structured_outputs.structural_tag{path}: ")
    assert message in str(caught.value)
