"""Expressions and schemas that are longer once they are written as they are held."""

import json
from typing import Any

import msgspec
import pytest
import xgrammar

from engine import SamplingParams, SamplingParamsError, StructuredOutputsParams
from engine.types.expression_parser import MAX_LENGTH, MAX_WRITTEN_LENGTH
from engine.types.grammar_text import expression_grammar, repaired
from engine.types.json_schema import enforceable_schema
from engine.types.structured_outputs import MAX_BYTES, MAX_WRITTEN_BYTES


def properties(pattern: str, num: int) -> dict[str, Any]:
    inner = {"type": "string", "pattern": pattern}
    return {"type": "object", "properties": {f"p{index}": inner for index in range(num)}}


def test_an_expression_may_grow_on_its_way() -> None:
    params = SamplingParams(structured_outputs={"regex": "[^a-z]" * 3000})
    form = params.structured_outputs
    assert form is not None
    assert form.regex is not None
    assert MAX_LENGTH < len(form.regex) < MAX_WRITTEN_LENGTH
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params
    assert expression_grammar(form.regex).startswith("root ::= [")


def test_an_expression_that_grows_too_long_is_refused() -> None:
    with pytest.raises(SamplingParamsError, match="once its classes are written out") as caught:
        StructuredOutputsParams(regex="[^a-z]" * 4000)
    assert caught.value.param == "structured_outputs.regex"
    with pytest.raises(SamplingParamsError, match=r"json\.pattern: it takes \d+ characters"):
        StructuredOutputsParams(json={"type": "string", "pattern": "[^a-z]?" * 4000})


def test_a_pattern_that_has_grown_is_still_held_exactly() -> None:
    schema = enforceable_schema({"type": "string", "pattern": "(?:#@+A+)?" + "[^a-z]" * 500})
    assert MAX_LENGTH < len(schema["pattern"]) < MAX_WRITTEN_LENGTH
    printed = f'root ::= Regex("{schema["pattern"]}", json_string=true)'.replace("\\", "\\\\")
    assert "Regex(" in str(xgrammar.Grammar.from_json_schema(json.dumps(schema)))
    assert "Regex(" not in repaired(printed)


def test_a_schema_may_grow_by_a_factor() -> None:
    schema = properties(r"\S\S\S", 900)
    assert len(json.dumps(schema)) < MAX_BYTES / 2
    text = StructuredOutputsParams(json=schema).json
    assert isinstance(text, str)
    assert MAX_BYTES < len(text) < MAX_WRITTEN_BYTES
    with pytest.raises(SamplingParamsError, match=f"written out, and may take {MAX_WRITTEN_BYTES}"):
        StructuredOutputsParams(json=properties(r"\S" * 20, 600))
