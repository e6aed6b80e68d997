"""JSON schemas: whatever their grammars let through fits them; what cannot be held is refused."""

import copy
import json
import math
import random
from typing import Any

import jsonschema_rs
import pytest
from engine.types.json_schema import enforceable_schema
from engine.types.schema_values import SchemaError

from engine import SamplingParamsError, StructuredOutputsParams
from tests.unit.grammar_walks import finished_texts

NAMES = ("a", "b", "title", "default", "x y", "é", '"q"')
PATTERNS = (
    *("^[a-z]+$", "a?b", "^(?:ab+)?$", "^.{0,3}$", "^é\\S*$", "\\d{2,3}", "^(a|b)$", '^[^"]*$'),
    *("^x", "[\\s\\S]{1,4}"),
)
FORMATS = (
    *("email", "date", "time", "date-time", "ipv4", "ipv6", "uuid", "uri", "hostname", "duration"),
    "unknown",
)
VALUES = (
    *(1, 2.5, "a", 'é"/\\\n', None, True, [1, {"title": 2}], {"title": 1}, {"a": "b"}, -3),
    *(1e22, 0.1),
)


class Schemas:
    """Makes schemas of all keywords, many of which mean something together."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def root(self) -> dict[str, Any]:
        schema = self.schema()
        while not isinstance(schema, dict):
            schema = self.schema()
        return schema | {"$defs": {"A": self.schema(2), "B": self.schema(2)}}

    def schema(self, depth: int = 0) -> Any:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.03:
            return rng.choice([True, False, {}])
        if depth < 3 and kind < 0.10:
            options = [self.schema(depth + 1) for _ in range(rng.randint(1, 3))]
            beside = {"type": rng.choice(["string", "object"])} if rng.random() < 0.2 else {}
            return {rng.choice(["anyOf", "anyOf", "oneOf"]): options} | beside
        if kind < 0.15:
            return {"$ref": rng.choice(["#/$defs/A", "#/$defs/B", "#", "#/$defs/A/anyOf/0"])}
        if kind < 0.24:
            values = rng.sample(VALUES, rng.randint(1, 3))
            form = {"enum": values} if rng.random() < 0.7 else {"const": values[0]}
            return form | ({"type": rng.choice(["string", "number"])} if rng.random() < 0.3 else {})
        if kind < 0.26:
            return {"allOf": [self.schema(depth + 1)]}
        return self.typed(depth)

    def typed(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        names = ["string", "integer", "number", "boolean", "null", "array", "object", "object"]
        types = [rng.choice(names)]
        if rng.random() < 0.1:
            types = sorted({types[0], rng.choice(names)})
        schema: dict[str, Any] = {"type": types if len(types) > 1 else types[0]}
        if rng.random() < 0.08:
            del schema["type"]
        for name in types:
            if name in ("string", "array", "object"):
                getattr(self, f"add_{name}")(schema, depth)
            elif name in ("integer", "number"):
                self.add_number(schema)
        return schema

    def add(self, schema: dict[str, Any], share: float, keyword: str, make: Any) -> None:
        if self.rng.random() < share:
            schema[keyword] = make()

    def add_string(self, schema: dict[str, Any], depth: int) -> None:
        rng = self.rng
        self.add(schema, 0.3, "minLength", lambda: rng.randint(0, 3))
        self.add(schema, 0.3, "maxLength", lambda: rng.randint(1, 5))
        self.add(schema, 0.3, "pattern", lambda: rng.choice(PATTERNS))
        self.add(schema, 0.2, "format", lambda: rng.choice(FORMATS))

    def add_number(self, schema: dict[str, Any]) -> None:
        rng = self.rng
        lows, highs = [-20, 0, 1.5, 3, -0.25, 1e-7, 0.1234567], [100, 7, 3.5, 10**6, 12.3456789]
        self.add(schema, 0.4, "minimum", lambda: rng.choice(lows))
        self.add(schema, 0.4, "maximum", lambda: rng.choice(highs))
        self.add(schema, 0.15, "exclusiveMinimum", lambda: rng.choice([-5, 0, 2.5, 0.1]))
        self.add(schema, 0.15, "exclusiveMaximum", lambda: rng.choice([9, 50, 8.5, 0.3]))
        self.add(schema, 0.2, "multipleOf", lambda: rng.choice([1, 2, 7, 10, 0.5, 3.0]))

    def add_array(self, schema: dict[str, Any], depth: int) -> None:
        rng = self.rng
        few = [self.schema(depth + 1) for _ in range(rng.randint(1, 2))] if depth < 4 else [{}]
        self.add(schema, 0.6, "items", lambda: few[0])
        self.add(schema, 0.2, "prefixItems", lambda: few)
        self.add(schema, 0.4, "minItems", lambda: rng.randint(0, 2))
        self.add(schema, 0.4, "maxItems", lambda: rng.randint(1, 4))
        self.add(schema, 0.05, "minContains", lambda: 1)
        self.add(schema, 0.05, "contains", lambda: {"type": "integer"})
        self.add(schema, 0.05, "uniqueItems", lambda: rng.random() < 0.3)
        self.add(schema, 0.05, "unevaluatedItems", lambda: few[-1])

    def add_object(self, schema: dict[str, Any], depth: int) -> None:
        rng = self.rng

        def inner() -> Any:
            return self.schema(depth + 1) if depth < 4 else {}

        names = rng.sample(NAMES, rng.randint(1, 3))
        self.add(schema, 0.7, "properties", lambda: {name: inner() for name in names})
        self.add(schema, 0.4, "required", lambda: rng.sample(NAMES[:4], rng.randint(1, 2)))
        self.add(schema, 0.2, "additionalProperties", inner)
        self.add(schema, 0.2, "additionalProperties", lambda: rng.random() < 0.5)
        self.add(schema, 0.15, "patternProperties", lambda: {rng.choice(PATTERNS[:3]): inner()})
        keys = [{"enum": ["a", "b"]}, {"pattern": "^[a-c]+$"}, {}, {"type": "string"}]
        self.add(schema, 0.1, "propertyNames", lambda: rng.choice(keys))
        self.add(schema, 0.15, "minProperties", lambda: rng.randint(0, 2))
        self.add(schema, 0.15, "maxProperties", lambda: rng.randint(1, 4))
        self.add(schema, 0.05, "unevaluatedProperties", inner)
        self.add(schema, 0.06, "anyOf", lambda: [{"required": ["a"]}, {"required": ["b"]}])


def is_finite(value: object) -> bool:
    """Whether no number in it is too large for a double, which no schema forbids."""
    if isinstance(value, dict | list):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def check(schema: dict[str, Any], num_walks: int, seed: int, **options: Any) -> int:
    """Walk through the schema's grammar; returns how many texts came to their end."""
    form = StructuredOutputsParams(json=copy.deepcopy(schema), **options)
    again = StructuredOutputsParams(json=form.json)
    assert again.json == form.json, "on its way it must not change again"
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
        except SamplingParamsError:
            continue
        except RuntimeError:  # the library's: nothing fits
            continue
        num_held += 1
    assert num_held > 30, "nearly nothing is supported"
    assert num_texts > 150


