"""`StructuredOutputsParams`: what is accepted, what is refused and with which words, the wire."""

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from engine import SamplingParams, SamplingParamsError, StructuredOutputsParams
from engine.structured.forms.params import (
    KINDS,
    MAX_BYTES,
    MAX_CHOICES,
    MAX_NESTING,
    MAX_REGEX_LENGTH,
)

SCHEMA = {"type": "object", "properties": {"ü": {"type": "string"}}, "additionalProperties": False}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "z"}}


def nested(depth: int) -> dict[str, Any]:
    """A dictionary that holds dictionaries down to this depth."""
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"items": value}
    return value


class Described:
    """Looks like a pydantic model's class."""

    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return SCHEMA


class Broken:
    """Cannot describe itself."""

    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        raise RuntimeError("no idea")


@pytest.mark.parametrize(
    ("values", "kind", "text"),
    [
        ({"json": SCHEMA}, "json", TEXT),
        ({"json": SCHEMA | {"title": "T", "$comment": "a remark"}}, "json", TEXT),
        ({"json": Described}, "json", TEXT),
        ({"json": ' {"type":"object"}'}, "json", '{"type": "object"}'),
        ({"regex": "a|b"}, "regex", "a|b"),
        ({"choice": ["b", "a", "b"]}, "choice", '["b", "a"]'),
        ({"choice": ("é",)}, "choice", '["é"]'),
        ({"grammar": 'root ::= "x"'}, "grammar", 'root ::= "x"'),
        ({"json_object": True}, "json_object", "true"),
        ({"json_object": True, "regex": None}, "json_object", "true"),
        ({"json_object": False, "regex": "a"}, "regex", "a"),
        ({"grammar": 'start: "x"'}, "grammar", 'start: "x"'),
        ({"structural_tag": TAG}, "structural_tag", json.dumps(TAG)),
        ({"json": nested(MAX_NESTING)}, "json", None),
    ],
)
def test_what_is_accepted_and_how_it_travels(
    values: dict[str, Any], kind: str, text: str | None
) -> None:
    for form in (values, StructuredOutputsParams(**values)):
        params = SamplingParams(structured_outputs=form)
        own = params.structured_outputs
        assert own is not None
        assert own.kind == kind
        assert own.key[0] == kind
        assert text is None or own.key[1] == text
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
        assert decoded == params
        assert decoded.structured_outputs is not None
        assert decoded.structured_outputs.key == own.key
        assert params.clone(temperature=0.0).structured_outputs == own


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, f"exactly one of {', '.join(KINDS)}, got none"),
        ({"json": None}, "exactly one of .*, got none"),
        ({"json_object": False}, "exactly one of .*, got none"),
        ({"regex": "a", "choice": ["a"]}, "exactly one of .*, got regex and choice"),
        ({"jsn": {}}, "unknown structured output 'jsn'. Did you mean 'json'?"),
        ({"json": "["}, "json must be a JSON object.*not JSON: Expecting"),
        ({"json": '{"minimum": NaN}'}, "NaN is not a JSON number"),
        ({"json": "[1]"}, r"json must be a JSON object.*got '\[1\]'"),
        ({"json": 3}, "json must be a JSON object.*got 3"),
        ({"json": {"minimum": float("inf")}}, "json.minimum: must be a number"),
        ({"json": {"const": float("inf")}}, "json must be a JSON object"),
        ({"json": {"default": object()}}, "json must be a JSON object.*not JSON serializable"),
        ({"json": {(1, 2): 3}}, "json must be a JSON object"),
        ({"json": Broken}, "gave no schema: no idea"),
        ({"json": nested(MAX_NESTING + 1)}, f"nested deeper than {MAX_NESTING} levels"),
        ({"json": "{" + '"a":{' * 5000}, "json"),
        ({"json": {"description": "x" * MAX_BYTES}}, f"at most {MAX_BYTES} bytes long, got 2621"),
        ({"json": {"description": "\ud800"}}, "without lone surrogates"),
        ({"regex": ""}, "regex must be a regular expression that is not empty"),
        ({"regex": 5}, "regex must be a regular expression that is not empty, got 5"),
        ({"regex": "\ud800"}, "regex must be text without lone surrogates"),
        (
            {
                "structural_tag": {
                    "format": {"type": "sequence", "elements": [{"type": "regex", "pattern": 1}]}
                }
            },
            r"structural_tag.format.elements\[0\].pattern: must be a string",
        ),
        ({"structural_tag": {"format": {"type": "text"}}}, "format.type: must be one of const_str"),
        ({"structural_tag": {"format": {"type": "nonsense"}}}, "must be one of .* got 'nonsense'"),
        ({"structural_tag": {}}, 'must have a "format", or "structures"'),
        ({"regex": "a" * (MAX_REGEX_LENGTH + 1)}, f"at most {MAX_REGEX_LENGTH} characters long"),
        (
            {
                "structural_tag": {
                    "structures": [{"begin": "<a", "schema": {}, "end": ">"}],
                    "triggers": ["<b"],
                }
            },
            r"format.tags\[0\].begin: must begin with one of the triggers",
        ),
        (
            {"structural_tag": {"format": {"type": "json_schema", "json_schema": {"not": {}}}}},
            "structural_tag.format.json_schema: 'not' is not supported",
        ),
        ({"regex": "é" * (MAX_BYTES // 2 + 1)}, f"at most {MAX_BYTES} bytes long"),
        (
            {"regex": "a(?<=a)b"},
            r"regex: lookaheads and lookbehinds are not .*'\(\?<=' at character 2",
        ),
        ({"grammar": ""}, "grammar must be a grammar that is not empty"),
        ({"grammar": "nonsense"}, "grammar must be Lark with a rule called start"),
        ({"choice": []}, "choice must be a list of 1 to"),
        ({"choice": "yes"}, "choice must be a list of 1 to"),
        ({"choice": ["a", ""]}, "choice must be a list of 1 to"),
        ({"choice": ["a", 1]}, "choice must be a list of 1 to"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice must be a list of 1 to"),
        ({"choice": ["a" * 200_000, "b" * 200_000]}, "bytes in all, got 400000"),
        ({"json_object": 1}, "json_object must be True or False"),
        ({"structural_tag": "x"}, "structural_tag must be a JSON object"),
        ({"regex": "a", "disable_any_whitespace": True}, "is for json and json_object"),
        ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace must be True"),
        (
            {"json": {}, "disable_additional_properties": True},
            "structured_outputs.disable_additional_properties is not supported; properties that",
        ),
        (
            {"json": {}, "whitespace_pattern": "[ ]?"},
            "structured_outputs.whitespace_pattern is not supported; disable_any_whitespace",
        ),
        ({"json": {}, "_backend": "guidance"}, "structured_outputs._backend is not supported"),
    ],
    ids=range(45),
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        StructuredOutputsParams(**values)
    with pytest.raises(SamplingParamsError, match=message) as caught:
        SamplingParams(structured_outputs=values)
    assert caught.value.param is not None
    assert caught.value.param.startswith("structured_outputs")


def test_all_of_vllm_s_fields_may_be_named() -> None:
    """As `dataclasses.asdict` of its parameters names them."""
    dumped = {
        **dict.fromkeys(KINDS),
        "json": SCHEMA,
        "disable_any_whitespace": False,
        "disable_additional_properties": False,
        "whitespace_pattern": None,
        "_backend": None,
        "_backend_was_auto": False,
    }
    for form in (dumped, StructuredOutputsParams(**dumped)):
        params = SamplingParams(structured_outputs=form)
        assert params.structured_outputs == StructuredOutputsParams(json=SCHEMA)


@pytest.mark.parametrize("value", [3, "regex", ["regex"], {1: 2}])
def test_other_things_are_no_structured_outputs(value: Any) -> None:
    with pytest.raises(SamplingParamsError, match=r"must be StructuredOutputsParams, a dictionary"):
        SamplingParams(structured_outputs=value)


def test_a_schema_that_holds_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["a"] = loop["b"] = loop
    with pytest.raises(SamplingParamsError, match="nested deeper"):
        StructuredOutputsParams(json=loop)


def test_values_come_by_name() -> None:
    with pytest.raises(SamplingParamsError, match=r"takes its values by name, such as json="):
        StructuredOutputsParams("a")  # type: ignore[misc]


def test_two_dictionaries_with_the_same_text_have_the_same_key() -> None:
    first, second = (StructuredOutputsParams(json=dict(SCHEMA)) for _ in range(2))
    assert first.key == second.key
    compact = StructuredOutputsParams(json=dict(SCHEMA), disable_any_whitespace=True)
    assert compact.key != first.key


def test_the_callers_process_imports_no_grammar_library() -> None:
    program = (
        "import sys; from engine import SamplingParams; "
        "SamplingParams(structured_outputs={'json': {}}); "
        "print({'llguidance', 'torch', 'transformers', 'numpy'} & set(sys.modules) - {'numpy'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def inside(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema in which this one is well hidden."""
    return {
        "$defs": {"one": {"anyOf": [{"type": "null"}, {"prefixItems": [True, schema]}]}},
        "properties": {"p": {"items": {"additionalProperties": {"$ref": "#/$defs/one"}}}},
    }


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {"type": "string"}}, "'not' is not supported"),
        ({"if": {}, "then": {}}, "'if' is not supported"),
        ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired' is not supported"),
        ({"$dynamicRef": "#a"}, "is not supported"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
        ({"type": "array", "unevaluatedItems": False}, "'unevaluatedItems' is not supported"),
        ({"contains": {}}, "'contains' is not supported"),
        (
            {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
            "'unevaluatedProperties' is not supported beside",
        ),
        ({"$ref": "https://example.org/s.json"}, "must point into the schema itself"),
    ],
)
def test_what_would_be_ignored_is_refused(schema: dict[str, Any], message: str) -> None:
    for form in (schema, inside(schema), json.dumps(schema)):
        with pytest.raises(SamplingParamsError, match=message):
            StructuredOutputsParams(json=form)


def test_values_and_names_are_no_keywords() -> None:
    words = {"not": 1, "uniqueItems": True, "$ref": "elsewhere"}
    for schema in (
        {"enum": [words], "default": words, "examples": [words]},
        {"const": words},
        {"properties": {name: {"type": "string"} for name in words}},
        {"uniqueItems": False, "allOf": [{}], "format": "nonsense"},
        {"oneOf": [{"const": "not"}, {"const": "$ref"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
    ):
        assert StructuredOutputsParams(json=schema).kind == "json"
