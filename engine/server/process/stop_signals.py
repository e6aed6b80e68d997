"""The signals that end a server process.

Knows which count, and which is the same as the one before. Does not know what ends.
"""

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SAME_SIGNAL_S = 0.5


class StopSignals:
    """SIGTERM, SIGINT and SIGHUP: the first asks for the end, a later one for it at once.

    One that comes right behind the first is the same: what signals a group of processes often
    signals its leader too, and a supervisor hands on what its children have got already.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.number = 0
        """The last signal that counted."""
        self._first_s = 0.0
        loop = asyncio.get_running_loop()
        for number in _NUMBERS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(number, self._take, number)

    def _take(self, number: signal.Signals) -> None:
        now_s = time.monotonic()
        if not self.first.is_set():
            self.number, self._first_s = number, now_s
            self.first.set()
        elif now_s - self._first_s > _SAME_SIGNAL_S:
            self.number = number
            self.second.set()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Until `StopSignals` takes over, each of them ends the process in order, with exit code 0.

    Only the main thread can set that; in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    before = {number: one for number, one in before.items() if one not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
