"""Brings compiled grammars from the process that tries them out, on a thread of its own.

A constraint may take minutes or gigabytes, or crash the library: that happens over there, and what
it does to others there is that process's to limit. What it has found good is compiled again here,
or read where that would take long, which a second thread does; the library lets other threads run
meanwhile. Knows constraints; knows no request.
"""

import contextlib
import os
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from engine.core.grammar_process_client import GrammarProcess
from engine.log import get_logger
from engine.types.grammar_messages import (
    QUICK_NS,
    WALL_FACTOR,
    CompileRequest,
    CompileResult,
    GrammarKey,
    Vocabulary,
    compile_constraint,
)
from instrumentation import GrammarOutcome

logger = get_logger(__name__)

_CLOSE_TIMEOUT_S: Final = 1.0
_START_TIMEOUT_S: Final = 120.0
_MARGIN_S: Final = 10.0
"""How much later than a constraint's time limit the process may tell what became of it."""
_NUM_TRIES: Final = 2
"""Of a constraint whose process dies; it can hardly be to blame, since a child tries it out."""

_Command = Literal["warm up", "submit", "withdraw", "close"]


class Compiled(NamedTuple):
    """What became of one constraint."""

    key: GrammarKey
    outcome: GrammarOutcome
    grammar: Any = None
    """An xgrammar `CompiledGrammar`, if it was compiled."""
    error: str = ""
    """Why not, otherwise."""
    num_bytes: int = 0
    duration_ns: int = 0
    """Until it was compiled or given up, waiting for others not included."""


@dataclass(slots=True)
class _WantedState:
    """A constraint that the process is to try out."""

    key: GrammarKey
    num_tries: int = 0


