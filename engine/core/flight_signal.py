"""SIGUSR2: a flight record, whichever thread of the process the signal comes to.

Knows the signal and the thread that answers it. Does not know what a flight record holds.
"""

import os
import signal
import threading
import time
from typing import NoReturn

from instrumentation import FlightReason, Instrument

_INTERVAL_S = 1.0
"""Least time between two flight records that a signal asks for."""

_CHUNK_BYTES = 4096


def dump_at_signal(obs: Instrument) -> None:
    """Write a flight record at each SIGUSR2 from now on; call it in the main thread.

    A Python handler would have to wait for the main thread, which may be stuck in a call that never
    returns: that is when somebody asks. So the interpreter's own handler, which runs at once in
    whatever thread the system chooses, wakes a thread of ours by a pipe. Unlike a mask, it also
    holds for threads that began earlier, or that unblock what they please.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)  # full means that enough is asked for
    signal.signal(signal.SIGUSR2, lambda number, frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(
        target=_dump_when_woken, args=(obs, read_end), name="flight signal", daemon=True
    ).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})


def _dump_when_woken(obs: Instrument, read_end: int) -> NoReturn:
    while True:
        if signal.SIGUSR2 not in os.read(read_end, _CHUNK_BYTES):
            continue  # another signal that has a handler
        obs.dump_flight(FlightReason.SIGNAL, "asked for")
        time.sleep(_INTERVAL_S)  # signals that come meanwhile are one
