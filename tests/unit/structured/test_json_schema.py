"""JSON schemas: whatever is let through fits them; what cannot be enforced is refused."""

import copy
import json
import math
from typing import Any

import jsonschema_rs
import pytest

from engine import SamplingParamsError, StructuredOutputsParams
from engine.structured.constraint import ConstraintError
from engine.structured.forms import references
from engine.structured.forms.prepass import prepared
from engine.structured.forms.references import Allowance
from engine.structured.forms.schema_shapes import SchemaError
from tests.support.grammar_walks import finished_texts, lets_through
from tests.support.schemas import Schemas

DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def is_finite(value: object) -> bool:
    """Whether no number in it is too large for a double, which no schema forbids."""
    if isinstance(value, dict | list):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def check(schema: dict[str, Any], num_walks: int, seed: int, **options: Any) -> int:
    """Walk through the schema's grammar; returns how many texts came to their end."""
    form = StructuredOutputsParams(json=copy.deepcopy(schema), **options)
    validator = jsonschema_rs.validator_for(schema)
    num_texts = 0
    for text in finished_texts(form, num_walks, seed):
        value = json.loads(text.decode(errors="replace"))
        num_texts += 1
        if is_finite(value):
            assert validator.is_valid(value), (text, schema, form.json)
    return num_texts


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_let_through_fits(seed: int) -> None:
    schemas = Schemas(seed)
    num_held = num_texts = 0
    for number in range(60):
        schema = schemas.root()
        try:
            jsonschema_rs.validator_for(schema)
        except ValueError:
            continue  # a reference to nothing
        try:
            num_texts += check(schema, 6, number, disable_any_whitespace=number % 3 > 0)
        except (SamplingParamsError, ConstraintError):
            continue
        num_held += 1
    assert num_held > 30, "nearly nothing is supported"
    assert num_texts > 150


