"""Regular expressions and keys: whatever is let through matches, as others see it, too."""

import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest

from engine import StructuredOutputsParams
from engine.structured.constraint import ConstraintError
from engine.structured.forms.lark import flaw_of
from tests.support.grammar_walks import finished_texts, lets_through

ATOMS = (
    *("a", "b", "Z", "0", "é", "😀", r"\d", r"\w", r"\D", r"\W", ".", r"\.", r"\-", "/", r"\/"),
    *("-", " ", '"', "'", "@", r"\{", "#", r"\n", r"\x41", r"\\", "`", "[a-z]", "[^a-z]"),
    *(r"[\^a]", r"[a\]]", "[-a]", "[a-]", r"[^\w]", '[^"]', r'["\\]', "[X-b]", "[é-ü]", "(?:)"),
)
COUNTS = (*("", "", "", "*", "+", "?", "{2}", "{0,2}", "{1,}"), *("*?", "+?", "{2,3}?", "{0}"))
NAMES = (
    *("é", "größe", "grün", "😀", "😁x", "a", "ab", "a/b", "/", "", "b]", "'-?", "\x7f"),
    *("\u2028", '"q"', "\\", "line\n"),
)


def random_expression(rng: random.Random, depth: int = 0) -> str:
    kind = rng.random()
    if depth < 2 and kind < 0.3:
        options = (random_expression(rng, depth + 1) for _ in range(rng.randint(1, 3)))
        # No repetition of repetitions: Python's `re` would take for ever.
        return f"{rng.choice(('(', '(?:'))}{'|'.join(options)}){rng.choice(('', '', '?'))}"
    if depth < 3 and kind < 0.6:
        return "".join(random_expression(rng, depth + 1) for _ in range(rng.randint(1, 3)))
    return rng.choice(ATOMS) + rng.choice(COUNTS)


def texts_of(num_walks: int, seed: int, **form: Any) -> list[str]:
    """Some texts that are let through; none where only the empty one is."""
    try:
        texts = list(finished_texts(StructuredOutputsParams(**form), num_walks, seed, length=15))
    except ConstraintError as error:
        return [] if "empty" in str(error) else [str(error)]  # which matches nothing
    return [text.decode() for text in texts]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_let_through_matches(seed: int) -> None:
    rng = random.Random(seed)
    num_texts = 0
    for number in range(60):
        expression = random_expression(rng)
        assert flaw_of(expression) == ""
        for found in texts_of(4, number, regex=expression):
            num_texts += 1
            assert re.fullmatch(expression, found, re.ASCII), (expression, found)
        schema = {"type": "string", "pattern": expression, "maxLength": 40}
        for found in texts_of(2, number, json=schema):
            num_texts += 1
            assert re.search(expression, json.loads(found), re.ASCII), (expression, found)
    assert num_texts > 200


@pytest.mark.parametrize(
    ("expression", "flaw"),
    [
        ("a(?=b)", "lookaheads and lookbehinds are not supported ('(?=' at character 2)"),
        ("(?<!a)b", "lookaheads and lookbehinds are not supported ('(?<!' at character 1)"),
        (r"a\b", "word boundaries are not supported"),
        (r"(a)\1", "backreferences are not supported"),
        (r"(?<word>a)\k<word>", "backreferences are not supported"),
        (r"[(?=\]b](?:a|(?<n>b))\\b\(?=", ""),
    ],
)
def test_what_the_library_has_not_got_is_seen(expression: str, flaw: str) -> None:
    assert flaw_of(expression).startswith(flaw)
    assert bool(flaw_of(expression)) is bool(flaw)


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
        *(("é", "é", False), ("größe", "grösse", True), ("größe", "größer", True)),
        *(("😀", "😀", False), ("😀", "😁", True), ("a", "\\u0061", False), ("a", "\\n", True)),
        *(("a/b", "a\\/b", False), ("a", "\\u000a", False), ('"q"', '\\"q\\"', False)),
        *(('"q"', '\\"q', True), ("\n", "\\n", False), ("\\", "\\\\", False)),
    ],
)
def test_a_key_beside_a_named_one(name: str, key: str, is_allowed: bool) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    assert lets_through(form, f'{{"{key}": "x"}}') is is_allowed
