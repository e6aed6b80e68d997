"""Keys beside named ones are none of them, however the model spells them."""

import json
import random

import jsonschema_rs
import pytest

from engine import StructuredOutputsParams
from engine.types.key_rules import exclusive
from tests.support.grammar_walks import finished_texts

NAMES = (
    *("é", "größe", "grün", "😀", "😁x", "a", "ab", "a/b", "/", "", "b]", "'-?", "\x7f"),
    "\u2028",
)


def test_an_author_may_have_rules_of_any_kind() -> None:
    rest = r'([^\0-\x1f\"\\\r\n] r) | ("\\" e r)'
    grammar = "\n".join(
        [
            r'a_addl_key ::= (("\"" a_addl_key_1))',
            rf'a_addl_key_1 ::= ({rest} | ("x" a_addl_key_1) | ("\xc3" a_addl_key_2))',
            rf'a_addl_key_2 ::= ({rest} | ("\xc3" a_addl_key_2) | ("\xa9" a_addl_key_9))',
            rf"b_addl_key_3 ::= ({rest})",
        ]
    )
    assert exclusive(grammar).splitlines()[-1] == grammar.splitlines()[-1]


def spellings(name: str) -> list[str]:
    """How JSON may write a name, as it is, by escapes, and the beginning of it."""
    escaped = json.dumps(name)[1:-1]
    by_number = "".join(
        f"\\u{unit:04x}"
        for unit in memoryview(name.encode("utf-16-le", "surrogatepass")).cast("H").tolist()
    )
    return [name, escaped, by_number, name.replace("/", "\\/"), name[:1], name + "s"]


@pytest.mark.parametrize("seed", range(6))
def test_no_other_key_is_a_named_one(seed: int) -> None:
    rng = random.Random(seed)
    names = rng.sample(NAMES, rng.randint(1, 6))
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "additionalProperties": {"type": "null"} if seed % 2 else True,
    }
    validator = jsonschema_rs.validator_for(schema)
    keys = [f'"{key}": null' for name in names for key in spellings(name)]
    hints = tuple(f"{begin}{key}".encode() for key in keys for begin in ("{", ", "))
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    texts = list(finished_texts(form, 40, seed, length=20, hints=hints))
    assert len(texts) > 20
    others = set()
    for text in texts:
        value = json.loads(text)
        others |= value.keys() - set(names)
        assert validator.is_valid(value), text
    assert others, "keys without a name of their own are let through"


@pytest.mark.parametrize(
    ("name", "key", "is_allowed"),
    [
        ("é", "é", False),
        ("größe", "größe", False),
        ("größe", "grösse", True),
        ("größe", "größer", True),
        ("größe", "Ã", True),
        ("😀", "😀", False),
        ("😀", "😁", True),
        ("a", "\\u0061", False),
        ("a/b", "a\\/b", False),
        ("a", "b\\u0061", True),
        ("a", "\\n", True),
        ("a", "\\u000a", False),
    ],
)
def test_a_key_beside_a_named_one(name: str, key: str, is_allowed: bool) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    text = f'{{"{key}": "x"}}'.encode()
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    assert (text in list(finished_texts(form, 30, 0, hints=(text,)))) is is_allowed
