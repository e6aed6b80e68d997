"""Calls from other threads that are made between two steps of the thread that generates.

Knows who holds the engine's lock. Does not know what is called.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

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

    def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Call a function while no step is being taken; returns or raises what it does."""
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
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise  # Ctrl-C is for this thread
