"""The drain thread: takes entries out of the rings and hands them to the sinks.

Knows the rings, the sinks and the fence around a failing sink. Does not know what records mean. It
alone may be slow: a stuck sink fills the rings, which then drop and count.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any

from instrumentation.records import Drops, Record, Spans, ThreadStarted
from instrumentation.ring import Ring
from instrumentation.sinks import Sink

_LOGGER = logging.getLogger("isinglass.telemetry")
_INTERVAL_S = 0.1


class Drain:
    """Owns the sinks of a process and the thread that feeds them.

    A sink that raises is logged once and detached; what it does not get from then on is counted.
    """

    def __init__(self, sinks: Sequence[Sink], *, interval_s: float = _INTERVAL_S) -> None:
        self._sinks = list(sinks)
        self._num_sinks_lost = 0
        self._interval_s = interval_s
        self._rings: list[Ring] = []
        self._num_drops_told: list[int] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.num_sink_drops = 0
        self._thread = threading.Thread(target=self._run, name="telemetry drain", daemon=True)
        self._thread.start()

    def add_ring(self, ring: Ring) -> None:
        """Take a thread's ring in."""
        # Not under the drain's lock, which a stuck sink may hold: the list only ever grows.
        self._rings.append(ring)

    def flush(self, timeout_s: float) -> bool:
        """Hand over what is in the rings now; False if the sinks are too slow for that."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            self._drain()
        finally:
            self._lock.release()
        return True

    def close(self, timeout_s: float) -> None:
        """Flush, stop the thread and close the sinks; what is stuck is left behind."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout_s)
        if not self._lock.acquire(timeout=timeout_s):
            _LOGGER.error("telemetry sinks are stuck; the rest of this run is not recorded")
            return
        try:
            self._drain()
            for sink in list(self._sinks):
                self._call(sink, "close", 0)
            self._sinks.clear()
        finally:
            self._lock.release()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            with self._lock:
                self._drain()

    def _drain(self) -> None:
        for thread, ring in enumerate(self._rings):
            if thread == len(self._num_drops_told):
                self._num_drops_told.append(0)
                for sink in list(self._sinks):
                    self._call(sink, "thread", 0, thread, ThreadStarted(ring.name, ring.native_id))
            records = _to_records(ring.take())
            if ring.num_dropped != self._num_drops_told[thread]:
                self._num_drops_told[thread] = ring.num_dropped
                records.append(Drops(ring.num_dropped))
            if records:
                self.num_sink_drops += self._num_sinks_lost * len(records)
                for sink in list(self._sinks):
                    self._call(sink, "write", len(records), thread, records)
        for sink in list(self._sinks):
            self._call(sink, "flush", 0)

    def _call(self, sink: Sink, method: str, num_records: int, *arguments: Any) -> None:
        """Call a sink behind the fence."""
        try:
            getattr(sink, method)(*arguments)
        except Exception as error:
            self._sinks.remove(sink)
            self._num_sinks_lost += 1
            self.num_sink_drops += num_records
            _LOGGER.error(
                "%s failed in %s and is detached; what it misses is counted as dropped: %r",
                type(sink).__name__,
                method,
                error,
            )


def _to_records(entries: list[Any]) -> list[Record]:
    """Gather runs of bare (phase, begin_ns, end_ns) into one record each."""
    records: list[Record] = []
    phases: list[int] = []
    for entry in entries:
        if type(entry) is tuple:
            phases.extend(entry)
            continue
        if phases:
            records.append(Spans(tuple(phases)))
            phases = []
        records.append(entry)
    if phases:
        records.append(Spans(tuple(phases)))
    return records
