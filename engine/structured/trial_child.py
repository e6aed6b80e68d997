"""The process in which a constraint is tried out that may take for ever, or crash the library.

It compiles each in a thread of a large stack and walks a little text through it, as the core's
thread would. Knows constraints; whoever starts it kills it. Messages have their length in front:

    first   in  `Vocabulary`                 out  an empty `TrialAnswer`
    then    in  `TrialQuestion`              out  `TrialAnswer`
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from engine.structured.constraint import ConstraintError, ConstraintKey, compiled, grammar_text
from engine.structured.forms.lark import LarkError
from engine.structured.matching import TOO_SLOW, Grammar, MatchTime
from engine.structured.vocabulary import Vocabulary, tokenizer_of
from engine.types.framing import Frames, framed

STACK_BYTES: Final = 256 << 20
"""Half of what the core compiles with: the library's recursion ends the process on both."""
_MEMORY_BYTES: Final = 3 << 30
"""What it may take beyond what it has once it is up."""
_NICENESS: Final = 5
_NUM_WALKS: Final = 3
_NUM_TOKENS: Final = 64
_PR_SET_PDEATHSIG: Final = 1
_CHUNK_BYTES: Final = 1 << 20


class TrialQuestion(msgspec.Struct, array_like=True, gc=False):
    """A constraint, and the processor time that trying it out may take."""

    key: ConstraintKey
    timeout_s: float


class TrialAnswer(msgspec.Struct, array_like=True, gc=False):
    """What came of it."""

    error: str = ""
    """Why the constraint is no good; empty if it is good."""
    text: str = ""
    """What the library is to compile, if it is good."""


def serve(*, parent_pid: int) -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    for limit in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(limit, signal.SIG_DFL)  # they may be ignored, and are to end it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before it could be watched
        return
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    sink = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not get among the answers
    messages = _messages(sys.stdin.buffer)
    tokenizer = tokenizer_of(msgspec.msgpack.decode(next(messages), type=Vocabulary))
    _limit_memory()
    _write(sink, TrialAnswer())
    for body in messages:
        question = msgspec.msgpack.decode(body, type=TrialQuestion)
        # The kernel's doing: it ends a call that never returns, and counts no time spent waiting.
        signal.setitimer(signal.ITIMER_PROF, question.timeout_s)
        answer = _tried(tokenizer, question.key)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(sink, answer)


def _tried(tokenizer: Any, key: ConstraintKey) -> TrialAnswer:
    text, matcher, error = in_large_stack(lambda: _compiled(tokenizer, key), STACK_BYTES)
    if not error:
        error = _walk_through(matcher, tokenizer)
    return TrialAnswer(error) if error else TrialAnswer("", text)


def _compiled(tokenizer: Any, key: ConstraintKey) -> tuple[str, Any, str]:
    try:
        text = grammar_text(key)
        return text, compiled(tokenizer, key, text), ""
    except (ConstraintError, LarkError, MemoryError) as error:
        return "", None, str(error) or type(error).__name__


def in_large_stack(work: Any, num_bytes: int) -> Any:
    """What a call returns that may recurse deep; made in a thread of its own."""
    found: list[Any] = []
    before = threading.stack_size(num_bytes)
    try:
        thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if not found:
        raise RuntimeError("the call has failed, see above")
    return found[0]


def _walk_through(matcher: Any, tokenizer: Any) -> str:
    """Why the grammar is no good for generating; empty if nothing was found."""
    num_words = -(-tokenizer.vocab_size // 32)
    no_ends = np.zeros(num_words, dtype=np.int32)
    row = np.empty(num_words, dtype=np.int32)
    random = np.random.default_rng(0)
    for walk in range(_NUM_WALKS):
        grammar, taken = Grammar(matcher.deep_copy(), no_ends), MatchTime()
        for _ in range(_NUM_TOKENS):
            with taken:
                grammar.write_mask(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            allowed = np.setdiff1d(allowed, tokenizer.eos_tokens)
            if len(allowed):  # the first, which repeats where it may; then any
                token = int(allowed[0] if walk == 0 else random.choice(allowed))
                with taken:
                    error = grammar.accept([token])
            elif error := grammar.accept([tokenizer.eos_tokens[0]]):
                return error  # what writing the mask has met
            else:
                break
            if error or taken.is_too_long:
                return error or TOO_SLOW
    return ""


def _messages(source: Any) -> Iterator[bytes]:
    frames = Frames()
    while data := source.read1(_CHUNK_BYTES):
        yield from frames.feed(data)


def _write(sink: int, message: msgspec.Struct) -> None:
    with open(sink, "wb", closefd=False) as file:
        file.write(framed(message))


def _limit_memory() -> None:
    """Let a compilation that grows without bound fail instead of taking the machine's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