STRING = {"type": "string"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 4},
        {"type": "string", "minLength": 2, "maxLength": 3},
        {"type": "string", "pattern": "^(?:#@+A+)?$"},
        {"type": "string", "pattern": '^(é|")+.[^a]$'},
        {"type": "string", "pattern": "^[a-z]*$", "minLength": 1, "maxLength": 3},
        {"type": "string", "pattern": "^[a-z]+$", "minLength": 1},
        {"type": "string", "pattern": "^.{1,40}$"},
        {"type": "object", "required": ["a"]},
        {"type": "object", "required": ["a"], "properties": {"b": {}}},
        {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}},
        {"type": "string", "enum": ["a", 1]},
        {"minimum": 3},
        {"minLength": 2},
        {"type": "array", "minItems": 2},
        {"type": "array", "minItems": 2, "prefixItems": [STRING]},
        {"type": "array", "prefixItems": [True, False, STRING]},
        {"type": "integer", "minimum": 1.5, "exclusiveMaximum": 9.5, "multipleOf": 3},
        {"type": "number", "multipleOf": 5},
        {
            "type": "object",
            "propertyNames": {"enum": ["a", "b"]},
            "additionalProperties": {"type": "integer"},
        },
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a-c]{2}$"},
            "additionalProperties": {"type": "integer"},
        },
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]},
        {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "$defs": {
                name: {
                    "type": "object",
                    "properties": {"kind": {"const": name}, "name": STRING},
                    "required": ["kind"],
                }
                for name in ("cat", "dog")
            },
        },
        {
            "type": "object",
            "properties": {
                "a": {"maxLength": 1, "type": "string"},
                "b": {"$ref": "#/properties/a"},
            },
            "required": ["b"],
        },
        {
            "type": "object",
            "properties": {"a~/b": {"maxItems": 0}, "c": {"$ref": "#/properties/a~0~1b"}},
            "required": ["c"],
        },
        *({"type": "string", "format": name} for name in ("email", "date", "ipv4", "hostname")),
    ],
    ids=range(29),
)
def test_what_the_library_would_not_hold_is_said_otherwise(schema: dict[str, Any]) -> None:
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    texts = list(finished_texts(StructuredOutputsParams(json=schema), 40, 1))
    assert texts
    for text in texts:
        value = json.loads(text)
        assert validator.is_valid(value) or not is_finite(value), text


