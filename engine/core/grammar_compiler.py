"""Compiles grammars on a thread of its own, each tried out in another process first.

A constraint may take minutes or gigabytes, or crash the library: that happens to the other process,
which is killed and started anew. What it has found good is compiled again here, where it takes as
long as there; the library lets other threads run meanwhile. Knows constraints; knows no request.
"""

import queue
import threading
import time
from typing import Any, NamedTuple

from engine.core.grammar_vetting import VettingProcess
from engine.log import get_logger
from engine.types.grammar_messages import compile_constraint
from instrumentation import GrammarOutcome

logger = get_logger(__name__)

_CLOSE_TIMEOUT_S = 1.0

GrammarKey = tuple[str, str, bool]
"""Kind, text, disable_any_whitespace."""


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


class GrammarCompiler:
    """A queue of constraints, a thread that compiles them, a queue of results.

    The thread and the other process start with the first constraint and then stay.

    Args:
        process_kwargs: of `VettingProcess`.
        timeout_s: how long the other process may take for one constraint.
    """

    def __init__(self, process_kwargs: dict[str, Any], *, timeout_s: float) -> None:
        self._process_kwargs = process_kwargs
        self._timeout_s = timeout_s
        self._wanted: queue.SimpleQueue[GrammarKey | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self._has_result = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: VettingProcess | None = None
        self._compiler: Any = None
        self._not_begun: set[GrammarKey] = set()
        self._is_closing = False

    @property
    def process_id(self) -> int | None:
        """Of the process that tries grammars out; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def submit(self, key: GrammarKey) -> None:
        """Ask for a constraint; `take` will have the result."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        self._not_begun.add(key)
        self._wanted.put(key)

    def withdraw(self, key: GrammarKey) -> None:
        """Nobody wants the constraint any more: it is not begun, and may have no result."""
        self._not_begun.discard(key)

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
        self._is_closing = True
        self._wanted.put(None)
        if self._thread is None:
            return
        process = self._process
        if process is not None:
            process.interrupt()  # its pipes are the thread's
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def compile(self, key: GrammarKey) -> Compiled:
        """Compile one constraint, in the calling thread."""
        began_ns = time.monotonic_ns()
        result = self._compile(key, can_retry=True)
        return result._replace(duration_ns=time.monotonic_ns() - began_ns)

    def _run(self) -> None:
        while (key := self._wanted.get()) is not None and not self._is_closing:
            try:
                self._not_begun.remove(key)  # in one go: the other thread changes the set too
            except KeyError:
                continue  # withdrawn
            try:
                result = self.compile(key)
            except Exception as error:  # it must not leave its request waiting for ever
                logger.exception("compiling a grammar failed")
                result = Compiled(key, GrammarOutcome.UNAVAILABLE, error=repr(error))
            self._done.put(result)
            self._has_result.set()
        self._drop_process()

    def _compile(self, key: GrammarKey, *, can_retry: bool) -> Compiled:
        try:
            process = self._ready_process()
        except (EOFError, TimeoutError, OSError, RuntimeError, ImportError) as error:
            text = f"structured outputs are not available: {error or 'no answer in time'}"
            return Compiled(key, GrammarOutcome.UNAVAILABLE, error=text)
        if self._is_closing:
            return Compiled(key, GrammarOutcome.UNAVAILABLE, error="the engine is shutting down")
        try:
            verdict = process.ask(key, self._timeout_s)
        except TimeoutError:
            self._drop_process()
            text = f"compiling it took longer than {self._timeout_s:g} s; make it simpler"
            return Compiled(key, GrammarOutcome.TIMED_OUT, error=text)
        except EOFError:
            self._drop_process()
            if can_retry and not self._is_closing:  # it may have been killed for another's sake
                return self._compile(key, can_retry=False)
            text = "the grammar compiler crashed on it twice, or ran out of memory; make it simpler"
            return Compiled(key, GrammarOutcome.CRASHED, error=text)
        if verdict.failure:
            return Compiled(key, GrammarOutcome.INVALID, error=verdict.failure)
        kind, text, is_compact = key
        grammar = compile_constraint(self._compiler, kind, text, disable_any_whitespace=is_compact)
        return Compiled(key, GrammarOutcome.COMPILED, grammar, num_bytes=verdict.num_bytes)

    def _ready_process(self) -> VettingProcess:
        """The other process, started if need be, and a compiler here.

        Raises:
            RuntimeError: it cannot do its work, and says why.
        """
        if self._process is None:
            self._process = VettingProcess(self._process_kwargs)
            failure = self._process.vocabulary.failure
            if failure:
                self._drop_process()
                raise RuntimeError(failure)
        if self._compiler is None:
            import xgrammar

            info = xgrammar.TokenizerInfo.deserialize_json(self._process.vocabulary.info)
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        return self._process

    def _drop_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
