"""The hook `gc`: an event for each garbage collection that takes long enough to matter.

Knows the interpreter's callbacks. Does not know who reads the journal.
"""

import gc
import os
import sys
import threading
import time
from types import ModuleType
from typing import Any

from instrumentation.hooks.fence import Fence
from instrumentation.hooks.recording import thread_instrument
from instrumentation.names import Event
from instrumentation.record.instrument import Instrument

VARIABLE = "ISINGLASS_HOOKS_GC_MIN_US"
_DEFAULT_MIN_US = 100
_THREAD_NAME = "garbage collector"


class CollectionWatch:
    """Called by the interpreter at the begin and the end of every collection.

    An event's value is the duration in nanoseconds; its detail names the generation, how many
    objects were collected and how many could not be. Collections never nest, and the interpreter
    lets only one thread collect at a time.

    Args:
        min_duration_ns: shorter ones are left out.
    """

    def __init__(self, *, min_duration_ns: int) -> None:
        self._min_duration_ns = min_duration_ns
        self._begin_ns = 0
        self._fence = Fence("gc")
        self._instrument: Instrument | None = None
        self._pid = 0
        self._is_opening = threading.local()

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        """Take a stamp, or leave an event."""
        if phase == "start":
            self._begin_ns = time.monotonic_ns()
            return
        duration_ns = time.monotonic_ns() - self._begin_ns
        if duration_ns >= self._min_duration_ns:
            self._fence.call(self._record, duration_ns, info)

    def _record(self, duration_ns: int, info: dict[str, Any]) -> None:
        if self._instrument is None or self._pid != os.getpid():
            # Opening the journal may itself set off a collection; and at the interpreter's end,
            # when everything is collected, no thread can be started any more to write it.
            if getattr(self._is_opening, "value", False) or _is_ending():
                return
            self._is_opening.value = True
            try:
                self._instrument = thread_instrument(_THREAD_NAME)
                self._pid = os.getpid()
            finally:
                self._is_opening.value = False
        self._instrument.event(
            Event.GARBAGE_COLLECTION,
            value=duration_ns,
            detail=f"generation {info['generation']}, {info['collected']} collected, "
            f"{info['uncollectable']} uncollectable",
        )


def _is_ending() -> bool:
    return sys.is_finalizing() or not threading.main_thread().is_alive()


def install(module: ModuleType) -> None:
    """Watch this interpreter's collections.

    Raises:
        ValueError: the environment's threshold is no number.
    """
    text = os.environ.get(VARIABLE, str(_DEFAULT_MIN_US))
    try:
        min_duration_ns = round(float(text) * 1000)
    except ValueError:
        raise ValueError(f"{VARIABLE} is {text!r}; it must be a number of microseconds") from None
    gc.callbacks.append(CollectionWatch(min_duration_ns=min_duration_ns))
