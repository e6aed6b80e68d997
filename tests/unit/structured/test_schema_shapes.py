"""Schemas that are none: whatever is wrong with one, it is said, with its place."""

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from engine import SamplingParamsError, StructuredOutputsParams
from engine.structured.forms.prepass import prepared
from engine.structured.forms.schema_shapes import SchemaError
from tests.support.schemas import Schemas

OBJECT = {"type": "object", "required": ["a"], "properties": {"a": {"const": 1}}}
DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("schema", "path", "message"),
    [
        (
            {"$defs": [], "properties": {"a": {"$ref": "#/properties/b"}, "b": {}}},
            ".$defs",
            "by name",
        ),
        ({"$defs": None, "properties": {"a": {"$ref": "#/properties/a"}}}, ".$defs", "by name"),
        ({"definitions": [{"type": "null"}], "$ref": "#/definitions/0"}, ".definitions", "by name"),
        (
            {"anyOf": [{"type": "null"}, {"$ref": f"#/anyOf/{DIGITS}"}]},
            ".anyOf[1].$ref",
            "to nothing",
        ),
        ({"type": "integer", "minimum": 10**400}, ".minimum", "at most"),
        ({"type": "number", "multipleOf": 10**400}, ".multipleOf", "10000 at most"),
        ({"type": "number", "multipleOf": 0}, ".multipleOf", "above 0"),
        ({"type": "number", "minimum": 1e999}, ".minimum", "must be a number"),
        ({"type": "number", "exclusiveMinimum": True}, ".exclusiveMinimum", "must be a number"),
        ({"anyOf": [{"required": [["a"]]}], "required": ["b"]}, ".anyOf[0].required", "names"),
        ({"oneOf": [OBJECT, OBJECT | {"required": 5}]}, ".oneOf[1].required", "names"),
        ({"oneOf": [OBJECT, {"properties": ["a"]}]}, ".oneOf[1].properties", "by name"),
        ({"oneOf": [{"type": [{}]}]}, ".oneOf[0].type", "must be one of null"),
        ({"type": None}, ".type", "must be one of null"),
        ({"type": []}, ".type", "must be one of null"),
        ({"properties": {1: {}}}, ".properties", "by name"),
        ({"x": 1, 2: 3}, "", "must be strings"),
        ({"anyOf": {}}, ".anyOf", "a list of schemas that is not empty"),
        ({"allOf": []}, ".allOf", "a list of schemas that is not empty"),
        ({"enum": 3}, ".enum", "not empty"),
        ({"type": "string", "format": ["x"]}, ".format", "a string"),
        ({"type": "string", "pattern": 3}, ".pattern", "a string"),
        ({"type": "string", "minLength": 10**400}, ".minLength", "not negative"),
        ({"type": "string", "minLength": 1e999}, ".minLength", "not negative"),
        ({"$ref": 3}, ".$ref", "must be a string"),
        ({"$ref": "#/x", "x": {"type": 5}}, ".x.type", "must be one of null"),
        ({"items": {"$ref": "#/x/0"}, "x": [[]]}, ".x.0", "must be a schema"),
        ({"type": "array", "uniqueItems": 1}, ".uniqueItems", "true or false"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "", "'minItems' is above 'maxItems'"),
        ({"type": "string", "minLength": 3, "maxLength": 2.0}, "", "above 'maxLength'"),
        ({"type": "object", "minProperties": 1, "maxProperties": 0}, "", "above 'maxProperties'"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "", "'minimum' is above"),
    ],
    ids=range(32),
)
def test_what_is_no_schema_is_refused_with_its_place(
    schema: dict[str, Any], path: str, message: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        prepared(schema)
    assert caught.value.path == path
    assert message in caught.value.message


def test_bounds_that_leave_one_number_are_held() -> None:
    for schema in (
        {"type": "number", "minimum": 2, "maximum": 2},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 3},
        {"type": "array", "minItems": 2, "maxItems": 2},
    ):
        assert prepared(schema)


def test_a_dictionary_is_read_as_its_json() -> None:
    form = StructuredOutputsParams(json={"enum": ("a", {1: True})})
    assert form.json == '{"enum": ["a", {"1": true}]}'


WRONG: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 1e999, -1e999, 10**400, "", "x", "#/$defs/A", "\ud800", [], [[]], {}),
    *([None], ["a", 1], {"a": 1}, {"a": []}, {"type": {}}, {1: 2}, ("a",), [{"$ref": []}]),
    *({"$ref": "#/$defs"}, {"$ref": "#/properties"}, {"$ref": f"#/anyOf/{DIGITS}"}),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Everything that is in something, and where."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_wrong_no_other_error_comes_out(seed: int) -> None:
    rng, schemas = random.Random(seed), Schemas(seed)
    num_refused = 0
    for _ in range(400):
        schema = copy.deepcopy(schemas.root())
        for _ in range(rng.randint(1, 3)):
            inside, key = rng.choice(list(places(schema)))
            inside[key] = copy.deepcopy(rng.choice(WRONG))
        before = copy.deepcopy(schema)
        try:
            prepared(schema)
        except SchemaError:
            num_refused += 1
        assert schema == before
        with contextlib.suppress(SamplingParamsError):
            StructuredOutputsParams(json=schema)
    assert num_refused > 200
