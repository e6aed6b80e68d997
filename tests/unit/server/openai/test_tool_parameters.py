"""What a parameter's text is read as: by its schema, however that says it, and never by its looks.

The order of types is vLLM's (`null`, `integer`, `number`, `boolean`, `object`, `array`, `string`).
"""

import json
import time
from typing import Any

import pytest

from engine.server.openai.tools.chat_output import ChatOutputParser
from engine.server.openai.tools.definitions import check_tools
from engine.server.openai.tools.formats import CALL_FORMATS

STRING = {"type": "string"}
NULL = {"type": "null"}
DEFINITIONS = {
    "Level": {"type": "string", "enum": ["1", "2"]},
    "Text": STRING,
    "Far": {"anyOf": [{"$ref": "#/$defs/Text"}]},
    "a/b": STRING,
    "Number": {"type": "integer"},
    "Endless": {"anyOf": [STRING, {"$ref": "#/$defs/Endless"}]},
}


def read(text: str, schema: Any, **more: Any) -> Any:
    """The value of parameter `a`, of that schema."""
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": DEFINITIONS, **more}
    function = {"name": "f", "parameters": parameters}
    tools = check_tools([{"type": "function", "function": function}])
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>"
    output = ChatOutputParser(CALL_FORMATS["qwen3_coder"].new_parser(tools)).parse(call)
    (one,) = output.tool_calls
    return json.loads(one.arguments)["a"]


@pytest.mark.parametrize("text", ["7", "2", "12345", "null", "True", '{"a": 1}', "[1]", '"x"', ""])
@pytest.mark.parametrize(
    "schema",
    [
        {"const": "7"},
        {"enum": ["2", "7"]},
        {"$ref": "#/$defs/Level"},
        {"$ref": "#/$defs/Text"},
        {"$ref": "#/$defs/Far", "description": "far away"},
        {"$ref": "#/$defs/a~1b"},
        {"allOf": [STRING]},
        {"allOf": [{"$ref": "#/$defs/Level"}], "default": "1"},
        {"allOf": [{"type": ["string", "integer"]}, STRING]},
        {"anyOf": [STRING, {"const": "7"}]},
        {"oneOf": [{"const": "2", "title": "Two"}, {"const": "7"}]},
        {"type": "string", "anyOf": [{"pattern": "a"}, {"type": "integer"}]},
        {"type": ["string", "integer"], "enum": ["2"]},
        {"pattern": "^[0-9]+$"},
        {"maxLength": 8},
        {"type": "str"},
    ],
)
def test_a_string_is_one_however_the_schema_says_it(schema: Any, text: str) -> None:
    assert read(text, schema) == text


@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", "7", "1.5", "true", "None", '"2"', "", "x"])
@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [STRING, NULL]},
        {"type": ["string", "null"]},
        {"anyOf": [{"$ref": "#/$defs/Text"}, NULL], "default": None},
        {"enum": ["2", None]},
        {"anyOf": [{"$ref": "#/$defs/Level"}, {"const": None}]},
    ],
)
def test_an_optional_string_is_a_string_or_null(schema: Any, text: str) -> None:
    assert read(text, schema) == text
    assert read("null", schema) is None
    assert read("NULL", schema) is None


