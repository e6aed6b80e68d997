"""What checking schemas may take: little for any that is short enough, and each is checked once."""

import json
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import pytest

from engine import SamplingParams, SamplingParamsError, StructuredOutputsParams
from engine.server.openai.reasoning.registry import REASONING_FORMATS
from engine.server.openai.tools import definitions
from engine.server.openai.tools.choice import check_choice
from engine.server.openai.tools.constraint import behind_reasoning, constraint_of, strict_calls
from engine.server.openai.tools.definitions import check_tools
from engine.server.openai.tools.formats import CALL_FORMATS
from engine.structured.forms import params
from engine.structured.forms.params import MAX_BYTES, MAX_REGEX_LENGTH
from engine.structured.forms.prepass import prepared
from engine.structured.forms.references import Allowance

MAX_S = 4.0
"""Ten times what the longest takes."""


def wrapped(keyword: str, depth: int, inner: Any) -> dict[str, Any]:
    """A schema within a list of one, many times over."""
    for _ in range(depth):
        inner = {keyword: [inner]}
    return inner


def objects(num: int, num_names: int) -> list[dict[str, Any]]:
    """Schemas of objects that only their last property tells apart."""
    names = {f"p{index}": {} for index in range(num_names)}
    return [
        {
            "type": "object",
            "properties": names | {"z": {"const": number}},
            "required": [*names, "z"],
        }
        for number in range(num)
    ]


LARGE: dict[str, Callable[[int], dict[str, Any]]] = {
    "constants": lambda n: {"oneOf": [{"const": i} for i in range(n)]},
    "two lists of values": lambda n: {
        "oneOf": [{"enum": [*range(n)]}, {"enum": [str(i) for i in range(n)]}]
    },
    "values with one hash": lambda n: {
        "oneOf": [{"enum": [i * (2**61 - 1) for i in range(n)]}, {"const": "a"}]
    },
    "kinds of objects": lambda n: {"oneOf": objects(n, 0)},
    "kinds of large objects": lambda n: {"oneOf": objects(60, n)},
    "forbidden properties": lambda n: {
        "properties": {f"p{i}": i % 2 > 0 for i in range(n)},
        "required": [f"p{i}" for i in range(1, n, 2)],
        "additionalProperties": False,
    },
    "chain of references": lambda n: {
        "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(n)} | {f"a{n}": {}},
        "$ref": "#/$defs/a0",
    },
    "references": lambda n: {
        "$defs": {f"a{i}": {} for i in range(n)},
        "prefixItems": [{"$ref": f"#/$defs/a{i}"} for i in range(n)],
    },
    "references elsewhere": lambda n: {
        "$defs": {f"ref_{i}": {} for i in range(n)},
        "x": [{} for _ in range(n)],
        "prefixItems": [{"$ref": f"#/x/{i}"} for i in range(n)],
    },
    "references into each other": lambda n: {
        "x": wrapped("allOf", 25, {"enum": [*range(n)]}),
        "prefixItems": [{"$ref": "#/x" + "/allOf/0" * i} for i in range(26)],
    },
    "objects that hold themselves": lambda n: {
        "$defs": {
            kind: {
                "type": "object",
                "properties": {f"p{i}": {"$ref": f"#/$defs/{kind}"} for i in range(n)},
                "required": [f"p{i}" for i in range(n)],
            }
            for kind in "ab"
        },
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
    },
    "what stands beside options": lambda n: {
        "required": [f"r{i}" for i in range(n)],
        "anyOf": [{"required": [f"s{i}"]} for i in range(n)],
    },
    "properties beside options": lambda n: {
        "properties": {f"r{i}": {} for i in range(n)},
        "anyOf": [{"required": [f"r{i}"]} for i in range(n)],
    },
    "patterns": lambda n: {"prefixItems": [{"pattern": f"[^{chr(256 + i)}]"} for i in range(n)]},
    "long patterns": lambda n: {"prefixItems": [{"pattern": "\\S" * 15_000} for _ in range(n)]},
    "patterns of names": lambda n: {
        "$defs": {"a": {"pattern": "." * 30_000}},
        "prefixItems": [{"propertyNames": {"$ref": "#/$defs/a"}} for _ in range(n)],
    },
    "formats": lambda n: {"prefixItems": [{"type": "string", "format": "email"}] * n},
    "a long name": lambda n: {
        "properties": {"x" * 100_000: {"properties": {f"p{i}": {} for i in range(n)}}}
    },
    "types": lambda n: {"type": ["string"] * n, "anyOf": [{"type": ["string"] * n}] * 2},
    "deep": lambda n: wrapped("anyOf", 28, {"properties": {f"p{i}": {} for i in range(n)}}),
}


