"""The drain thread: takes entries out of the rings and hands them to the sinks.

Knows the rings, the sinks and the fence around a failing sink. Does not know what records mean. It
alone may be slow: a stuck sink fills the rings, which then drop and count.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from instrumentation.names import SinkName
from instrumentation.record.faults import TelemetryErrors
from instrumentation.record.records import Drops, EventRecord, Record, Spans, ThreadStarted
from instrumentation.record.ring import Ring
from instrumentation.record.sinks import Sink
from instrumentation.record.throttle import Throttle

_LOGGER = logging.getLogger("isinglass.telemetry")
_INTERVAL_S = 0.1
_IDLE_INTERVAL_S = 0.25
_ATTACH_TIMEOUT_S = 1.0
_MAX_ANNOUNCEMENTS = 256


class _Attached:
    """A sink, and how many threads it has been told of."""

    __slots__ = ("error", "name", "num_threads_told", "sink")

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.name = sink.name
        self.num_threads_told = 0
        self.error: Exception | None = None


class Drain:
    """Owns the sinks of a process and the thread that feeds them, which starts with the first need.

    A sink that raises is logged once and detached; what it does not get from then on is counted.

    Attributes:
        errors: failures by sink.
        drops: records that a sink did not get because it had failed, by sink; replaced by another
            dictionary at each change, so that any thread may walk through it.
        processor_ns: processor time of the drain thread so far.
        on_change: called when sinks have come or gone; see `is_wanted`.
    """

    def __init__(self, sinks: Sequence[Sink] = (), *, interval_s: float = _INTERVAL_S) -> None:
        self.errors = TelemetryErrors()
        self.drops: dict[SinkName, int] = {}
        self.processor_ns = 0
        self.throttle: Throttle | None = None
        self.on_change: Callable[[], None] = _nothing
        self.detached_error: Exception | None = None
        self._sinks: list[_Attached] = []
        self._lost: list[_Attached] = []
        self._watches: list[Callable[[], None]] = []
        self._announcements: deque[EventRecord] = deque(maxlen=_MAX_ANNOUNCEMENTS)
        self._interval_s = interval_s
        self._rings: list[Ring] = []
        self._num_drops_told: list[int] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        for sink in sinks:
            self.attach(sink)

    @property
    def num_ring_drops(self) -> int:
        """Entries that all threads together had no room for."""
        return sum([ring.num_dropped for ring in self._rings])

    @property
    def num_drops(self) -> int:
        """Those, and the records that sinks did not get."""
        return self.num_ring_drops + sum(self.drops.values())

    @property
    def is_closed(self) -> bool:
        """Whether it takes nothing any more."""
        return self._stop.is_set()

    @property
    def is_wanted(self) -> bool:
        """Whether rings should take entries: there is a sink, or one was lost and is missed."""
        return bool(self._sinks or self._lost)

    def add_ring(self, ring: Ring) -> None:
        """Take a thread's ring in."""
        # Not under the drain's lock, which a stuck sink may hold: the list only ever grows.
        self._rings.append(ring)

    def attach(self, sink: Sink) -> None:
        """Feed a sink from now on; any thread may call."""
        # What was left while the sink before was let go is not for this one.
        if not self.is_wanted and self._lock.acquire(timeout=_ATTACH_TIMEOUT_S):
            try:
                for ring in self._rings:
                    ring.take()
            finally:
                self._lock.release()
        self._sinks.append(_Attached(sink))
        self.on_change()
        self._ensure_thread()

    def detach(self, sink: Sink, timeout_s: float) -> bool:
        """Flush a sink, close it and let it go; False if it was not attached or sinks are stuck.

        A lost one is no longer missed either. `detached_error` is what it had raised, if anything.
        """
        known = [one for one in (*self._sinks, *self._lost) if one.sink is sink]
        found = [one for one in self._sinks if one.sink is sink]
        is_free = bool(found) and self._lock.acquire(timeout=timeout_s)
        if is_free:
            try:
                self._drain()
                if found[0] in self._sinks:
                    self._call(found[0], "close", 0)
            finally:
                self._lock.release()
        for one in found:
            self._remove(one)
        for one in [one for one in self._lost if one.sink is sink]:
            self._lost.remove(one)
        self.detached_error = next((one.error for one in known if one.error is not None), None)
        self.on_change()
        return is_free

    def watch(self, look: Callable[[], None]) -> None:
        """Call a function every so often, on the drain thread; its errors are the recorder's."""
        self._watches.append(look)
        self._ensure_thread()

    def announce(self, event: EventRecord) -> None:
        """Hand an event of telemetry's own to the sinks, from any thread."""
        if self.is_wanted:
            self._announcements.append(event)

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
        deadline = time.monotonic() + timeout_s
        with self._start_lock:
            self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            _LOGGER.error("telemetry sinks are stuck; the rest of this run is not recorded")
            return
        try:
            self._drain()
            for attached in list(self._sinks):
                self._call(attached, "close", 0)
            self._sinks.clear()
        finally:
            self._lock.release()
        self.on_change()

    def _ensure_thread(self) -> None:
        with self._start_lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="telemetry drain", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s if self._sinks else self._idle_interval_s):
            with self._lock:
                self._drain()
            for look in self._watches:
                try:
                    look()
                except Exception as error:
                    self.errors.count(
                        SinkName.FLIGHT_RECORDER, "the watch for slow steps failed: %r", error
                    )
            self.processor_ns = time.thread_time_ns()
            if self.throttle is not None:
                self.throttle.observe(time.monotonic_ns(), self.processor_ns)

    @property
    def _idle_interval_s(self) -> float:
        return max(self._interval_s, _IDLE_INTERVAL_S)

    def _drain(self) -> None:
        for thread, ring in enumerate(self._rings):
            if thread == len(self._num_drops_told):
                self._num_drops_told.append(0)
            for attached in list(self._sinks):
                if thread == attached.num_threads_told:
                    attached.num_threads_told += 1
                    started = ThreadStarted(ring.name, ring.native_id)
                    self._call(attached, "thread", 0, thread, started)
            records = _to_records(ring.take())
            if not thread:
                records += self._take_announcements()
            if ring.num_dropped != self._num_drops_told[thread]:
                self._num_drops_told[thread] = ring.num_dropped
                records.append(Drops(ring.num_dropped))
            if records:
                for lost in self._lost:
                    self._count_drops(lost.name, len(records))
                for attached in list(self._sinks):
                    self._call(attached, "write", len(records), thread, records)
        for attached in list(self._sinks):
            if getattr(attached.sink, "is_ended", False):
                self._remove(attached)
            else:
                self._call(attached, "flush", 0)

    def _take_announcements(self) -> list[EventRecord]:
        return [self._announcements.popleft() for _ in range(len(self._announcements))]

    def _call(self, attached: _Attached, method: str, num_records: int, *arguments: Any) -> None:
        """Call a sink behind the fence."""
        try:
            getattr(attached.sink, method)(*arguments)
        except Exception as error:
            attached.error = error
            if attached in self._sinks:  # else it was let go while it was stuck
                self._lost.append(attached)
            self._remove(attached)
            self._count_drops(attached.name, num_records)
            self.errors.count(
                attached.name,
                "%s failed in %s and is detached; what it misses is counted as dropped: %r",
                type(attached.sink).__name__,
                method,
                error,
            )

    def _remove(self, attached: _Attached) -> None:
        if attached in self._sinks:
            self._sinks.remove(attached)
        self.on_change()

    def _count_drops(self, name: SinkName, num_records: int) -> None:
        if num_records:
            self.drops = self.drops | {name: self.drops.get(name, 0) + num_records}


def _nothing() -> None:
    """Stand in for a listener where there is none."""


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
