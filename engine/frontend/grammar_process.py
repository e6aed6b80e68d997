"""The process that tries grammars out before the engine core takes them.

Here a constraint is compiled, and a little text is walked through it, where it can be killed: some
constraints take minutes or gigabytes, some crash the library, and some compile at once but then
hang on their first token. What has been vetted here, the core compiles again, in the same time.

Knows the tokenizer, which the core does not know, and tells the core which bytes each token has.
The core starts it by name, so that it may stand above the core. One message in, one out, each with
its length in front; the end of the input ends it.

    first   out  `Vocabulary`
    then    in   kind, text, disable_any_whitespace    out  `Verdict`
"""

import ctypes
import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from engine.types.grammar_messages import MatchTime, Verdict, Vocabulary, compile_constraint

_NUM_WALKS: Final = 4
_NUM_TOKENS: Final = 96
_MAX_SIZE_BYTES: Final = 64 << 20
"""Largest compiled grammar."""
_MEMORY_BYTES: Final = 3 << 30
"""What compiling may take beyond what the process has when it is ready."""
_NICENESS: Final = 5
_PR_SET_PDEATHSIG: Final = 1
_LENGTH: Final = struct.Struct("<I")


def serve(
    *,
    parent_pid: int,
    model: str | None,
    revision: str | None,
    download_dir: str | None,
    tokenizer: str | None,
    vocab_size: int,
    stop_token_ids: list[int],
) -> None:
    """Answer until the input ends."""
    _die_with(parent_pid)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get among the answers
    try:
        import xgrammar

        pieces = _token_bytes(model, revision, download_dir, tokenizer, vocab_size)
        info = xgrammar.TokenizerInfo(
            pieces, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=stop_token_ids
        )
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    except Exception as error:
        _write(sink, Vocabulary(failure=f"{type(error).__name__}: {error}"))
        return
    _write(sink, Vocabulary(info=info.serialize_json()))
    lengths = [len(piece) for piece in pieces] + [0] * (vocab_size - len(pieces))
    _limit_memory()
    os.nice(_NICENESS)  # steps go first
    while (request := _read(source)) is not None:
        kind, text, disable_any_whitespace = msgspec.msgpack.decode(
            request, type=tuple[str, str, bool]
        )
        _write(sink, _vet(compiler, lengths, kind, text, disable_any_whitespace))


def _vet(compiler: Any, lengths: list[int], kind: str, text: str, compact: bool) -> Verdict:
    """Compile one constraint and walk some text through it."""
    began = time.process_time()
    try:
        grammar = compile_constraint(compiler, kind, text, disable_any_whitespace=compact)
    except Exception as error:  # whatever the library makes of somebody's text
        return Verdict(failure=_message(error))
    compile_ns = int(1e9 * (time.process_time() - began))
    if grammar.memory_size_bytes > _MAX_SIZE_BYTES:
        return Verdict(
            failure=f"it takes {grammar.memory_size_bytes >> 20} MiB once compiled, and may take "
            f"{_MAX_SIZE_BYTES >> 20}; make it smaller (fewer or shorter repetitions)"
        )
    failure = _walk_through(grammar, lengths)
    return Verdict(failure, compile_ns, grammar.memory_size_bytes)


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


def _token_bytes(
    model: str | None,
    revision: str | None,
    download_dir: str | None,
    tokenizer: str | None,
    vocab_size: int,
) -> list[bytes]:
    """What each token adds to a text; nothing for special tokens, which never are text."""
    from engine.checkpoint.locate import resolve_model
    from engine.frontend.tokenizer import get_tokenizer

    source = resolve_model(model, revision, download_dir)
    words = get_tokenizer(source, name=tokenizer, download_dir=download_dir)
    return [
        b"" if token_id in words.special_ids else words.token_bytes(token_id)
        for token_id in range(min(vocab_size, words.max_token_id + 1))
    ]


def _message(error: Exception) -> str:
    """The library's message without the place in its own source, on one line."""
    text = " ".join(str(error).split())
    if text.startswith("[") and "] " in text:
        text = text.split("] ", 1)[1]
        place, _, rest = text.partition(": ")
        text = rest if ".cc:" in place else text
    return text[:500] or type(error).__name__


def _die_with(parent_pid: int) -> None:
    """End when the core ends, also in the middle of a call that never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before it could be watched
        os._exit(0)


def _limit_memory() -> None:
    """Let a compilation that grows without bound fail instead of taking the machine's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(_LENGTH.size)
    return source.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None


def _write(sink: BinaryIO, message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    sink.write(_LENGTH.pack(len(body)) + body)
    sink.flush()
