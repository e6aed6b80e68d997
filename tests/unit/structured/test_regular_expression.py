"""Regular expressions: what a grammar lets through matches, as Python's `re` sees it, too."""

import json
import random
import re
import warnings

import pytest

from engine import StructuredOutputsParams
from engine.types.expression_parser import MAX_DEPTH, MAX_LENGTH, parse
from engine.types.regular_expression import (
    IN_JSON,
    RegularExpressionError,
    common,
    joined,
    lengths,
    others,
    restricted,
    written,
)
from tests.support.grammar_walks import finished_texts

ATOMS = (
    *("a", "b", "Z", "0", "é", "😀", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", ".", r"\.", r"\-"),
    *(r"\/", "/", "-", " ", '"', r"\"", "'", "@", r"\@", "{", "}", r"\{", "#", r"\n", r"\x41"),
    *(r"\u00e9", r"\\", "`", "&", "[a-z]", "[^a-z]", r"[\^a]", r"[\^]", r"[a\]]", r"[\[b]"),
    *("[-a]", "[a-]", r"[\d\s]", r"[^\w]", '[^"]', r'["\\]', "[X-b]", r"[\\-^]", "[+--]", "[é-ü]"),
    *(r"[\u0100-\uffee]", r"[\s\S]", r"[\b]", "(?:)", "(?P<n>a)"),
)
COUNTS = (*("", "", "", "*", "+", "?", "{2}", "{0,2}", "{1,}"), *("*?", "+?", "{2,3}?", "{0}"))


def random_expression(rng: random.Random, depth: int = 0) -> str:
    kind = rng.random()
    if depth < 2 and kind < 0.3:
        options = (random_expression(rng, depth + 1) for _ in range(rng.randint(1, 3)))
        return f"{rng.choice(('(', '(?:'))}{'|'.join(options)}){rng.choice(COUNTS)}"
    if depth < 3 and kind < 0.6:
        return "".join(random_expression(rng, depth + 1) for _ in range(rng.randint(1, 3)))
    return rng.choice(ATOMS) + rng.choice(COUNTS)


def matches(expression: str, text: str) -> bool:
    """Whether all of it matches; `\\d` and `\\w` and what is not one are ASCII's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sets that Python may read otherwise one day
        is_ascii = re.search(r"\\[DW]|\^\\w", expression) is not None
        return re.fullmatch(expression, text, re.ASCII if is_ascii else 0) is not None


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_let_through_matches(seed: int) -> None:
    rng = random.Random(seed)
    num_texts = 0
    for number in range(60):
        expression = random_expression(rng)
        if "(?P<n>" in expression.replace("(?P<n>", "", 1):
            continue  # names come once
        node = parse(expression)
        text = written(node)
        assert written(parse(text)) == text, "on its way it must not change again"
        plain = restricted(node, IN_JSON)
        least, most = lengths(node)
        if text:
            for walked in finished_texts(StructuredOutputsParams(regex=text), 4, number, length=30):
                found = walked.decode()
                num_texts += 1
                assert matches(expression, found), (expression, found)
                assert least <= len(found) <= (len(found) if most is None else most)
        if plain is not None and written(plain):
            form = StructuredOutputsParams(json={"type": "string", "pattern": expression})
            for walked in finished_texts(form, 4, number, length=30):
                found = json.loads(walked)
                num_texts += 1
                assert matches(expression, found), (expression, found)
    assert num_texts > 200


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("^abc$", "abc"),
        ("^(?:^a|b$)$", "a|b"),
        ("(a|)", "a?"),
        ("a{1}b{0}c{2,2}", "ac{2}"),
        (r"(?<word>\d)+?", "[0-9]+"),
        ("[^-]]{a}", None),
        (r"[\^]|\^", r"\^"),
        (r"\ud83d\ude00", r"\u{1f600}"),
        ("a|a|(?:b|c)", "a|b|c"),
        (r"\t\n[\r ]", r"\t\n[\r ]"),
    ],
)
def test_how_it_is_written(expression: str, text: str | None) -> None:
    found = written(parse(expression))
    assert text is None or found == text
    assert written(parse(found)) == found


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("(?=a)", "lookaheads and lookbehinds cannot be held"),
        ("a(?<!b)", "lookaheads and lookbehinds cannot be held"),
        (r"(a)\1", "backreferences"),
        (r"(?P<a>x)(?P=a)", "only (?:…) and named ones"),
        ("(?i)a", "only (?:…) and named ones"),
        ("a^b", "'^' can only be held at the beginning"),
        ("a*^b", "'^' can only be held at the beginning"),
        ("(^a)+", "'^' can only be held at the beginning"),
        ("a$b", "'$' can only be held at the end"),
        ("(a$)b", "'$' can only be held at the end"),
        (r"\bword\b", r"the escape \b is not supported"),
        (r"\p{L}", r"the escape \p is not supported"),
        (r"a\Z", r"the escape \Z is not supported"),
        (r"[\ud800-\udfff]", "surrogates are no characters"),
        (r"\x00", "NUL"),
        ("[]a]", "must not be empty"),
        ("[z-a]", "begins behind its end"),
        (r"[\w-.]", "write \\- for a hyphen"),
        ("[[:alpha:]]", "[:alpha:] are not known"),
        ("[a", "the class has no end"),
        ("(a", "the group has no end"),
        ("a)", "')' closes nothing"),
        ("*a", "nothing to repeat"),
        ("a**", "cannot be repeated"),
        ("a++", "nor be possessive"),
        ("a{,3}", "must be {n}, {n,} or {n,m}"),
        ("a{3,2}", "least is above its most"),
        ("a{9999999}", "must be {n}"),
        ("a\\", "the escape has no end"),
        (r"\xZZ", "hexadecimal"),
        ("(" * (MAX_DEPTH + 1), "nested deeper"),
        ("a" * (MAX_LENGTH + 1), f"may have {MAX_LENGTH} characters"),
    ],
)
def test_what_cannot_be_held_is_refused(expression: str, message: str) -> None:
    with pytest.raises(RegularExpressionError, match=re.escape(message)) as caught:
        parse(expression)
    assert "(character " in str(caught.value)


def test_sets_of_characters() -> None:
    rng = random.Random(5)
    for _ in range(50):
        ranges = [(low, low + rng.randint(0, 5)) for low in rng.choices(range(60), k=4)]
        held = {code for low, high in ranges for code in range(low, high + 1)}
        more = [(low, low + 3) for low in rng.choices(range(60), k=2)]
        both = held & {code for low, high in more for code in range(low, high + 1)}
        for found, wanted in (
            (joined(ranges), held),
            (common(joined(ranges), joined(more)), both),
            (others(others(ranges)), held),
        ):
            assert {code for low, high in found for code in range(low, high + 1)} == wanted


def test_nested_groups_are_read_in_one_pass() -> None:
    """A parser that reads a group again for each of its repetitions would take for ever."""
    depth = MAX_DEPTH - 1
    assert written(parse("(" * depth + "a" + "b)*" * depth))
