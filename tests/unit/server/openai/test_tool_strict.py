"""Strict functions where the model is free to call: whatever it writes, calls fit their schemas."""

import json
import logging
from typing import Any

import jsonschema_rs
import pytest

from engine.server.openai.tools.definitions import ToolsError
from engine.server.openai.tools.formats import CALL_FORMATS
from engine.server.openai.tools.plan import ChatFormats, ChatPlan, plan_chat
from tests.support.grammar_walks import finished_texts, lets_through

USER = [{"role": "user", "content": "Weather in Paris?"}]
TEMPLATE = "{{ messages }} {{ tools }} {{ tool_calls }}"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["c", "a/b é"]},
        "code": {"type": "string", "pattern": "^(?:ab+)?[x-z]{1,2}$"},
        "note": {"type": "string", "maxLength": 5},
        "days": {"type": "integer", "minimum": 1, "maximum": 70},
        "more": {"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 2},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "code", "at"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "boolean"}}}},
}
OPENINGS = {
    "hermes": b'<tool_call>\n{"name": "look", "arguments": {',
    "llama3_json": b'{"name": "look", "parameters": {',
    "phi4_mini_json": b'functools[{"name": "look", "arguments": {',
    "granite-20b-fc": b'<function_call>{"name": "look", "arguments": {',
    "json": b'{"name": "look", "arguments": {',
    "qwen3_coder": b"<tool_call>\n<function=look>\n<parameter=city>\n",
}
HELD = [name for name, form in CALL_FORMATS.items() if form.strict is not None]


def function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def plan_of(form: str, *tools: dict[str, Any], special: tuple[str, ...] = ()) -> ChatPlan:
    formats = ChatFormats.resolve(TEMPLATE, special, tool_call_parser=form)
    return plan_chat(formats, USER, tools=list(tools))


def opening_of(form: str) -> bytes:
    aliases = {"qwen3_json": "hermes", "llama4_json": "llama3_json", "qwen3_xml": "qwen3_coder"}
    return OPENINGS[aliases.get(form, form)]


def test_a_parameter_of_its_own_may_lead_to_all_of_them() -> None:
    """Where each parameter is a document of its own, the root is still found."""
    tree = {"type": "object", "properties": {"n": {"type": "integer"}, "at": {"$ref": "#"}}}
    plan = plan_of("qwen3_coder", function("look", tree, strict=True))
    assert plan.constraint is not None
    call = "<function=look>\n<parameter=at>\n{}\n</parameter>\n</function>"
    assert lets_through(plan.constraint, call.format('{"n": 1, "at": {"n": 2}}'))
    assert not lets_through(plan.constraint, call.format('{"n": 1, "at": {"n": "2"}}'))


@pytest.mark.parametrize("form", HELD)
def test_calls_fit_whatever_is_written(form: str) -> None:
    plan = plan_of(form, function("look", SCHEMA, strict=True), function("now"))
    assert plan.constraint is not None
    validator = jsonschema_rs.validator_for(SCHEMA)
    opening = opening_of(form)
    hints = (b"[", b"</tool_call>", b"\n</parameter>\n", b"</function>", b"; ", b"Hm. ")
    num_calls = num_free = 0
    output = plan.after_render("")
    for seed in range(4):
        for text in finished_texts(
            plan.constraint, 8, seed, length=150, hints=hints, begin=opening
        ):
            read = output.new_parser().parse(text.decode(errors="replace"))
            num_free += not read.tool_calls
            for call in read.tool_calls:
                num_calls += 1
                assert call.name in ("look", "now"), text
                if call.name == "look":
                    arguments = json.loads(call.arguments)
                    assert validator.is_valid(arguments), (text, arguments)
    assert num_calls > 2, "the walks never called"
    assert num_free > 0, "the model has to be free not to call"


@pytest.mark.parametrize("form", [*sorted(set(CALL_FORMATS) - set(HELD)), "hermes"])
def test_what_cannot_be_held_is_said_in_the_log(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    from engine.server.openai.tools import plan as module

    module._warn_that_strict_is_not_held.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            plan = plan_of(form, function("look", SCHEMA, strict=True), special=("<tool_call>",))
            assert plan.constraint is None
        assert plan_of(form, function("look", SCHEMA)).constraint is None
    (record,) = (one for one in caplog.records if "strict" in one.getMessage())
    assert f"of the form {form} cannot be held" in record.getMessage()


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"additionalProperties": {"type": "string"}}, "parameters"),
        ({"properties": {"a": {}}, "maxProperties": 1}, "parameters.maxProperties"),
        ({"properties": {"a": {"enum": ["<"]}}}, "parameters.properties.a"),
        (
            {"properties": {"a": {"allOf": [{"type": "string"}, {"pattern": "a"}]}}},
            "parameters.properties.a",
        ),
        ({"properties": {"a": {"not": {}}}}, "parameters.properties.a"),
    ],
)
def test_a_schema_that_this_form_of_calls_cannot_hold_is_refused(
    schema: dict[str, Any], param: str
) -> None:
    with pytest.raises(ToolsError) as caught:
        plan_of("qwen3_coder", function("now"), function("f", schema, strict=True))
    assert caught.value.param == f"tools[1].function.{param}"


def test_parameters_that_take_long_to_write_out_are_refused() -> None:
    """Few bytes can refer to many words many times."""
    words = {"anyOf": [{"const": f"word {index}"} for index in range(300)]}
    at = {f"p{index}": {"$ref": "#/$defs/words"} for index in range(2000)}
    schema = {"type": "object", "properties": at, "$defs": {"words": words}}
    with pytest.raises(ToolsError, match="too large to check") as caught:
        plan_of("qwen3_coder", function("f", schema, strict=True))
    assert (caught.value.param or "").startswith("tools[0].function.parameters.properties.p")
    few = schema | {"properties": dict(list(at.items())[:20])}
    assert plan_of("qwen3_coder", function("f", few, strict=True)).constraint is not None
