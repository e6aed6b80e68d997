"""Strict calls whose strings have no quotes: what the grammar lets through is read as it was meant.

Schemas are made at random, and values that fit them. The grammar is asked by the real matcher.
"""

import json
from typing import Any, NamedTuple

import jsonschema_rs
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from engine.server.openai.tools.definitions import ToolsError
from engine.server.openai.tools.plan import ChatFormats, ChatPlan, plan_chat
from tests.support.grammar_walks import finished_texts
from tests.support.grammar_walks import lets_through as is_let_through

BEGIN = "<tool_call>\n<function=f>\n<parameter=a>\n"
END = "\n</parameter>\n</function>\n</tool_call>"
PLAIN = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\x7f")
LOOK_ALIKES = (
    *("7", "-2", "007", "1.5", "1e3", "null", "NULL", "true", "False", "None", '"2"', "", "[1]"),
    *("[", '{"a": 1}', "{}", "a<b", "<p>", " 7", "x\ny", "\n", "2024-01-02"),
)


class Leaf(NamedTuple):
    """A schema, and values that fit it."""

    schema: dict[str, Any]
    values: st.SearchStrategy[Any]


def enumeration(values: list[Any]) -> Leaf:
    schema = {"const": values[0]} if len(values) == 1 else {"enum": values}
    return Leaf(schema, st.sampled_from(values))


STRINGS = st.sampled_from(LOOK_ALIKES) | st.text(PLAIN, max_size=6)
WORDS = [word for word in LOOK_ALIKES if "<" not in word and word == word.strip("\n")]
NUMBERS = st.integers(-1000, 1000) | st.floats(-1e6, 1e6).map(lambda one: round(one, 3))
INTEGERS = st.integers(-(10**6), 10**6)
DIGITS = st.text("0123456789", min_size=1, max_size=4)
STRING_LEAVES = st.sampled_from(
    [
        Leaf({"type": "string"}, STRINGS),
        Leaf({"type": "string", "format": "uuid"}, STRINGS),
        Leaf({"type": "string", "maxLength": 3}, st.text(PLAIN, max_size=3)),
        Leaf({"type": "string", "pattern": "^[0-9]{1,4}$"}, DIGITS),
        Leaf({"pattern": "^[a-z{\\[]+$"}, st.text("ab{[", min_size=1, max_size=4)),
    ]
)  # fmt: skip
OTHER_LEAVES = st.sampled_from(
    [
        Leaf({"type": "null"}, st.none()),
        Leaf({"type": "boolean"}, st.booleans()),
        Leaf({"type": "integer"}, INTEGERS),
        Leaf({"type": "integer", "minimum": 5}, st.integers(5, 10**6)),
        Leaf({"type": "integer", "multipleOf": 3}, INTEGERS.map(lambda one: 3 * one)),
        Leaf({"type": "number"}, NUMBERS),
        Leaf({"type": "number", "maximum": 0}, NUMBERS.map(lambda one: -abs(one))),
        Leaf({"type": "array", "items": {}}, st.lists(NUMBERS | STRINGS, max_size=2)),
        Leaf({"type": "array", "items": {"type": "string"}}, st.lists(STRINGS, max_size=2)),
        Leaf(
            {"type": "object", "additionalProperties": {}},
            st.dictionaries(STRINGS, NUMBERS, max_size=2),
        ),
        Leaf(
            {
                "type": "object",
                "properties": {"x": {"type": "integer"}},
                "required": ["x"],
                "additionalProperties": False,
            },
            st.fixed_dictionaries({"x": INTEGERS}),
        ),
    ]
)
VALUES = st.sampled_from([*WORDS, 7, -2, 1.5, True, False, None, [1], {"a": 1}])
LEAVES = (
    STRING_LEAVES
    | OTHER_LEAVES
    | st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(enumeration)
    | st.lists(VALUES, min_size=1, max_size=3).map(enumeration)
)


@st.composite
def parameters(draw: st.DrawFn) -> tuple[dict[str, Any], Any]:
    """A function's schema with parameter `a`, and a value that fits it."""
    definitions: dict[str, Any] = {}

    def put(schema: dict[str, Any]) -> dict[str, Any]:
        """The schema, said in some way."""
        for _ in range(draw(st.integers(0, 2))):
            way = draw(st.sampled_from(["allOf", "anyOf", "title", "$ref"]))
            if way == "$ref":
                name = f"d{len(definitions)}"
                definitions[name] = schema
                schema = {"$ref": f"#/$defs/{name}"}
            elif way == "title":
                schema = schema if "$ref" in schema else schema | {"title": "T", "default": None}
            else:
                schema = {way: [schema]}
        return schema

    leaves = draw(st.lists(LEAVES, min_size=1, max_size=3))
    value = draw(st.one_of([leaf.values for leaf in leaves]))
    names = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True))
    if draw(st.integers(0, 3)) == 0:
        schema = put({"type": names})
        value = draw(st.one_of([OF_TYPES[name] for name in names]))
    elif len(leaves) == 1:
        schema = put(leaves[0].schema)
    else:
        schema = put({"anyOf": [put(leaf.schema) for leaf in leaves]})
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return whole | ({"$defs": definitions} if definitions else {}), value


