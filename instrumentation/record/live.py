"""The live instrument: spans that take the time, and records that close their group.

Knows the step's path, where each nanosecond counts: no string, dict, lock or system call but the
clock. Does not know where records go: it leaves them in its thread's ring.

Phases of the core loop and of the worker gather in a group, which the step record takes along; so
they reach the metrics too. Other phases go into the ring one by one, and add up on the span.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from instrumentation.labels import StepLabel, format_step_label
from instrumentation.names import (
    PHASES,
    RING,
    Event,
    FlightReason,
    Phase,
    Role,
    SinkName,
    StartupPhase,
    ThreadName,
)
from instrumentation.record.drain import Drain
from instrumentation.record.flight import FlightRecorder
from instrumentation.record.instrument import Instrument, Span
from instrumentation.record.process_instruments import JournalFactory, ProcessInstruments
from instrumentation.record.ranges import Ranges
from instrumentation.record.records import EventRecord, Spans, StartupRecord
from instrumentation.record.request_records import RequestArrived, RequestTimeline
from instrumentation.record.ring import Ring
from instrumentation.record.spans import FencedRanges, GroupedSpan, LooseSpan, RangedSpan
from instrumentation.record.step_records import StepRecord, WorkerStepRecord

RING_CAPACITY = 8192
_CLOSE_TIMEOUT_S = 5.0
_STEP_THREADS = (ThreadName.CORE_LOOP, ThreadName.WORKER)

LEVEL_WITHOUT_LOOSE_SPANS = 1
LEVEL_WITHOUT_PHASES = 2
"""Levels of the throttle, from which on the journal lacks what the name says."""


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
        recorder: FlightRecorder | None = None,
        make_journal: JournalFactory | None = None,
        process: "ProcessInstruments[LiveInstrument] | None" = None,
    ) -> None:
        self._is_main = process is None
        self._process: ProcessInstruments[LiveInstrument] = process or ProcessInstruments(
            drain, clock, recorder=recorder, make_journal=make_journal
        )
        self._capacity = capacity
        self._ring = Ring(capacity, name=thread_name, native_id=threading.get_native_id())
        recorder = self._process.recorder
        # Bound once, since each is on the path of a step.
        self._keep_step: Callable[[StepRecord], None] = _discard
        self._keep_worker_step: Callable[[WorkerStepRecord], None] = _discard
        self._keep_event: Callable[[EventRecord], None] = _discard
        self._keep_arrival: Callable[[RequestArrived], None] = _discard
        if recorder is not None:
            self._keep_step = recorder.steps.append
            self._keep_worker_step = recorder.worker_steps.append
            self._keep_event = recorder.events.append
            self._keep_arrival = recorder.arrivals.append
        self._append: Callable[[Any], None] = _discard
        self._has_phases = True
        self._core_group: list[int] = []
        self._worker_group: list[int] = []
        self._loose_spans: list[LooseSpan] = []
        self._spans = {phase: self._build_span(phase, thread_name) for phase in Phase}
        self._ranges: FencedRanges | None = None
        self._step_is_open = False
        self.set_ranges(self._process.ranges)
        with self._process.lock:
            self._process.instruments.append(self)
            if self._process.drain is not None:
                self._process.drain.add_ring(self._ring)
            self.rewire()

    def _build_span(self, phase: Phase, thread_name: str) -> Span:
        clock = self._process.clock
        info = PHASES[phase]
        if info.thread in _STEP_THREADS:
            is_core = info.thread is ThreadName.CORE_LOOP
            group = self._core_group if is_core else self._worker_group
            return GroupedSpan(phase, group, clock=clock, overflow=self._move_out)
        span = LooseSpan(phase, self._append, clock=clock)
        self._loose_spans.append(span)
        if info.role is Role.CORE and info.thread == thread_name:
            self._process.io_spans.append(span)
        return span

    def rewire(self) -> None:
        """Leave entries in the ring if somebody takes them; see `ProcessInstruments.rewire`."""
        process = self._process
        is_wanted = process.drain is not None and process.drain.is_wanted
        self._append = self._ring.append if is_wanted else _discard
        self._has_phases = process.level < LEVEL_WITHOUT_PHASES
        has_loose = process.level < LEVEL_WITHOUT_LOOSE_SPANS
        for span in self._loose_spans:
            span.append = self._append if has_loose else _discard

    def _move_out(self, group: list[int]) -> None:
        """Empty a group that no step record has taken, so that it cannot grow for ever."""
        self._append(Spans(tuple(group)))
        group.clear()

    @property
    def process(self) -> "ProcessInstruments[LiveInstrument]":
        """What it shares with the process's other instruments."""
        return self._process

    @property
    def enabled(self) -> bool:
        """Always, for this class."""
        return True

    def set_ranges(self, ranges: Ranges | None) -> None:
        """Put the thread's spans into ranges, or take them out again."""
        fenced = None if ranges is None else FencedRanges(ranges, self._process.errors)
        for phase, span in self._spans.items():
            if fenced is not None:
                span = RangedSpan(span, fenced, fenced.prepare(phase.label))
            setattr(self, phase.label, span)
        self._ranges = fenced
        self._tool_ranges = ranges

    @property
    def ranges(self) -> Ranges | None:
        """What `set_ranges` was given last, else what the process's threads begin with."""
        return self._tool_ranges

    def step_begin(self, label: StepLabel) -> None:
        """Open the step's range, where there is a tool to see it."""
        if self._ranges is not None:
            self._ranges.push(self._ranges.prepare(format_step_label(label)))
            self._step_is_open = True

    def step(self, record: StepRecord) -> None:
        """Give the record the core loop's phases, and leave it in the ring."""
        group = self._core_group
        if self._has_phases:
            record.phases = tuple(group)
        group.clear()
        process = self._process
        drain = process.drain
        record.telemetry_errors = process.errors.flat
        if drain is not None:
            record.num_telemetry_drops = drain.num_drops
            if drain.drops:
                record.telemetry_drops = tuple(n for pair in drain.drops.items() for n in pair)
            record.telemetry_ns = drain.processor_ns
        if process.io_spans:
            record.io_phase_totals_ns = tuple(
                [number for span in process.io_spans for number in (span.phase, span.total_ns)]
            )
        self._keep_step(record)
        self._append(record)

    def worker_step(self, record: WorkerStepRecord) -> None:
        """Give the record the worker's phases, and leave it in the ring."""
        group = self._worker_group
        if self._has_phases:
            record.phases = tuple(group)
        group.clear()
        self._keep_worker_step(record)
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
        record = RequestArrived(request_num, request_id, arrival_ns, num_prompt_tokens, traceparent)
        self._keep_arrival(record)
        self._append(record)

    def event(self, kind: Event, request_id: str = "", *, value: int = 0, detail: str = "") -> None:
        """Leave the event in the ring."""
        record = EventRecord(kind, self._process.clock(), request_id, value, detail)
        self._keep_event(record)
        self._append(record)

    def startup(self, phase: StartupPhase, begin_ns: int, end_ns: int) -> None:
        """Leave the phase of start-up in the ring."""
        self._append(StartupRecord(phase, begin_ns, end_ns))

    def for_thread(self, name: str) -> Instrument:
        """Give the calling thread its own ring and track."""
        return LiveInstrument(name, capacity=self._capacity, process=self._process)

    @property
    def is_recording(self) -> bool:
        """Whether a journal is being written."""
        journal = self._process.journal
        return journal is not None and not journal.is_ended

    def start_recording(self, run_dir: str) -> bool:
        """Begin a journal in that folder; False if one is being written, or nothing can be.

        Raises:
            OSError: the folder cannot be written to.
        """
        process = self._process
        if process.drain is None or process.drain.is_closed or process.make_journal is None:
            return False
        with process.lock:
            if self.is_recording:
                return False
            journal = process.make_journal(run_dir)
            process.journal = journal
        if process.recorder is not None:
            process.recorder.run_dir = run_dir
        process.drain.attach(journal)
        return True

    def stop_recording(self) -> bool:
        """End the journal; False if none is being written."""
        process = self._process
        with process.lock:
            journal, process.journal = process.journal, None
        process.early_end = ""
        if journal is None or process.drain is None:
            return False
        if process.recorder is not None:
            process.recorder.run_dir = None
        if journal.is_ended:
            process.early_end = "it had reached trace_max_bytes"
        was_recording = process.drain.detach(journal, _CLOSE_TIMEOUT_S)
        if process.drain.detached_error is not None:
            process.early_end = f"it could not be written: {process.drain.detached_error}"
        return was_recording

    @property
    def early_end(self) -> str:
        """What the process's main instrument has found at the end."""
        return self._process.early_end

    def dump_flight(self, reason: FlightReason, detail: str = "", *, step: int = -1) -> str | None:
        """Write the last steps to a file and return its path; None where that cannot be done."""
        recorder = self._process.recorder
        if reason is FlightReason.ENGINE_DEAD and recorder is not None and not recorder.steps:
            return None  # nothing has happened that would be worth a file
        return self._process.dump_flight(reason, detail, step)

    def ask_for_flight(self, reason: FlightReason) -> None:
        """Leave a note for the drain thread."""
        self._process.flight_wanted = reason

    def request_sent(
        self, request_num: int, request_id: str, *, arrival_ns: int, num_prompt_tokens: int
    ) -> None:
        """Keep the request's name."""
        self._keep_arrival(RequestArrived(request_num, request_id, arrival_ns, num_prompt_tokens))

    def received_step(self, step: StepRecord | None, worker_step: WorkerStepRecord | None) -> None:
        """Keep the core's records."""
        if step is not None:
            self._keep_step(step)
        if worker_step is not None:
            self._keep_worker_step(worker_step)

    def telemetry_failed(self, sink: SinkName, error: BaseException) -> None:
        """Count a failure outside of the drain."""
        self._process.errors.count(sink, "%s failed: %r", sink.label, error)

    def telemetry_errors(self) -> dict[str, int]:
        """Read the totals of this process."""
        return self._process.errors.by_label()

    def telemetry_drops(self) -> dict[str, int]:
        """Read the totals of this process."""
        drain = self._process.drain
        if drain is None:
            return {}
        drops = {name.label: count for name, count in drain.drops.items()}
        return drops | {RING: drain.num_ring_drops} if drain.num_ring_drops else drops

    def telemetry_ns(self) -> int:
        """Read the drain thread's processor time, as of its last round."""
        return self._process.drain.processor_ns if self._process.drain is not None else 0

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
        return self._process.drain.num_drops if self._process.drain is not None else 0

    def flush(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> bool:
        """Bring everything recorded so far to the operating system; False on time-out.

        Phases that still wait for their step record are not among it.
        """
        drain = self._process.drain
        return drain.flush(timeout_s) if drain is not None else True

    def close(self) -> None:
        """Flush and stop the process's recording; a thread's own instrument only flushes.

        In a fork it does nothing: the files are the parent's.
        """
        if self._process.pid != os.getpid():
            return
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
        atexit.unregister(self.close)