@pytest.mark.parametrize(
    ("schema", "path", "message"),
    [
        ({"type": "integer", "multipleOf": 0.5}, ".multipleOf", "whole numbers"),
        ({"type": "integer", "minimum": 0, "multipleOf": 7}, ".multipleOf", "apart"),
        ({"type": "integer", "maximum": 1e19}, ".maximum", "must lie between"),
        ({"minimum": 1, "maxLength": 1}, "", "values of different types"),
        ({"type": "nonsense"}, ".type", "must be of null, boolean"),
        ({"type": "array", "contains": {}}, "", "'contains' is not supported"),
        ({"type": "array", "items": [{}]}, ".items", "is 'prefixItems'"),
        ({"type": "array", "minItems": -1}, ".minItems", "not negative"),
        ({"enum": []}, ".enum", "not empty"),
        ({"enum": [2**70]}, ".enum", "64 bits"),
        ({"const": 1, "minimum": 2}, "", "'const' cannot stand beside 'minimum'"),
        ({"$ref": "#/$defs/a", "maxLength": 2, "$defs": {"a": {}}}, "", "cannot stand beside"),
        ({"$ref": "#/$defs/a"}, "", "points to nothing"),
        ({"$ref": "#a"}, "", "must point into the schema itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "", "leads to itself"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ".oneOf", "say 'anyOf'"),
        ({"oneOf": [STRING, {"properties": {}}]}, ".oneOf", "say 'anyOf'"),
        ({"anyOf": [{"minimum": 1}], "maximum": 2}, ".anyOf[0]", "can only say 'required'"),
        ({"type": "string", "pattern": "^(?=a)b"}, ".pattern", "lookaheads"),
        ({"type": "string", "pattern": "(a)\\1"}, ".pattern", "backreferences"),
        ({"type": "string", "pattern": "a^b"}, ".pattern", "at the beginning"),
        ({"type": "string", "pattern": 'a"b'}, ".pattern", "JSON escapes"),
        ({"type": "string", "pattern": "[\\ud800-\\udfff]"}, ".pattern", "surrogates"),
        ({"type": "string", "pattern": "(ab)*", "maxLength": 3}, ".pattern", "count in the"),
        (
            {"type": "object", "required": ["b"], "additionalProperties": False},
            ".required",
            "'b' is not in 'properties'",
        ),
        (
            {"type": "object", "properties": {"a": {}}, "patternProperties": {"a": {}}},
            ".patternProperties",
            "no 'properties' beside it",
        ),
        (
            {"type": "object", "additionalProperties": True, "minProperties": 2},
            ".minProperties",
            "'additionalProperties' is false",
        ),
        (
            {"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "b"}},
            ".propertyNames",
            "name the keys in 'properties'",
        ),
        (
            {"type": "object", "properties": {'"': {}}, "additionalProperties": True},
            ".properties['\"']",
            "a name with quotes",
        ),
        ({"properties": {"a": {"items": {"type": "x"}}}}, ".properties.a.items.type", "must be"),
        ({"anyOf": [{"properties": {"a b": 3}}]}, ".anyOf[0].properties['a b']", "a schema"),
    ],
    ids=range(31),
)
def test_what_cannot_be_held_is_refused_with_its_place(
    schema: dict[str, Any], path: str, message: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        enforceable_schema(schema)
    assert caught.value.path == path
    assert message in caught.value.message
    with pytest.raises(SamplingParamsError) as refused:
        StructuredOutputsParams(json=json.dumps(schema))
    assert str(refused.value).startswith(f"structured_outputs.json{path}: ")


def test_what_is_held_as_it_is_stays_as_it_is() -> None:
    for schema in (
        {"type": "object", "properties": {"a": STRING, "b": {"type": "integer", "minimum": 1}}},
        {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"enum": [1, "é"]}}},
        {"anyOf": [STRING, {"type": "null"}], "default": None, "title": "T"},
        {"type": "object"},
        {},
    ):
        before = copy.deepcopy(schema)
        assert enforceable_schema(schema) == before
        assert schema == before, "the caller's own is left alone"