OF_TYPES: dict[str, st.SearchStrategy[Any]] = {
    "string": STRINGS,
    "null": st.none(),
    "integer": INTEGERS,
    "number": NUMBERS,
    "boolean": st.booleans(),
    "array": st.lists(NUMBERS | STRINGS, max_size=2),
    "object": st.dictionaries(STRINGS, NUMBERS, max_size=2),
}
TYPES = sorted(OF_TYPES)
NULL = {"type": "null"}
HINTS = (b"[1, ", b'["', b'{"x": ', b'"', b"[1]]", b"12", b"<parameter=b>")
MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def plan_of(schema: dict[str, Any]) -> ChatPlan:
    formats = ChatFormats.resolve("{{ tools }}", tool_call_parser="qwen3_coder")
    function = {"name": "f", "parameters": schema, "strict": True}
    tools = [{"type": "function", "function": function}]
    return plan_chat(formats, [{"role": "user", "content": "x"}], tools=tools)


def lets_through(plan: ChatPlan, text: str) -> bool:
    assert plan.constraint is not None
    return is_let_through(plan.constraint, text)


def read(plan: ChatPlan, text: str) -> Any:
    (call,) = plan.after_render("").new_parser().parse(text).tool_calls
    return json.loads(call.arguments)


def spellings(value: Any) -> list[str]:
    """How a value may be written; the grammar writes characters as they are."""
    if isinstance(value, str):
        return [value]
    return [
        json.dumps(value, ensure_ascii=False, separators=separators)
        for separators in ((", ", ": "), (",", ":"))
    ]


def finite(text: str) -> float:
    """A number of JSON, which may be larger than any that Python has."""
    return max(-1e300, min(1e300, float(text)))


def is_spelled_as_json(text: str) -> bool:
    """Whether it is read as something else than a string, where the schema has that."""
    try:
        json.loads(text)
    except ValueError:
        return text.lower() in ("null", "true", "false")
    return True


@MANY
@given(made=parameters())
def test_what_is_written_in_the_form_of_the_grammar_comes_back(
    made: tuple[dict[str, Any], Any],
) -> None:
    schema, value = made
    try:
        plan = plan_of(schema)
    except ToolsError:
        assume(False)
    texts = [f"{BEGIN}{one}{END}" for one in spellings(value)]
    texts = [text for text in texts if lets_through(plan, text)]
    assert texts or isinstance(value, str), "only of strings are there some without a form"
    for text in texts:
        found = read(plan, text)
        assert jsonschema_rs.validator_for(schema).is_valid(found)
        if not (isinstance(value, str) and is_spelled_as_json(value)):
            assert found == {"a": value}
            assert type(found["a"]) is type(value)


@settings(MANY, max_examples=60)
@given(made=parameters(), seed=st.integers(0, 1000))
def test_whatever_the_grammar_lets_through_fits(
    made: tuple[dict[str, Any], Any], seed: int
) -> None:
    schema, _ = made
    try:
        plan = plan_of(schema)
    except ToolsError:
        assume(False)
    assert plan.constraint is not None
    validator = jsonschema_rs.validator_for(schema)
    hints = (*(word.encode() for word in LOOK_ALIKES), *HINTS, END.encode())
    for text in finished_texts(
        plan.constraint, 6, seed, length=90, hints=hints, begin=BEGIN.encode()
    ):
        output = plan.after_render("").new_parser().parse(text.decode(errors="replace"))
        for call in output.tool_calls:
            arguments = json.loads(call.arguments, parse_float=finite)
            assert validator.is_valid(arguments), (text, call.arguments)


@MANY
@given(values=st.lists(STRINGS, min_size=1, max_size=4), is_listed=st.booleans())
def test_optional_strings_come_back(values: list[str], is_listed: bool) -> None:
    """As people write them most often; a string that says null is none."""
    one = {"type": ["string", "null"]} if is_listed else {"anyOf": [{"type": "string"}, NULL]}
    plan = plan_of({"type": "object", "properties": {"a": one}, "required": ["a"]})
    for value in values:
        text = f"{BEGIN}{value}{END}"
        assert lets_through(plan, text)
        assert read(plan, text) == {"a": None if value.lower() == "null" else value}
