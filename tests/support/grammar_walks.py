"""Texts that a constraint lets through, by random walks of the real matcher, a byte at a time."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from engine.structured.constraint import ConstraintKey, compiled, grammar_text
from engine.structured.forms.params import StructuredOutputsParams
from engine.structured.vocabulary import Vocabulary, tokenizer_of

_END = 256
_CLOSING = frozenset(b'"}],;0>)')


@cache
def byte_tokenizer() -> Any:
    """Over a vocabulary of single bytes and an end."""
    pieces = [bytes([value]) for value in range(256)] + [b""]
    return tokenizer_of(Vocabulary(pieces, len(pieces), [_END]))


def byte_matcher(key: ConstraintKey) -> Any:
    """A constraint's matcher over single bytes, at its beginning."""
    return compiled(byte_tokenizer(), key, grammar_text(key))


def lets_begin(matcher: Any, text: str | bytes) -> bool:
    """Whether the matcher takes all of the text; it has then moved on."""
    data = text.encode() if isinstance(text, str) else text
    if matcher.validate_tokens(list(data)) < len(data):
        return False
    return bool(matcher.consume_tokens(list(data)))


def lets_through(form: StructuredOutputsParams, text: str | bytes) -> bool:
    """Whether the whole text meets the constraint."""
    matcher = byte_matcher(form.key)
    return lets_begin(matcher, text) and matcher.is_accepting()


def finished_texts(
    form: StructuredOutputsParams,
    num_walks: int,
    seed: int,
    *,
    length: int = 80,
    hints: tuple[bytes, ...] = (),
    begin: bytes = b"",
) -> Iterator[bytes]:
    """Texts that the constraint lets end where they end; fewer than walks, for some get too long.

    Args:
        length: from here on a walk looks for the end.
        hints: texts that a walk goes on with now and then, where it may.
        begin: what half of the walks begin with.
    """
    start = byte_matcher(form.key)
    rng = random.Random(seed)
    for number in range(num_walks):
        matcher, walked = start.deep_copy(), bytearray()
        if number % 2 == 0 and begin:
            assert lets_begin(matcher, begin)
            walked += begin
        while len(walked) < 4 * length:
            if hints and rng.random() < 0.3:
                hint = rng.choice(hints)
                if lets_begin(matcher, hint):
                    walked += hint
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(mask, bitorder="little")[: _END + 1]
            allowed = np.flatnonzero(bits).tolist()
            assert allowed, (walked, matcher.get_error())
            if allowed == [_END] or (_END in allowed and rng.random() < 0.3):
                yield bytes(walked)
                break
            matcher_step = _step(allowed, rng, is_long=len(walked) > length)
            assert matcher.consume_token(matcher_step), walked
            walked.append(matcher_step)


def _step(allowed: list[int], rng: random.Random, *, is_long: bool) -> int:
    """One of the bytes: plain text as often as anything, and the end of things when it is time."""
    some = [byte for byte in allowed if byte != _END]
    if is_long:
        some = [byte for byte in some if byte in _CLOSING] or some
    if rng.random() < 0.5:
        some = [byte for byte in some if 0x20 <= byte < 0x7F] or some
    return rng.choice(some)
