"""The journals of a process that hooks record in.

Knows that a process has at most one instrument for each role, and what a fork does to it. Does not
know what is recorded.
"""

import atexit
import os
import threading

from instrumentation.config import ObservabilityConfig
from instrumentation.hooks.folder import hooks_folder
from instrumentation.names import Role
from instrumentation.record.instrument import Instrument
from instrumentation.setup import setup

_instruments: dict[str, Instrument] = {}
_lock = threading.Lock()


def _forget_after_fork() -> None:
    """A fork has the parent's journal, but not the thread that writes it: it starts afresh."""
    global _lock
    for instrument in _instruments.values():
        atexit.unregister(instrument.close)
    _instruments.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)


def process_instrument(role: str, *, rank: int = 0) -> Instrument:
    """This process's instrument in that role, which belongs to the thread that first asks for it.

    Raises:
        ValueError: the journal cannot be written.
        OSError: the folder cannot be made.
    """
    with _lock:
        instrument = _instruments.get(role)
        if instrument is None:
            folder = str(hooks_folder())
            config = ObservabilityConfig(flight_dir=folder)
            instrument = setup(config, role=role, rank=rank, run_dir=folder)
            _instruments[role] = instrument
        return instrument


def existing_instrument(role: str) -> Instrument | None:
    """That instrument, if there is one already."""
    return _instruments.get(role)


def thread_instrument(name: str) -> Instrument:
    """An instrument for the calling thread, in whichever journal this process writes."""
    for role in (Role.CORE, Role.WORKER):
        instrument = _instruments.get(role)
        if instrument is not None:
            return instrument.for_thread(name)
    return process_instrument(Role.CALLER).for_thread(name)
