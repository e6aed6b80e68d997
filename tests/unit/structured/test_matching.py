"""Matchers that move on, back and apart: always where a fresh one, told the same, would be."""

import random
from typing import Any

import numpy as np
import pytest

from engine.structured.constraint import compiled, grammar_text
from engine.structured.forms.params import StructuredOutputsParams
from engine.structured.matching import Grammar, end_mask_of
from engine.structured.vocabulary import Vocabulary, tokenizer_of

WORDS = (
    "na",
    "name",
    '"name"',
    '{"',
    '": ',
    "12",
    "ab",
    "b,",
    '"}',
    "true",
    "</",
    "f>",
    "<f",
    "xx",
)
PIECES = [bytes([value]) for value in range(256)] + [word.encode() for word in WORDS]
END = len(PIECES)
SIZE = END + 3
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "of": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}}]},
    },
    "required": ["name"],
}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
FORMS: tuple[dict[str, Any], ...] = (
    {"json": SCHEMA},
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"regex": "(ab|[a-c]x){1,9}"},
    {"choice": ["ab", "abx", "name", "true"]},
    {"grammar": 'root ::= "(" root ")" | "[" root root "]" | "x"'},
    {
        "structural_tag": {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<f"],
                "tags": [{"begin": "<f>", "content": CONTENT, "end": "</f>"}],
            }
        }
    },
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pieces = [*PIECES, b""]
    return tokenizer_of(Vocabulary(pieces, SIZE, [END]), None)


def start_of(tokenizer: Any, form: dict[str, Any]) -> Any:
    key = StructuredOutputsParams(**form).key
    return compiled(tokenizer, key, grammar_text(key))


def mask_of(grammar: Grammar) -> list[int]:
    row = np.zeros(-(-SIZE // 32), dtype=np.int32)
    grammar.write_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:SIZE]
    return [int(token) for token in np.flatnonzero(bits)]


def new_grammar(matcher: Any, token_ids: list[int]) -> Grammar:
    grammar = Grammar(matcher.deep_copy(), end_mask_of([END], SIZE))
    assert grammar.accept(token_ids) is None
    return grammar


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form))
@pytest.mark.parametrize("seed", range(3))
def test_back_and_apart_it_is_where_a_fresh_one_would_be(
    tokenizer: Any, form: dict[str, Any], seed: int
) -> None:
    rng, matcher = random.Random(seed), start_of(tokenizer, form)
    grammar, taken = new_grammar(matcher, []), list[int]()
    others: list[tuple[Grammar, list[int]]] = []
    num_back = 0
    for _ in range(120):
        way = rng.random()
        if way < 0.25 and taken:
            num_tokens = rng.randint(1, min(8, len(taken)))
            grammar.rollback(num_tokens)
            taken = taken[:-num_tokens]
            num_back += 1
        elif way < 0.35:
            others.append((grammar.fork(), list(taken)))
        elif way < 0.45 and others:
            others.append((grammar, taken))
            grammar, taken = others.pop(rng.randrange(len(others)))
        elif not grammar.is_over:
            allowed = [token for token in mask_of(grammar) if token != END]
            if not allowed:
                continue
            token = rng.choice(allowed)
            wrong = rng.randrange(SIZE)
            assert grammar.num_accepted([token, token]) >= 1
            assert bool(grammar.num_accepted([wrong])) is (wrong in mask_of(grammar))
            assert grammar.accept([token]) is None
            taken = [*taken, token]
        fresh = new_grammar(matcher, taken)
        assert mask_of(grammar) == mask_of(fresh), taken
        assert grammar.is_over is fresh.is_over
        assert grammar.is_forced is fresh.is_forced
        assert grammar.forced_tokens() == fresh.forced_tokens()
    assert num_back > 5
    for other, token_ids in others:
        assert mask_of(other) == mask_of(new_grammar(matcher, token_ids)), "another way moved it"


def test_an_end_can_be_taken_back(tokenizer: Any) -> None:
    matcher = start_of(tokenizer, {"choice": ["ab", "abx"]})
    grammar = new_grammar(matcher, [*b"ab"])
    before = mask_of(grammar)
    assert grammar.accept([END]) is None
    assert grammar.is_over
    grammar.rollback(1)
    assert not grammar.is_over
    assert mask_of(grammar) == before
    with pytest.raises(ValueError, match="cannot take back 9 tokens"):
        grammar.rollback(9)


def test_forced_tokens_spell_the_only_text_that_may_come(tokenizer: Any) -> None:
    grammar = new_grammar(start_of(tokenizer, {"json": SCHEMA, "disable_any_whitespace": True}), [])
    forced = grammar.forced_tokens()
    assert b"".join(PIECES[token] for token in forced) == b'{"name": '
    assert forced[0] == PIECES.index(b'{"'), "the longest tokens, where no tokenizer says otherwise"
    assert grammar.is_forced
    assert grammar.num_accepted([*forced, 0]) == len(forced)
    assert grammar.accept([*forced, ord('"')]) is None
    assert not grammar.is_forced
    assert grammar.forced_tokens() == []


def test_a_text_is_forced_as_the_tokenizer_writes_it_if_that_adds_up_to_it() -> None:
    for encode, first in (
        (lambda text: list(text.encode()), ord("{")),
        (lambda text: [PIECES.index(b" "), *text.encode()], PIECES.index(b'{"')),
    ):
        tokenizer = tokenizer_of(Vocabulary(PIECES, SIZE, [END]), encode)
        form = {"json": SCHEMA, "disable_any_whitespace": True}
        assert new_grammar(start_of(tokenizer, form), []).forced_tokens()[0] == first


def test_tokens_that_add_nothing_are_never_text() -> None:
    """Also an end token whose name could be text, and ids behind the vocabulary."""
    pieces = [*(bytes([value]) for value in range(256)), b"", b""]
    tokenizer = tokenizer_of(Vocabulary(pieces, 300, [257]))
    for form in ({"regex": "(?s:.*)"}, {"structural_tag": {"format": {"type": "any_text"}}}):
        matcher = start_of(tokenizer, form)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = set(np.flatnonzero(bits).tolist())
        assert set(range(128)) <= allowed
        assert allowed - set(range(256)) == {257}


def test_what_cannot_be_completed_is_said_to_be_so(tokenizer: Any) -> None:
    """A pattern that needs what the form of calls excludes leaves nothing to follow the name."""
    text = {"type": "text", "patterns": ["<a"], "excludes": ["<"]}
    tag = {"type": "tag", "begin": "x", "content": text, "end": "y"}
    inner = {"type": "or", "elements": [tag, {"type": "const_string", "value": "z"}]}
    form = {"type": "structural_tag", "format": inner}
    params = StructuredOutputsParams.of_prepared("structural_tag", form)
    matcher = compiled(tokenizer, params.key, grammar_text(params.key))
    grammar = new_grammar(matcher, [])
    assert ord("x") in mask_of(grammar)
    assert grammar.accept([ord("x")]) is None
    assert mask_of(grammar) == []
    assert "unsatisfiable" in str(grammar.accept([ord("y")]))