def large(make: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """A schema nearly as long as one may be."""
    first, second = (len(json.dumps(make(num))) for num in (100, 200))
    each = (second - first) / 100
    schema = make(max(1, int(0.7 * (MAX_BYTES - first + 100 * each) / each)))
    assert len(json.dumps(schema)) < MAX_BYTES
    return schema


class TooMuchError(Exception):
    """More of the processor's time was taken than may be."""


def check_in_time(**form: Any) -> None:
    """Check a form, which takes a fraction of a second; minutes, if longer ones took ever longer.

    The processor's time counts, which a busy machine does not change much.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooMuchError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MAX_S)
    try:
        StructuredOutputsParams(**form)
    except SamplingParamsError:
        pass  # that it is refused took no longer
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("name", LARGE)
def test_any_schema_is_checked_in_no_time(name: str) -> None:
    check_in_time(json=large(LARGE[name]))


@pytest.mark.parametrize(
    "pattern",
    [
        "a{" * (MAX_REGEX_LENGTH // 2 - 1) + "}",
        "\\S" * (MAX_REGEX_LENGTH // 2),
        "(?:" * 40 + "a?" * 16_000 + ")?" * 40,
        "(?:a|x" * 40 + "(?:a|b)c." * 3_000 + ")" * 40,
    ],
    ids=["braces", "classes", "groups", "options"],
)
def test_any_expression_is_checked_in_no_time(pattern: str) -> None:
    check_in_time(regex=pattern)


def test_what_is_too_long_is_not_worked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(params, "prepared", None)
    with pytest.raises(SamplingParamsError, match=f"at most {MAX_BYTES} bytes"):
        StructuredOutputsParams(json={"enum": ["a" * 1000] * 300})


def test_large_schemas_that_are_used_are_let_pass() -> None:
    texts = {f"p{i}": {"type": "string", "pattern": "^[a-z]{2,10}$"} for i in range(3000)}
    for schema in (
        {"enum": [f"value {i}" for i in range(10_000)]},
        {"anyOf": [{"const": i} for i in range(5_000)]},
        {"oneOf": objects(64, 10)},
        {"type": "object", "properties": texts, "required": [*texts]},
    ):
        assert StructuredOutputsParams(json=schema).json


# -- once is enough --------------------------------------------------------------------------------


def function(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


PARAMETERS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"type": "string", "pattern": "^a$"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"x": {"type": "integer"}},
}


def test_a_tools_schema_is_worked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_checks = 0

    def counted(schema: dict[str, Any], allowance: Allowance) -> dict[str, Any]:
        nonlocal num_checks
        num_checks += 1
        return prepared(schema, allowance)

    for module in (definitions, params):
        monkeypatch.setattr(module, "prepared", counted)
    tools = check_tools([function(name, PARAMETERS, strict=True) for name in ("f", "g")])
    form = CALL_FORMATS["hermes"].strict
    syntax = next(iter(REASONING_FORMATS.values())).syntax
    assert form is not None
    named = {"type": "function", "function": {"name": "g"}}
    choices = [check_choice(choice, tools) for choice in ("required", named)]
    made = [constraint_of(choice, max_calls=None) for choice in choices]
    made.append(strict_calls(check_choice("auto", tools), form, max_calls=None))
    assert num_checks == 2 + 1 + 2
    for one in made:
        assert one is not None
        sampling = SamplingParams(structured_outputs=behind_reasoning(one, syntax, is_open=True))
        packed = msgspec.msgpack.encode(sampling)
        assert msgspec.msgpack.decode(packed, type=SamplingParams) == sampling
    assert num_checks == 5


def test_nobody_can_say_that_a_schema_needs_no_check() -> None:
    values: dict[str, Any] = {"json": "nonsense", "_is_prepared": True}
    with pytest.raises(SamplingParamsError, match="unknown structured output '_is_prepared'"):
        StructuredOutputsParams(**values)
    with pytest.raises(SamplingParamsError, match="unknown structured output '_is_prepared'"):
        SamplingParams(structured_outputs=values)
