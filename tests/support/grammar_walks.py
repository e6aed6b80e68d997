"""Texts that a constraint lets through, by random walks of the real matcher, a byte at a time."""

import random
from collections.abc import Iterator
from functools import cache

import numpy as np
import xgrammar

from engine.types.grammar_messages import compile_constraint
from engine.types.structured_outputs import StructuredOutputsParams

_END = 256
_CLOSING = frozenset(b'"}],;0>)')


@cache
def byte_compiler() -> xgrammar.GrammarCompiler:
    """Over a vocabulary of single bytes and an end."""
    pieces = [bytes([value]) for value in range(256)] + [b""]
    info = xgrammar.TokenizerInfo(
        pieces, xgrammar.VocabType.RAW, vocab_size=len(pieces), stop_token_ids=[_END]
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


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
    kind, text, is_compact = form.key
    grammar = compile_constraint(byte_compiler(), kind, text, disable_any_whitespace=is_compact)
    rng = random.Random(seed)
    mask = np.zeros((1, 9), dtype=np.int32)
    for number in range(num_walks):
        matcher, walked = xgrammar.GrammarMatcher(grammar), bytearray()
        if number % 2 == 0 and begin:
            assert matcher.accept_string(begin)
            walked += begin
        while len(walked) < 4 * length:
            if hints and rng.random() < 0.3:
                hint = rng.choice(hints)
                if matcher.accept_string(hint):
                    walked += hint
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: _END + 1]
            allowed = np.flatnonzero(bits).tolist()
            assert allowed, walked
            if allowed == [_END] or (_END in allowed and rng.random() < 0.3):
                yield bytes(walked)
                break
            matcher_step = _step(allowed, rng, is_long=len(walked) > length)
            assert matcher.accept_token(matcher_step), walked
            walked.append(matcher_step)


def _step(allowed: list[int], rng: random.Random, *, is_long: bool) -> int:
    """One of the bytes: plain text as often as anything, and the end of things when it is time."""
    some = [byte for byte in allowed if byte != _END]
    if is_long:
        some = [byte for byte in some if byte in _CLOSING] or some
    if rng.random() < 0.5:
        some = [byte for byte in some if 0x20 <= byte < 0x7F] or some
    return rng.choice(some)
