"""Tries one constraint out: compiles it, and walks a little text through it.

Some constraints take minutes or gigabytes, some crash the library, and some compile at once but
then hang on their first token. So this is done where it can be killed. Knows constraints and how
long tokens are; knows no process and no time limit.
"""

import time
from typing import Any, Final

from engine.types.grammar_messages import (
    QUICK_NS,
    CompileResult,
    GrammarKey,
    MatchTime,
    compile_constraint,
)
from instrumentation import GrammarOutcome

_NUM_WALKS: Final = 4
_NUM_TOKENS: Final = 96
_MAX_SIZE_BYTES: Final = 64 << 20
"""Largest compiled grammar."""
_WRITTEN_SIZE_BYTES: Final = 4 << 20
"""Largest that is written down, which makes it up to 16 times as large."""


def try_constraint(compiler: Any, lengths: list[int], key: GrammarKey) -> CompileResult:
    """Compile one constraint and walk some text through it; the result has no number yet.

    Args:
        compiler: a `GrammarCompiler` of xgrammar.
        lengths: number of bytes of each token.
    """
    kind, text, is_compact = key
    began_s = time.process_time()
    try:
        grammar = compile_constraint(compiler, kind, text, disable_any_whitespace=is_compact)
    except Exception as error:  # whatever the library makes of somebody's text
        return _refusal(_message(error))
    compile_ns = int(1e9 * (time.process_time() - began_s))
    if grammar.memory_size_bytes > _MAX_SIZE_BYTES:
        return _refusal(
            f"it takes {grammar.memory_size_bytes >> 20} MiB once compiled, and may take "
            f"{_MAX_SIZE_BYTES >> 20}; make it smaller (fewer or shorter repetitions)"
        )
    if failure := _walk_through(grammar, lengths):
        return _refusal(failure)
    is_written = compile_ns > QUICK_NS and grammar.memory_size_bytes <= _WRITTEN_SIZE_BYTES
    return CompileResult(
        0,
        GrammarOutcome.COMPILED,
        compile_ns=compile_ns,
        num_bytes=grammar.memory_size_bytes,
        grammar=grammar.serialize_json() if is_written else "",
    )


def _refusal(failure: str) -> CompileResult:
    return CompileResult(0, GrammarOutcome.INVALID, failure)


def _walk_through(grammar: Any, lengths: list[int]) -> str:
    """Why the grammar is no good for generating; empty if nothing was found.

    `lengths` has the number of bytes of each token.
    """
    import numpy as np
    from xgrammar import GrammarMatcher

    vocab_size, num_bytes = len(lengths), np.array(lengths)
    mask = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    random = np.random.default_rng(0)
    for walk in range(_NUM_WALKS):
        matcher, taken = GrammarMatcher(grammar), MatchTime()
        for position in range(_NUM_TOKENS):
            with taken:
                matcher.fill_next_token_bitmask(mask)
            allows = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
            allows[matcher.stop_token_ids] = 0
            allowed = np.flatnonzero(allows)
            if not len(allowed):
                if position == 0:
                    return "no text but the empty one matches it"
                break
            # The first, which repeats where it may; the longest; then any.
            if walk == 0:
                token = int(allowed[0])
            elif walk == 1:
                token = int(allowed[num_bytes[allowed].argmax()])
            else:
                token = int(random.choice(allowed))
            with taken:
                accepted = matcher.accept_token(token)
            if not accepted:
                return "it contradicts itself"
            if taken.is_too_long:
                return (
                    "it can be matched in too many ways to be followed while text is generated; "
                    "remove nested or ambiguous repetitions, such as (a*)*"
                )
    return ""


def _message(error: Exception) -> str:
    """The library's message without the place in its own source, on one line."""
    text = " ".join(str(error).split())
    if text.startswith("[") and "] " in text:
        text = text.split("] ", 1)[1]
        place, _, rest = text.partition(": ")
        text = rest if ".cc:" in place else text
    return text[:500] or type(error).__name__
