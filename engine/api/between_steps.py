"""Calls from other threads that are made between two steps of the thread that generates.

Knows which thread has the engine. Does not know what is called.
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

    Whoever has the engine for long calls `run_pending` now and then; whoever finds it free makes
    the call itself.
    """

    def __init__(self) -> None:
        # A signal's handler may come between the lock and `_holder`: it must not wait for itself.
        self._lock = threading.RLock()
        self._pending: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._holder: int | None = None

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Take the engine for the length of a generation.

        Raises:
            IsinglassError: this thread has it already, see `call`.
        """
        self._refuse_holder()
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Call a function while no step is being taken; returns or raises what it does.

        Raises:
            IsinglassError: this thread is in the middle of a generation or of another call (so this
                one comes from a signal's handler), or the thread that was to make the call was
                interrupted.
        """
        self._refuse_holder()
        future: Future[ResultT] = Future()
        try:
            self._pending.append((future, function))
            while not future.done():
                if self._lock.acquire(timeout=_RETRY_S):
                    try:
                        self._holder = threading.get_ident()
                        self.run_pending()
                    finally:
                        self._holder = None
                        self._lock.release()
        except BaseException:
            future.cancel()  # who was interrupted does not expect it to be made later
            raise
        return future.result()

    def run_pending(self) -> None:
        """Make the calls that others wait for; for the thread that has the engine only."""
        while self._pending:
            future, function = self._pending.popleft()
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            except BaseException:
                # Ctrl-C is for this thread, and not for the one that waits.
                future.set_exception(
                    IsinglassError("the thread that was to make this call was interrupted")
                )
                raise

    def _refuse_holder(self) -> None:
        if self._holder == threading.get_ident():
            raise IsinglassError(
                "this thread is in the middle of a call of the engine: its signal handlers cannot "
                "call the engine. Call from another thread."
            )
