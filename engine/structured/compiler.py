"""Compiles constraints beside the steps: `ConstraintCompiler`.

One thread compiles what caps bound, with the library's lock on Python let go; another waits for the
process in which the rest is tried out first, one at a time. Knows constraints; knows no request.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from engine.log import get_logger
from engine.structured.constraint import (
    ConstraintError,
    ConstraintKey,
    compiled,
    grammar_text,
    is_unbounded,
    num_bytes_of,
)
from engine.structured.forms.lark import LarkError
from engine.structured.trial import Trial
from engine.structured.trial_child import STACK_BYTES
from engine.structured.vocabulary import Vocabulary, tokenizer_of
from instrumentation import GrammarOutcome

logger = get_logger(__name__)

_CLOSE_TIMEOUT_S: Final = 1.0
_UNAVAILABLE: Final = "structured outputs are not available"


class Compiled(NamedTuple):
    """What became of one constraint."""

    key: ConstraintKey
    outcome: GrammarOutcome
    grammar: Any = None
    """A matcher at its beginning, to be copied, if it was compiled."""
    error: str = ""
    """Why not, otherwise."""
    num_bytes: int = 0
    duration_ns: int = 0
    """Until it was compiled or given up, waiting for others not included."""


class ConstraintCompiler:
    """Two threads with a queue each, and a queue of results.

    They start with the first constraint, or when told to, and stay.

    Args:
        load: the model's vocabulary and what encodes text by it; called in the first thread.
        timeout_s: processor time that trying out one constraint may take.
    """

    def __init__(
        self,
        load: Callable[[], tuple[Vocabulary, Callable[[str], list[int]]]],
        *,
        timeout_s: float,
    ) -> None:
        self._load = load
        self._timeout_s = timeout_s
        self._wanted: set[ConstraintKey] = set()
        self._to_compile: queue.SimpleQueue[tuple[ConstraintKey, str, int] | None] = (
            queue.SimpleQueue()
        )
        self._to_try: queue.SimpleQueue[ConstraintKey | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self._has_result = threading.Event()
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        self._tokenizer: Any = None
        self._trial: Trial | None = None
        self._at_trial: ConstraintKey | None = None

    @property
    def process_id(self) -> int | None:
        """Of the process in which constraints are tried out; None while there is none."""
        trial = self._trial
        return None if trial is None else trial.process_id

    def warm_up(self) -> None:
        """Load the vocabulary and start the process before a constraint comes."""
        self._start()

    def submit(self, key: ConstraintKey) -> None:
        """Ask for a constraint; `take` will have the result."""
        self._wanted.add(key)
        self._start()
        self._to_compile.put((key, "", 0))

    def withdraw(self, key: ConstraintKey) -> None:
        """Nobody wants the constraint any more: trying it out ends, and it may have no result."""
        self._wanted.discard(key)
        trial = self._trial
        if trial is not None and self._at_trial == key:
            trial.interrupt()

    def take(self) -> list[Compiled]:
        """Results that have come since the last call."""
        self._has_result.clear()
        results = []
        while not self._done.empty():
            results.append(self._done.get_nowait())
        self._wanted.difference_update(result.key for result in results)
        return results

    def wait(self, timeout_s: float) -> None:
        """Wait for a result, but not for longer than that."""
        self._has_result.wait(timeout_s)

    def close(self) -> None:
        """Give up what is being compiled and end the other process."""
        if self._is_closing:
            return
        self._is_closing = True
        self._to_compile.put(None)
        self._to_try.put(None)
        if (trial := self._trial) is not None:
            trial.interrupt()
        for thread in self._threads:  # a compilation in the library is not waited for
            thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _start(self) -> None:
        if self._threads or self._is_closing:
            return
        # What the process has been able to compile must not overflow this one's stack.
        before = threading.stack_size(2 * STACK_BYTES)
        try:
            self._threads.append(threading.Thread(target=self._run, name="grammars", daemon=True))
            self._threads[0].start()
        finally:
            threading.stack_size(before)

    # -- the thread that compiles ------------------------------------------------------------------

    def _run(self) -> None:
        error = ""
        try:
            vocabulary, encode = self._load()
            self._tokenizer = tokenizer_of(vocabulary, encode)
            self._trial = Trial(vocabulary, timeout_s=self._timeout_s)
            waiter = threading.Thread(target=self._run_trials, name="grammar trials", daemon=True)
            self._threads.append(waiter)
            waiter.start()
        except Exception as failure:  # nobody may wait for ever
            logger.exception("compiling grammars failed")
            error = f"{_UNAVAILABLE}: {failure!r}"
        while (item := self._to_compile.get()) is not None and not self._is_closing:
            key, text, before_ns = item
            if key not in self._wanted:
                continue
            if error:
                self._finish(Compiled(key, GrammarOutcome.UNAVAILABLE, error=error))
            elif not text and is_unbounded(key):
                self._to_try.put(key)
            else:
                self._finish(self._compiled(key, text, before_ns))

    def _compiled(self, key: ConstraintKey, text: str, before_ns: int) -> Compiled:
        began_ns = time.monotonic_ns() - before_ns
        grammar, error, outcome = None, "", GrammarOutcome.COMPILED
        try:
            text = text or grammar_text(key)
            grammar = compiled(self._tokenizer, key, text)
        except (ConstraintError, LarkError) as failure:
            error, outcome = str(failure), GrammarOutcome.INVALID
        except Exception as failure:
            logger.exception("compiling a grammar failed")
            error, outcome = f"{_UNAVAILABLE}: {failure!r}", GrammarOutcome.UNAVAILABLE
        duration_ns = time.monotonic_ns() - began_ns
        return Compiled(key, outcome, grammar, error, num_bytes_of(text), duration_ns)

    # -- the thread that waits for trials ----------------------------------------------------------

    def _run_trials(self) -> None:
        trial = self._trial
        assert trial is not None
        with contextlib.suppress(OSError):  # told with the first constraint
            trial.start()
        while (key := self._to_try.get()) is not None and not self._is_closing:
            self._at_trial = key
            if key in self._wanted:
                self._try(trial, key)
            self._at_trial = None
        trial.close()

    def _try(self, trial: Trial, key: ConstraintKey) -> None:
        began_ns = time.monotonic_ns()
        try:
            result = trial.run(key, lambda: key in self._wanted and not self._is_closing)
        except OSError as failure:
            self._finish(
                Compiled(key, GrammarOutcome.UNAVAILABLE, error=f"{_UNAVAILABLE}: {failure}")
            )
            return
        duration_ns = time.monotonic_ns() - began_ns
        if result.outcome is GrammarOutcome.COMPILED:
            self._to_compile.put((key, result.text, duration_ns))
        elif result.outcome is not GrammarOutcome.WITHDRAWN:  # who wants it again has asked again
            self._finish(Compiled(key, result.outcome, error=result.error, duration_ns=duration_ns))

    def _finish(self, result: Compiled) -> None:
        self._done.put(result)
        self._has_result.set()