def union(*types: str) -> dict[str, Any]:
    return {"anyOf": [{"type": name} for name in types]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (union("string", "integer"), "7", 7),
        (union("string", "integer"), "-12", -12),
        (union("string", "integer"), "7.5", "7.5"),
        (union("string", "integer"), "007", "007"),  # which no JSON is, and may be a code
        (union("string", "integer"), "1_000", "1_000"),
        (union("string", "integer"), "true", "true"),
        (union("string", "number"), "7.5e1", 75.0),
        (union("string", "number"), "1e999", "1e999"),
        (union("string", "boolean"), "True", True),
        (union("string", "boolean"), "1", "1"),
        (union("string", "boolean", "integer"), "1", 1),
        (union("string", "object"), '{"a": 1}', {"a": 1}),
        (union("string", "object"), "{'a': 1}", "{'a': 1}"),
        (union("string", "object"), "[1]", "[1]"),
        (union("string", "object"), "7", "7"),
        (union("string", "array"), "[1]", [1]),
        (union("string", "array"), "[1] and more", "[1] and more"),
        ({"anyOf": [STRING, {"type": "integer", "minimum": 5}]}, "7", 7),
        ({"anyOf": [STRING, {"type": "integer", "minimum": 5}]}, "3", "3"),
        ({"anyOf": [STRING, {"type": "integer", "multipleOf": 2}]}, "3", "3"),
        ({"anyOf": [STRING, {"const": 7}]}, "8", "8"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"enum": ["1", 2]}, "3", 3),
        ({"enum": [1, True]}, "true", True),
        ({"const": 7}, "7", 7),
        ({"$ref": "#/$defs/Number"}, "7", 7),
        ({"type": "integer"}, "007", 7),
        ({"type": "integer"}, "7.0", 7.0),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "number"}, " .5 ", 0.5),
        ({"type": "number"}, "Infinity", "Infinity"),
        ({"type": "boolean"}, "1", True),
        ({"type": "boolean"}, "FALSE", False),
        ({"type": "boolean"}, "2", 2),
        (union("integer", "null"), "None", None),
        ({"type": "array"}, "[1, 'x']", [1, "x"]),
        ({"type": "array"}, "['1\n2']", ["1\n2"]),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"properties": {"b": STRING}}, '{"b": "1"}', {"b": "1"}),
        ({}, "7", 7),
        ({}, '"7"', "7"),
        ({}, "seven", "seven"),
        (True, "[7]", [7]),
        (False, "seven", "seven"),
        ({"type": "date"}, "[7]", [7]),
        ({"$ref": "#/nowhere"}, "7", 7),
        ({"$ref": "https://example.com/a"}, "7", 7),
        ({"$ref": "#/$defs/Endless"}, "7", 7),
        ({"anyOf": 7, "allOf": None, "type": 7, "enum": "a"}, "7", 7),
        ({"anyOf": [7], "minimum": "a", "multipleOf": 10**400}, "7", 7),
    ],
)  # fmt: skip
def test_types_are_tried_in_order(schema: Any, text: str, value: Any) -> None:
    found = read(text, schema)
    assert found == value
    assert type(found) is type(value)


def test_a_number_without_an_end_stays_as_it_is_written() -> None:
    assert read("1e999", {"type": "number"}) == float("inf")
    assert read("[1e999]", {"type": "array"}) == [float("inf")]
    assert read("1e999", {}) == "1e999"


@pytest.mark.parametrize(
    "more",
    [
        {"properties": {}, "additionalProperties": STRING},
        {"properties": {}, "additionalProperties": {"$ref": "#/$defs/Text"}},
        {"properties": {}, "patternProperties": {"^a": STRING}, "additionalProperties": False},
        {"properties": {}, "$ref": "#/$defs/Arguments"},
        {"properties": {}, "allOf": [{"properties": {"a": STRING}}]},
        {"properties": {}, "anyOf": [{"properties": {"a": STRING}}, {"$ref": "#/$defs/Arguments"}]},
    ],
)
def test_a_parameter_may_be_described_elsewhere(more: dict[str, Any]) -> None:
    arguments = {"type": "object", "properties": {"a": STRING}}
    assert read("7", None, **more, **{"$defs": {**DEFINITIONS, "Arguments": arguments}}) == "7"


def test_schemas_that_multiply_take_no_time() -> None:
    definitions = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)} | {
        "a40": STRING
    }
    assert read("7", {"$ref": "#/$defs/a0"}, **{"$defs": definitions}) == 7
    none = definitions | {"a40": False}
    assert read("7", {"$ref": "#/$defs/a0"}, **{"$defs": none}) == 7
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(4000)}
    assert read("7", {"$ref": "#/$defs/a0"}, **{"$defs": chain}) == 7


def test_no_text_takes_long() -> None:
    endless = ("\\'", "'", "[(", "f(in=", "a'\n", "(   ", ",\n")
    for text in (f"{morsel * 20_000}x" for morsel in endless):
        start_ns = time.process_time_ns()
        assert read(text, {"type": "array"}) == text
        assert time.process_time_ns() - start_ns < 5_000_000_000, text[:10]