class GrammarCompiler:
    """A queue of commands, a thread that talks to the other process, a queue of results.

    The thread and the other process start with the first constraint, or when told to, and stay.

    Args:
        process_kwargs: of `engine.frontend.grammar_process.serve`, without the time limit.
        timeout_s: processor time that the other process may take for one constraint.
    """

    def __init__(self, process_kwargs: dict[str, Any], *, timeout_s: float) -> None:
        self._process_kwargs = process_kwargs | {"timeout_s": timeout_s}
        # The longest that one constraint may keep it silent: it has two tries where it crashes.
        self._silence_s = 2 * WALL_FACTOR * timeout_s + _MARGIN_S
        self._commands: queue.SimpleQueue[tuple[_Command, GrammarKey | None]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self._has_result = threading.Event()
        self._wake = -1
        self._large: queue.SimpleQueue[tuple[GrammarKey, CompileResult] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._large_thread: threading.Thread | None = None
        self._process: GrammarProcess | None = None
        self._is_closing = False
        self._compilers = threading.local()  # they may not share one
        # The rest is the thread's.
        self._info: Any = None
        self._is_ready = False
        self._heard_s = 0.0
        self._wanted: dict[int, _WantedState] = {}
        self._numbers: dict[GrammarKey, int] = {}
        self._last_number = 0

    @property
    def process_id(self) -> int | None:
        """Of the process that tries grammars out; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def warm_up(self) -> None:
        """Start the thread and the other process before a constraint comes."""
        self._command("warm up", None)

    def submit(self, key: GrammarKey) -> None:
        """Ask for a constraint; `take` will have the result."""
        self._command("submit", key)

    def withdraw(self, key: GrammarKey) -> None:
        """Nobody wants the constraint any more: trying it out ends, and it may have no result."""
        self._command("withdraw", key)

    def take(self) -> list[Compiled]:
        """Results that have come since the last call."""
        self._has_result.clear()
        results = []
        while not self._done.empty():
            results.append(self._done.get_nowait())
        return results

    def wait(self, timeout_s: float) -> None:
        """Wait for a result, but not for longer than that."""
        self._has_result.wait(timeout_s)

    def close(self) -> None:
        """Give up what is being compiled and end the other process."""
        if self._thread is None or self._is_closing:
            return
        self._is_closing = True
        process = self._process
        if process is not None:
            process.interrupt()  # its pipes are the thread's
        self._command("close", None)
        self._large.put(None)  # it may compile for a while yet, and is not waited for
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _command(self, command: _Command, key: GrammarKey | None) -> None:
        self._commands.put((command, key))
        if self._thread is None:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        os.eventfd_write(self._wake, 1)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._take_commands()
                if self._process is not None:
                    self._hear(self._process)
            except Exception as error:
                # Nobody may wait for ever. Nor does it go round and round: without a process, it
                # waits for the next command.
                logger.exception("compiling grammars failed")
                self._drop_process()
                self._give_up(f"structured outputs are not available: {error!r}")
        self._drop_process()

    def _take_commands(self) -> None:
        """Do what has been commanded; with no process to be heard, wait for that."""
        while not self._is_closing and (self._process is None or not self._commands.empty()):
            command, key = self._commands.get()
            if command == "submit":
                assert key is not None
                self._want(key)
            elif command == "withdraw" and key in self._numbers:
                number = self._numbers.pop(key)
                del self._wanted[number]
                if self._process is not None and self._is_ready:
                    self._process.send(CompileRequest(number))
                    self._heard_s = time.monotonic()
            elif command == "warm up" and self._process is None:
                self._start(is_background=True)

    def _want(self, key: GrammarKey) -> None:
        if not self._wanted:
            self._heard_s = time.monotonic()
        self._last_number += 1
        self._numbers[key] = self._last_number
        self._wanted[self._last_number] = _WantedState(key)
        if self._process is None:
            self._start()
        elif self._is_ready:
            self._ask(self._last_number)

    def _start(self, *, is_background: bool = False) -> None:
        self._is_ready = False
        self._heard_s = time.monotonic()
        kwargs = self._process_kwargs | {"is_background": is_background}
        self._process = GrammarProcess(kwargs, wake=self._wake)
        import xgrammar  # noqa: F401 - takes a second or more, while the process does the same

    def _ask(self, number: int) -> None:
        assert self._process is not None
        wanted = self._wanted[number]
        wanted.num_tries += 1
        self._process.send(CompileRequest(number, wanted.key))

    def _hear(self, process: GrammarProcess) -> None:
        """Wait for whatever comes next, and handle it."""
        try:
            for message in process.wait(self._seconds_left()):
                self._heard_s = time.monotonic()
                if isinstance(message, Vocabulary):
                    self._take_vocabulary(message)
                else:
                    self._take_result(message)
        except EOFError:
            self._take_death()
        else:
            if self._seconds_left() == 0.0:
                self._take_death()
        with contextlib.suppress(BlockingIOError):  # it was something else that woke it
            os.eventfd_read(self._wake)

    def _seconds_left(self) -> float | None:
        """How long the process may still say nothing, None for any time."""
        if self._process is None or (self._is_ready and not self._wanted):
            return None
        limit_s = self._silence_s if self._is_ready else _START_TIMEOUT_S
        return max(0.0, self._heard_s + limit_s - time.monotonic())

    def _take_vocabulary(self, vocabulary: Vocabulary) -> None:
        if vocabulary.failure:
            self._drop_process()
            self._give_up(f"structured outputs are not available: {vocabulary.failure}")
            return
        if self._info is None:
            import xgrammar

            self._info = xgrammar.TokenizerInfo.deserialize_json(vocabulary.info)
        self._is_ready = True
        for number in self._wanted:
            self._ask(number)

    def _take_result(self, result: CompileResult) -> None:
        self._take_commands()  # nobody may want it any more
        wanted = self._wanted.pop(result.number, None)
        if wanted is None:
            return
        key = wanted.key
        del self._numbers[key]
        if result.outcome is not GrammarOutcome.COMPILED:
            self._finish(key, result.outcome, error=result.failure, duration_ns=result.duration_ns)
        elif result.compile_ns <= QUICK_NS:
            self._take_over(key, result)
        else:
            if self._large_thread is None:
                self._large_thread = threading.Thread(
                    target=self._take_over_large, name="large grammars", daemon=True
                )
                self._large_thread.start()
            self._large.put((key, result))

    def _take_over_large(self) -> None:
        """The second thread: the first is there for others meanwhile."""
        while (item := self._large.get()) is not None and not self._is_closing:
            self._take_over(*item)

    def _take_over(self, key: GrammarKey, result: CompileResult) -> None:
        """Make the core's own grammar out of one that is good."""
        began_ns = time.monotonic_ns()
        try:
            if result.grammar:
                from xgrammar import CompiledGrammar

                grammar = CompiledGrammar.deserialize_json(result.grammar, self._info)
            else:
                kind, text, is_compact = key
                grammar = compile_constraint(
                    self._own_compiler(), kind, text, disable_any_whitespace=is_compact
                )
        except Exception as error:
            logger.exception("a grammar that had been found good could not be taken over")
            self._finish(key, GrammarOutcome.UNAVAILABLE, error=repr(error))
            return
        self._finish(
            key,
            GrammarOutcome.COMPILED,
            grammar=grammar,
            num_bytes=result.num_bytes,
            duration_ns=result.duration_ns + time.monotonic_ns() - began_ns,
        )

    def _own_compiler(self) -> Any:
        """The compiler of the thread that calls."""
        if not hasattr(self._compilers, "own"):
            import xgrammar

            self._compilers.own = xgrammar.GrammarCompiler(
                self._info, max_threads=1, cache_enabled=False
            )
        return self._compilers.own

    def _take_death(self) -> None:
        """The process has died, or says nothing any more: once, another may do better."""
        was_ready = self._is_ready
        self._drop_process()
        if self._is_closing:
            return
        if not was_ready:
            self._give_up("structured outputs are not available: their process did not start")
        elif self._wanted:
            error = "structured outputs are not available: their process died"
            self._give_up(error, num_tries=_NUM_TRIES)
            if self._wanted:
                self._start()

    def _give_up(self, error: str, *, num_tries: int = 0) -> None:
        """There will be no result for what is wanted now and has had that many tries."""
        if not self._wanted:
            logger.warning("%s", error)
        for number, wanted in list(self._wanted.items()):
            if wanted.num_tries >= num_tries:
                del self._wanted[number], self._numbers[wanted.key]
                self._finish(wanted.key, GrammarOutcome.UNAVAILABLE, error=error)

    def _finish(self, key: GrammarKey, outcome: GrammarOutcome, **more: Any) -> None:
        self._done.put(Compiled(key, outcome, **more))
        self._has_result.set()

    def _drop_process(self) -> None:
        process, self._process = self._process, None
        self._is_ready = False
        if process is not None:
            process.kill()
