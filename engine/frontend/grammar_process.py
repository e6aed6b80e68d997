"""The process that tries grammars out before the engine core takes them.

It loads the library and the tokenizer once, and forks a child for each constraint, which may then
be killed at any time; it does nothing dangerous itself. What has been found good, the core reads,
or compiles again where that is quicker.

Knows the tokenizer, which the core does not know, and tells the core which bytes each token has.
The core starts it by name, so that it may stand above the core. Messages each have their length in
front (`engine.types.framing`); the end of the input ends it.

    first   out  `Vocabulary`
    then    in   `CompileRequest`  out  a `CompileResult` for each not withdrawn, in any order
"""

import gc
import os
import select
import sys
from typing import BinaryIO, Final

import msgspec

from engine.frontend.compile_scheduler import CompileScheduler
from engine.frontend.grammar_trial import try_constraint
from engine.frontend.grammar_worker import Workers, die_with, yield_to_steps
from engine.types.framing import Frames, framed
from engine.types.grammar_messages import (
    CompileRequest,
    CompileResult,
    GrammarKey,
    Vocabulary,
    check_library,
)

_CHUNK_BYTES: Final = 1 << 20


def serve(
    *,
    parent_pid: int,
    model: str | None,
    revision: str | None,
    download_dir: str | None,
    tokenizer: str | None,
    vocab_size: int,
    stop_token_ids: list[int],
    timeout_s: float,
    is_background: bool,
) -> None:
    """Answer until the input ends.

    Args:
        timeout_s: processor time that one constraint may take.
        is_background: nobody waits for it yet, so that steps go before its start too.
    """
    die_with(parent_pid)
    if is_background:
        yield_to_steps()
    source, sink = sys.stdin.fileno(), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get among the answers
    try:
        import xgrammar

        check_library()
        pieces = _token_bytes(model, revision, download_dir, tokenizer, vocab_size)
        info = xgrammar.TokenizerInfo(
            pieces, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=stop_token_ids
        )
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    except Exception as error:
        _write(sink, Vocabulary(failure=f"{type(error).__name__}: {error}"))
        return
    lengths = [len(piece) for piece in pieces] + [0] * (vocab_size - len(pieces))

    def work(key: GrammarKey) -> CompileResult:
        return try_constraint(compiler, lengths, key)

    _write(sink, Vocabulary(info=info.serialize_json()))
    gc.freeze()  # children share these pages as long as nobody touches them
    _Workshop(Workers(work), source, sink, timeout_s=timeout_s).run()


class _Workshop:
    """Requests in, results out, and a child that is ready before it is needed."""

    def __init__(self, workers: Workers, source: int, sink: BinaryIO, *, timeout_s: float) -> None:
        self._workers = workers
        self._source = source
        self._sink = sink
        self._requests = Frames()
        self._scheduler = CompileScheduler(workers, timeout_s=timeout_s)

    def run(self) -> None:
        """Until the input ends."""
        readable: set[int] = set()
        while True:
            if self._source in readable:
                data = os.read(self._source, _CHUNK_BYTES)
                if not data:
                    return
                for body in self._requests.feed(data):
                    self._scheduler.take(msgspec.msgpack.decode(body, type=CompileRequest))
            for result in self._scheduler.advance(readable):
                _write(self._sink, result)
            self._workers.prepare()
            readable = self._wait()

    def _wait(self) -> set[int]:
        poller = select.poll()
        for fileno in (self._source, *self._scheduler.filenos):
            poller.register(fileno, select.POLLIN)
        left_s = self._scheduler.seconds_left()
        # Never before the time is up, or it would wake again and again.
        return {fileno for fileno, _ in poller.poll(None if left_s is None else 1e3 * left_s + 1)}


def _token_bytes(
    model: str | None,
    revision: str | None,
    download_dir: str | None,
    tokenizer: str | None,
    vocab_size: int,
) -> list[bytes]:
    """What each token adds to a text; nothing for special tokens, which never are text."""
    from engine.checkpoint.locate import resolve_model
    from engine.text.tokenizer import get_tokenizer

    source = resolve_model(model, revision, download_dir)
    words = get_tokenizer(source, name=tokenizer, download_dir=download_dir)
    return [
        b"" if token_id in words.special_ids else words.token_bytes(token_id)
        for token_id in range(min(vocab_size, words.max_token_id + 1))
    ]


def _write(sink: BinaryIO, message: msgspec.Struct) -> None:
    sink.write(framed(message))
    sink.flush()
