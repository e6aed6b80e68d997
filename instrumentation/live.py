"""The live instrument: spans that take the time, and records that close their group.

Knows the step's path, where each nanosecond counts: no string, dict, lock or system call but the
clock. Does not know where records go: it leaves them in its thread's ring.

Phases of the core loop and of the worker gather in a group, which the step record takes along; so
they reach the metrics too. Other phases go into the ring one by one, and add up on the span.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from instrumentation.api import Instrument, Span
from instrumentation.drain import Drain
from instrumentation.labels import StepLabel, format_step_label
from instrumentation.names import PHASES, Event, Phase, Role, StartupPhase, ThreadName
from instrumentation.ranges import Ranges
from instrumentation.records import (
    EventRecord,
    RequestArrived,
    RequestTimeline,
    Spans,
    StartupRecord,
    StepRecord,
    WorkerStepRecord,
)
from instrumentation.ring import Ring

RING_CAPACITY = 8192
_GROUP_LIMIT = 3 * 64
_CLOSE_TIMEOUT_S = 5.0
_STEP_THREADS = (ThreadName.CORE_LOOP, ThreadName.WORKER)


class _GroupedSpan(Span):
    """A phase of the step: its times go into the group that the step record will take."""

    __slots__ = ("_begin_ns", "_clock", "_group", "_overflow", "_phase")

    def __init__(
        self,
        phase: Phase,
        group: list[int],
        *,
        clock: Callable[[], int],
        overflow: Callable[[list[int]], None],
    ) -> None:
        self._phase = int(phase)
        self._group = group
        self._clock = clock
        self._overflow = overflow
        self._begin_ns = 0

    def __enter__(self) -> None:
        self._begin_ns = self._clock()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        group = self._group
        group += (self._phase, self._begin_ns, self._clock())
        if len(group) > _GROUP_LIMIT:
            self._overflow(group)


class _LooseSpan(Span):
    """A phase outside of steps: its times go into the ring, and their sum stays here."""

    __slots__ = ("_append", "_begin_ns", "_clock", "phase", "total_ns")

    def __init__(
        self, phase: Phase, append: Callable[[Any], None], *, clock: Callable[[], int]
    ) -> None:
        self.phase = int(phase)
        self._append = append
        self._clock = clock
        self._begin_ns = 0
        self.total_ns = 0

    def __enter__(self) -> None:
        self._begin_ns = self._clock()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end_ns = self._clock()
        self.total_ns += end_ns - self._begin_ns
        self._append((self.phase, self._begin_ns, end_ns))


class _RangedSpan(Span):
    """A phase that a tool sees too."""

    __slots__ = ("_handle", "_ranges", "_span")

    def __init__(self, span: Span, ranges: Ranges, handle: Any) -> None:
        self._span = span
        self._ranges = ranges
        self._handle = handle

    def __enter__(self) -> None:
        self._ranges.push(self._handle)
        self._span.__enter__()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._span.__exit__(error_type, error, traceback)
        self._ranges.pop()


class _Process:
    """What the instruments of a process share."""

    def __init__(self, drain: Drain | None, clock: Callable[[], int]) -> None:
        self.drain = drain
        self.clock = clock
        self.instruments: list[LiveInstrument] = []
        self.io_spans: list[_LooseSpan] = []

    @property
    def num_sink_drops(self) -> int:
        return self.drain.num_sink_drops if self.drain is not None else 0


def _discard(entry: Any) -> None:
    """Stand in for a ring where nothing is written."""


class LiveInstrument(Instrument):
    """Records spans, records and events of one thread.

    Without a drain nothing is written; step records still get their phases, for the metrics.
    """

    def __init__(
        self,
        thread_name: str,
        *,
        drain: Drain | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        capacity: int = RING_CAPACITY,
        process: _Process | None = None,
    ) -> None:
        self._process = process if process is not None else _Process(drain, clock)
        self._is_main = process is None
        self._capacity = capacity
        self._ring = Ring(capacity, name=thread_name, native_id=threading.get_native_id())
        if self._process.drain is not None:
            self._append: Callable[[Any], None] = self._ring.append
            self._process.drain.add_ring(self._ring)
        else:
            self._append = _discard
        self._core_group: list[int] = []
        self._worker_group: list[int] = []
        self._loose_spans: list[_LooseSpan] = []
        self._spans = {phase: self._build_span(phase, thread_name) for phase in Phase}
        self._ranges: Ranges | None = None
        self._step_is_open = False
        self.set_ranges(None)
        self._process.instruments.append(self)

    def _build_span(self, phase: Phase, thread_name: str) -> Span:
        clock = self._process.clock
        info = PHASES[phase]
        if info.thread in _STEP_THREADS:
            is_core = info.thread is ThreadName.CORE_LOOP
            group = self._core_group if is_core else self._worker_group
            return _GroupedSpan(phase, group, clock=clock, overflow=self._move_out)
        span = _LooseSpan(phase, self._append, clock=clock)
        self._loose_spans.append(span)
        if info.role is Role.CORE and info.thread == thread_name:
            self._process.io_spans.append(span)
        return span

    def _move_out(self, group: list[int]) -> None:
        """Empty a group that no step record has taken, so that it cannot grow for ever."""
        self._append(Spans(tuple(group)))
        group.clear()

    @property
    def enabled(self) -> bool:
        """Always, for this class."""
        return True

    def set_ranges(self, ranges: Ranges | None) -> None:
        """Put the thread's spans into ranges, or take them out again."""
        for phase, span in self._spans.items():
            if ranges is not None:
                span = _RangedSpan(span, ranges, ranges.prepare(phase.label))
            setattr(self, phase.label, span)
        self._ranges = ranges

    def step_begin(self, label: StepLabel) -> None:
        """Open the step's range, where there is a tool to see it."""
        if self._ranges is not None:
            self._ranges.push(self._ranges.prepare(format_step_label(label)))
            self._step_is_open = True

    def step(self, record: StepRecord) -> None:
        """Give the record the core loop's phases, and leave it in the ring."""
        group = self._core_group
        record.phases = tuple(group)
        group.clear()
        process = self._process
        drain = process.drain
        if drain is not None:
            record.num_telemetry_drops = self._ring.num_dropped + drain.num_sink_drops
        if process.io_spans:
            record.io_phase_totals_ns = tuple(
                [number for span in process.io_spans for number in (span.phase, span.total_ns)]
            )
        self._append(record)

    def worker_step(self, record: WorkerStepRecord) -> None:
        """Give the record the worker's phases, and leave it in the ring."""
        group = self._worker_group
        record.phases = tuple(group)
        group.clear()
        self._append(record)
        if self._step_is_open and self._ranges is not None:
            self._step_is_open = False
            self._ranges.pop()

    def request(self, timeline: RequestTimeline) -> None:
        """Leave the timeline in the ring."""
        self._append(timeline)

    def request_arrived(
        self,
        request_num: int,
        request_id: str,
        *,
        arrival_ns: int,
        num_prompt_tokens: int,
        traceparent: str | None = None,
    ) -> None:
        """Leave the request's name in the ring."""
        self._append(
            RequestArrived(request_num, request_id, arrival_ns, num_prompt_tokens, traceparent)
        )

    def event(self, kind: Event, request_id: str = "", *, value: int = 0, detail: str = "") -> None:
        """Leave the event in the ring."""
        self._append(EventRecord(kind, self._process.clock(), request_id, value, detail))

    def startup(self, phase: StartupPhase, begin_ns: int, end_ns: int) -> None:
        """Leave the phase of start-up in the ring."""
        self._append(StartupRecord(phase, begin_ns, end_ns))

    def for_thread(self, name: str) -> Instrument:
        """Give the calling thread its own ring and track."""
        return LiveInstrument(name, capacity=self._capacity, process=self._process)

    def phase_totals_ns(self) -> dict[str, int]:
        """Add up the loose spans of all threads; phases that never ran are left out."""
        totals: dict[str, int] = {}
        for instrument in list(self._process.instruments):
            for span in instrument._loose_spans:
                if span.total_ns:
                    label = Phase(span.phase).label
                    totals[label] = totals.get(label, 0) + span.total_ns
        return totals

    def num_drops(self) -> int:
        """Add up the drops of all threads and sinks."""
        rings = [instrument._ring for instrument in list(self._process.instruments)]
        return sum(ring.num_dropped for ring in rings) + self._process.num_sink_drops

    def flush(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> bool:
        """Bring everything recorded so far to the operating system; False on time-out.

        Phases that still wait for their step record are not among it.
        """
        drain = self._process.drain
        return drain.flush(timeout_s) if drain is not None else True

    def close(self) -> None:
        """Flush and stop the process's recording; a thread's own instrument only flushes."""
        for group in (self._core_group, self._worker_group):
            if group:
                self._move_out(group)
        if not self._is_main:
            self.flush()
            return
        for instrument in self._process.instruments:
            if instrument is not self:
                for group in (instrument._core_group, instrument._worker_group):
                    if group:
                        instrument._move_out(group)
        if self._process.drain is not None:
            self._process.drain.close(_CLOSE_TIMEOUT_S)
