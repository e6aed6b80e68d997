"""Calls from other threads that are made between two steps of the thread that generates.

Knows who holds the engine's lock. Does not know what is called.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from engine.errors import IsinglassError

_RETRY_S = 0.02

ResultT = TypeVar("ResultT")


class BetweenSteps:
    """Lets threads use an engine that one of them holds for the length of a generation.

    Whoever holds the lock for long calls `run_pending` now and then; whoever finds it free makes
    the call itself.
    """

    def __init__(self, lock: "threading.RLock") -> None:
        self._lock = lock
        self._pending: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._generating: int | None = None

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Take the engine for the length of a generation."""
        with self._lock:
            before, self._generating = self._generating, threading.get_ident()
            try:
                yield
            finally:
                self._generating = before

    def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Call a function while no step is being taken; returns or raises what it does.

        Raises:
            IsinglassError: this thread is in the middle of a generation (so the call comes from a
                signal's handler), or the thread that was to make the call was interrupted.
        """
        if self._generating == threading.get_ident():
            raise IsinglassError(
                "this thread is generating: its signal handlers cannot call the engine. Call from "
                "another thread."
            )
        future: Future[ResultT] = Future()
        self._pending.append((future, function))
        while not future.done():
            if self._lock.acquire(timeout=_RETRY_S):
                try:
                    self.run_pending()
                finally:
                    self._lock.release()
        return future.result()

    def run_pending(self) -> None:
        """Make the calls that others wait for; the lock's holder only."""
        while self._pending:
            future, function = self._pending.popleft()
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            except BaseException:
                # Ctrl-C is for this thread, and not for the one that waits.
                future.set_exception(
                    IsinglassError("the thread that was to make this call was interrupted")
                )
                raise