STRING = {"type": "string"}
A = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
WITH_A = {"$defs": {"a": A}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, ['{"x": 1}'], ['{"x": 1, "y": 2}', '{"y": 1}', "{}"]),
        ({"properties": {"a": {}}}, ["{}", '{"a": [1]}'], ["3", '{"b": 1}']),
        ({"type": "object"}, ['{"any": {"thing": 1}}'], ["[1]"]),
        (A | {"additionalProperties": True}, ['{"x": 1, "y": 2}'], ['{"y": 2}']),
        ({"required": ["a"]}, ['{"a": 1}'], ["{}", '{"a": 1, "b": 2}']),
        ({"patternProperties": {"^a": STRING}}, ['{"ab": "x"}'], ['{"b": "x"}', '{"a": 1}']),
        (
            {"patternProperties": {"^S_": STRING, "^I_": {"type": "integer"}}},
            ['{"S_a": "x", "I_b": 1}'],
            ['{"S_a": 1}', '{"I_a": "x"}'],
        ),
        (
            {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": STRING}}], **WITH_A},
            ['{"x": 1, "y": "b"}', '{"x": 1}'],
            ['{"y": "b"}', '{"x": 1, "z": 1}', '{"x": "b"}'],
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/a", "description": "D"}}, **WITH_A},
            ['{"a": {"x": 1}}'],
            ['{"a": {"x": 1, "y": 1}}', '{"a": {}}'],
        ),
        (
            {"$ref": "#/$defs/a", "properties": {"y": STRING}, "required": ["y"], **WITH_A},
            ['{"x": 1, "y": "b"}'],
            ['{"x": 1}', '{"x": 1, "y": "b", "z": 1}'],
        ),
        (
            {
                "properties": {"a": {"type": "integer"}},
                "anyOf": [{"properties": {"b": STRING}, "required": ["b"]}, {"required": ["a"]}],
            },
            ['{"a": 1, "b": "x"}', '{"a": 1}', '{"b": "x"}'],
            ["{}", '{"b": 1}', '{"a": 1, "c": 1}'],
        ),
        ({"$ref": "#foo", "$defs": {"a": {"$anchor": "foo", "enum": [1]}}}, ["1"], ["2"]),
        (
            {"$id": "https://e.org/r", "$ref": "https://e.org/r#/$defs/a", **WITH_A},
            ['{"x": 1}'],
            ["{}"],
        ),
        (
            {"properties": {"a": STRING, "kids": {"items": {"$ref": "#"}}}},
            ['{"kids": [{"a": "x", "kids": []}]}'],
            ['{"kids": [{"b": 1}]}', '{"kids": [1]}'],
        ),
        (
            {
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
                "$defs": {
                    name: {
                        "type": "object",
                        "properties": {"kind": {"const": name}, "kid": {"$ref": "#"}},
                        "required": ["kind"],
                    }
                    for name in ("cat", "dog")
                },
            },
            ['{"kind": "cat", "kid": {"kind": "dog"}}'],
            ['{"kind": "cow"}', "{}"],
        ),
        ({"oneOf": [STRING, {"type": "integer"}]}, ['"a"', "1"], ["null", "1.5"]),
        ({"propertyNames": {"enum": ["a", "b"]}}, ['{"b": 1}', "{}"], ['{"c": 1}']),
        (
            {
                "propertyNames": {"$ref": "#/$defs/k"},
                "additionalProperties": {"type": "integer"},
                "$defs": {"k": {"pattern": "^[a-c]+$", "type": "string"}},
            },
            ['{"abc": 1}'],
            ['{"d": 1}', '{"a": "x"}'],
        ),
        (
            {"$schema": DRAFT_7, "items": [{"type": "integer"}, STRING], "additionalItems": False},
            ['[1, "a"]', "[1]"],
            ['["a"]', '[1, "a", 2]'],
        ),
        ({"type": "string", "pattern": "[(?=][0-9]|[0-9]{3}"}, ['"ab123c"'], ['"12"']),
        ({"type": "string", "pattern": "^\\d+$", "maxLength": 2}, ['"12"'], ['"123"', '"٣"']),
        ({"type": "string", "format": "uuid"}, [], ['"x"']),
        ({"type": "string", "format": "binary"}, ['"x"'], ["1"]),
        ({"type": "string"}, ['"\\n\\\\é"'], ['"\\u0061"']),
        ({"type": "integer", "minimum": 0, "multipleOf": 5}, ["0", "15"], ["-5", "7"]),
        ({"type": "number", "multipleOf": 0.01}, ["1.25"], ["1.255"]),
        ({"type": "integer", "maximum": 2**63 - 1, "minimum": -(2**63)}, ["7", "-7"], ['"a"']),
        ({"const": 1, "enum": [1, 2]}, ["1"], ["2"]),
        ({"enum": ["a", "bcd"], "maxLength": 2}, ['"a"'], ['"bcd"']),
        ({"minProperties": 1, "properties": {"a": {}, "b": {}}}, ['{"b": 1}'], ["{}"]),
        ({"type": "array", "uniqueItems": False, "minItems": 1}, ["[1, 1]"], ["[]"]),
        ({"x-guidance": {"lenient": True}, "type": "integer"}, ["1"], ['"a"']),
    ],
    ids=range(32),
)
def test_what_is_let_through(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    before = copy.deepcopy(schema)
    form = StructuredOutputsParams(json=schema)
    assert schema == before, "the caller's own is left alone"
    for text in good:
        assert lets_through(form, text), text
        assert jsonschema_rs.validator_for(schema).is_valid(json.loads(text))
    for text in bad:
        assert not lets_through(form, text), text


def test_objects_are_left_open_on_demand() -> None:
    schema = prepared(A, closes_objects=False)
    assert "additionalProperties" not in schema
    assert lets_through(StructuredOutputsParams.of_prepared("json", schema), '{"x": 1, "y": 2}')


def chain(keyword: str, num: int) -> dict[str, Any]:
    """References that lead to each other, directly or from object to object."""
    links: dict[str, Any] = {}
    for number in range(num):
        link = {"$ref": f"#/$defs/d{number + 1}"}
        links[f"d{number}"] = link if keyword == "$ref" else {keyword: {"a": link}}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{num}": STRING}}


def optional(num: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": STRING for index in range(num)}}


@pytest.mark.parametrize(
    ("schema", "path", "message"),
    [
        ({"type": "array", "contains": {}}, "", "'contains' is not supported"),
        ({"$ref": "#/$defs/a"}, ".$ref", "points to nothing"),
        ({"$ref": "#a"}, ".$ref", "points to nothing"),
        ({"$ref": "https://example.org"}, ".$ref", "must point into the schema itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "", "refers to itself"),
        ({"allOf": [{"$ref": "#"}]}, "", "refers to itself"),
        (chain("$ref", 70), "", "references lead to each other"),
        (chain("properties", 600), ".$defs.d499.properties.a.$ref", "at most 500 schemas"),
        (
            {"properties": {"a": {}}, "propertyNames": {"pattern": "b"}},
            ".propertyNames",
            "name the keys in 'properties'",
        ),
        (
            {"type": "object", "additionalProperties": True, "minProperties": 2},
            ".minProperties",
            "other keys may come twice",
        ),
        ({"properties": {"a": {"items": {"type": "x"}}}}, ".properties.a.items.type", "must be"),
        ({"anyOf": [{"properties": {"a b": {"type": 3}}}]}, ".anyOf[0].properties['a b'].type", ""),
        (optional(501), ".properties", "at most 500 properties"),
        ({"prefixItems": [optional(500)] * 5}, ".prefixItems[4].properties", "2000 in all"),
        (
            {"patternProperties": {f"^{index}": {} for index in range(41)}},
            ".patternProperties",
            "at most 40 patterns",
        ),
        ({"items": {"pattern": "a" * 4097}}, ".items", "4096 characters, got 4097"),
        ({"allOf": [{"pattern": f"{index}"} for index in range(9)]}, "", "at most 8 patterns"),
        ({"multipleOf": 10_001}, ".multipleOf", "10000 at most"),
        ({"multipleOf": 0.1234567}, ".multipleOf", "its decimal point left out"),
        ({"allOf": [{"multipleOf": 101}, {"multipleOf": 103}]}, ".multipleOf", "their product"),
        ({"minimum": 1e19}, ".minimum", "1000000000000000000 at most"),
        ({"items": {"pattern": "^(?=a)b"}}, ".items.pattern", "lookaheads and lookbehinds are not"),
        ({"pattern": "(a)\\1"}, ".pattern", "backreferences are not supported ('\\\\1' at char"),
        ({"patternProperties": {"\\ba": {}}}, "", "word boundaries are not supported"),
        ({"propertyNames": {"pattern": "a" * 4097}}, "", "4096 characters, got 4097"),
        ({"items": {"$id": "https://example.org"}}, ".items", "'$id' within a schema"),
    ],
    ids=range(26),
)
def test_what_cannot_be_enforced_is_refused_with_its_place(
    schema: dict[str, Any], path: str, message: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        prepared(schema)
    assert caught.value.path == path
    assert message in caught.value.message
    with pytest.raises(SamplingParamsError) as refused:
        StructuredOutputsParams(json=json.dumps(schema))
    assert str(refused.value).startswith(f"structured_outputs.json{path}: ")


def test_caps_leave_room_for_what_people_send() -> None:
    for schema in (
        optional(500),
        chain("properties", 400),
        {"enum": [f"value {index}" for index in range(10_000)]},
        {"anyOf": [{"const": index} for index in range(300)]},
        {"patternProperties": {f"^{index}_": {} for index in range(40)}},
    ):
        form = StructuredOutputsParams(json=schema)
        assert list(finished_texts(form, 3, 0, length=10_000)), "too much to follow"


def test_schemas_of_one_request_share_what_they_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [{"type": "json_schema", "json_schema": optional(500)} for _ in range(5)]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
    with pytest.raises(SamplingParamsError, match=r"elements\[4\].json_schema.properties"):
        StructuredOutputsParams(structural_tag=tag)
    monkeypatch.setattr(references, "MAX_STEPS", 3)
    with pytest.raises(SchemaError, match="too large to check"):
        prepared({"prefixItems": [True] * 4}, Allowance())


def test_options_that_a_value_may_fit_both_are_told_from_others() -> None:
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    with pytest.raises(ConstraintError, match="'oneOf' is supported where no value can fit two"):
        lets_through(StructuredOutputsParams(json=overlapping), "1")
    for options, written in (
        ([{"type": "string"}, {"type": ["integer", "null"]}], "anyOf"),
        ([{"type": "integer"}, {"type": "number"}], "oneOf"),
        ([{"const": "a"}, {"const": "b"}], "oneOf"),
    ):
        assert [*prepared({"oneOf": options})] == [written]
