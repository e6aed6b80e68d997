"""What tools and `tool_choice` of a request mean, and how wrong ones are refused."""

import json
import re
from typing import Any

import pytest

from engine import StructuredOutputsParams
from engine.server.http.errors import ApiError
from engine.server.openai.sampling import form_names, in_api_words, naming_fields
from engine.server.openai.tools.choice import Mode, check_choice, required_schema
from engine.server.openai.tools.definitions import (
    MAX_SCHEMA_DEPTH,
    MAX_TOOLS,
    NO_PARAMETERS,
    ToolsError,
    check_tools,
)
from engine.server.openai.tools.pieces import gather
from engine.server.openai.tools.plan import ChatFormats, plan_chat
from tests.support.grammar_walks import lets_through

USER = [{"role": "user", "content": "Weather?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: object, parameters: object = None, **function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **function}}


def named(name: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"x": schema}
    return schema


def test_good_tools() -> None:
    first, second = check_tools(
        [tool("get_weather", CITY, description="Weather."), tool("now", strict=True)]
    )
    assert (first.name, first.schema, first.strict) == ("get_weather", CITY, False)
    assert first.definition["function"]["description"] == "Weather."
    assert (second.name, second.schema, second.strict) == ("now", NO_PARAMETERS, True)
    assert "parameters" not in second.definition["function"]
    assert check_tools(None) == []
    assert check_tools([tool("f", {"properties": {}})])[0].schema["type"] == "object"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("f", "tools"),
        ({}, "tools"),
        ([], "tools"),
        ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], "tools"),
        ([tool("f", description="x" * 200_000)], "tools"),
        ([tool("f"), 3], "tools[1]"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([tool(None)], "tools[0].function.name"),
        ([tool("")], "tools[0].function.name"),
        ([tool("a b")], "tools[0].function.name"),
        ([tool("x" * 129)], "tools[0].function.name"),
        ([tool("f"), tool("f")], "tools[1].function.name"),
        ([tool("f", description=3)], "tools[0].function.description"),
        ([tool("f", strict="yes")], "tools[0].function.strict"),
        ([tool("f", [])], "tools[0].function.parameters"),
        ([tool("f", {"type": "string"})], "tools[0].function.parameters.type"),
        ([tool("f", {"properties": []})], "tools[0].function.parameters.properties"),
        ([tool("f", {"properties": {"a": 3}})], "tools[0].function.parameters.properties"),
        ([tool("f", {"required": "a"})], "tools[0].function.parameters.required"),
        ([tool("f", deep(MAX_SCHEMA_DEPTH + 1))], "tools[0].function.parameters"),
    ],
)
def test_wrong_tools_are_refused_by_name(tools: object, param: str) -> None:
    with pytest.raises(ToolsError, match=f"^{re.escape(param)}: ") as caught:
        check_tools(tools)
    assert caught.value.param == param
    assert len(str(caught.value)) < 500


def test_the_choice() -> None:
    tools = check_tools([tool("f"), tool("g")])
    f, g = tools
    assert check_choice(None, []).mode is Mode.NONE
    assert check_choice("none", []).mode is Mode.NONE
    assert check_choice(None, tools).mode is Mode.AUTO
    assert check_choice("none", tools).tools == ()
    for word in ("auto", "required"):
        choice = check_choice(word, tools)
        assert (choice.mode, choice.tools) == (Mode(word), (f, g))
    choice = check_choice(named("g"), tools)
    assert (choice.mode, choice.tools) == (Mode.NAMED, (g,))
    allowed = {"mode": "required", "tools": [named("g"), named("g")]}
    choice = check_choice({"type": "allowed_tools", "allowed_tools": allowed}, tools)
    assert (choice.mode, choice.tools) == (Mode.REQUIRED, (g,))


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("sometimes", "tool_choice"),
        (3, "tool_choice"),
        ({}, "tool_choice"),
        ({"type": "function"}, "tool_choice"),
        ({"type": "function", "function": "f"}, "tool_choice"),
        ({"type": "custom", "function": {"name": "f"}}, "tool_choice"),
        (named("h"), "tool_choice.function.name"),
        (named(None), "tool_choice.function.name"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("h")]}},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
    ],
)
def test_wrong_choices_are_refused_by_name(choice: object, param: str) -> None:
    with pytest.raises(ToolsError) as caught:
        check_choice(choice, check_tools([tool("f")]))
    assert caught.value.param == param


@pytest.mark.parametrize("choice", ["auto", "required", named("f")])
def test_a_choice_needs_tools(choice: object) -> None:
    with pytest.raises(ToolsError, match="needs tools") as caught:
        check_choice(choice, [])
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("choice", "strict"), [("required", None), (named("g"), None), ("auto", True)]
)
def test_a_schema_that_cannot_be_held_is_refused_with_its_place(
    choice: object, strict: bool | None
) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [tool("f", CITY), tool("g", bad, strict=strict)]
    formats = ChatFormats.resolve("")
    with pytest.raises(ToolsError, match="'uniqueItems' is not supported") as caught:
        plan_chat(formats, USER, tools=tools, tool_choice=choice)
    assert caught.value.param == "tools[1].function.parameters.properties.a"
    assert "structured_outputs" not in str(caught.value)
    free = plan_chat(formats, USER, tools=[tool("f", CITY), tool("g", bad)], tool_choice="auto")
    assert free.constraint is None
    assert free.field_names == {}


def test_fields_of_a_form_that_tools_gave() -> None:
    formats = ChatFormats.resolve("")
    for choice, place in (("required", "tools"), (named("g"), "tools[1].function.parameters")):
        plan = plan_chat(formats, USER, tools=[tool("f"), tool("g", CITY)], tool_choice=choice)
        message = "structured_outputs.json cannot be used: nothing matches"
        assert in_api_words(message, plan.field_names).startswith(f"{place} cannot be used")


def test_fields_of_a_form_that_the_request_has() -> None:
    bad = {"type": "object", "properties": {"a": {"not": {}}}}
    for field, place in (
        ("response_format", "response_format.json_schema.schema.properties.a"),
        ("guided_json", "guided_json.properties.a"),
        ("structured_outputs", "structured_outputs.json.properties.a"),
    ):
        with pytest.raises(ApiError) as caught, naming_fields(form_names(field)):
            StructuredOutputsParams(json=bad)
        assert caught.value.param == place
        assert caught.value.message.startswith(f"{place}: 'not' is not")
    said = in_api_words("structured_outputs.regex cannot be used: x", form_names("response_format"))
    assert said == "response_format.regex cannot be used: x"


def accepts(schema: dict[str, Any], value: object) -> bool:
    """Whether JSON of that value is one that the schema's grammar completes."""
    form = StructuredOutputsParams(json=schema)
    return lets_through(form, json.dumps(value))


def test_required_calls() -> None:
    schema = required_schema(check_tools([tool("weather", CITY), tool("now")]))
    weather = {"name": "weather", "parameters": {"city": "Paris"}}
    now: dict[str, Any] = {"name": "now", "parameters": {}}
    assert accepts(schema, [weather])
    assert accepts(schema, [now, weather, now])
    for wrong in (
        [],
        weather,
        [{"name": "now", "parameters": {"city": "Paris"}}],
        [{"name": "weather", "parameters": {}}],
        [{"name": "weather"}],
        [{"name": "other", "parameters": {}}],
        [now | {"more": 1}],
    ):
        assert not accepts(schema, wrong), wrong


def test_at_most_one_required_call() -> None:
    schema = required_schema(check_tools([tool("now")]), 1)
    now: dict[str, Any] = {"name": "now", "parameters": {}}
    assert accepts(schema, [now])
    assert not accepts(schema, [now, now])


def test_a_required_answer_that_is_cut_off_before_its_call_is_content() -> None:
    plan = plan_chat(
        ChatFormats.resolve(""), USER, tools=[tool("now"), tool("ask")], tool_choice="required"
    )
    whole = '[{"name": "now", "parameters": {"a": 1}}, {"name": "ask", "parameters": {}}]'
    num_before = whole.index('{"a"')
    for length in range(1, len(whole) + 1):
        output = plan.after_render("")
        answer = output.new_parser().parse(whole[:length])
        parser = output.new_parser()
        streamed = gather(
            [p for char in whole[:length] for p in parser.feed(char)] + parser.finish()
        )
        assert streamed.content == answer.content
        assert answer.content == (whole[:length] if length <= num_before else None)
        assert bool(answer.tool_calls) == (length > num_before)


def test_references_of_a_tools_schema_still_lead_where_they_did() -> None:
    place = {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}
    tree = {
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/place"},
            "child": {"$ref": "#"},
            "word": {"const": "$ref", "examples": [{"$ref": "#/data"}]},
        },
        "required": ["at"],
        "$defs": {"place": place},
    }
    before = json.dumps(tree)
    schema = required_schema(check_tools([tool("now"), tool("plant", tree)]))
    assert json.dumps(tree) == before
    good = {"at": {"lat": 1}, "child": {"at": {"lat": 2}}, "word": "$ref"}
    assert accepts(schema, [{"name": "plant", "parameters": good}])
    bad = {"at": {"lat": 1}, "child": {"at": 2}}
    assert not accepts(schema, [{"name": "plant", "parameters": bad}])
