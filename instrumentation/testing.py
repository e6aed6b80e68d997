"""Test doubles: an instrument that keeps everything, and a clock that one sets.

Knows what a test wants to look at. Does not know files or threads.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from instrumentation.names import PHASES, Event, Phase, StartupPhase, ThreadName
from instrumentation.record.instrument import Instrument, Span
from instrumentation.record.records import EventRecord, StartupRecord
from instrumentation.record.request_records import RequestArrived, RequestTimeline
from instrumentation.record.step_records import StepRecord, WorkerStepRecord


@dataclass(slots=True)
class FakeClock:
    """A clock in nanoseconds that moves by `tick_ns` at each reading, and when told to."""

    now_ns: int = 1_000_000_000
    tick_ns: int = 0

    def __call__(self) -> int:
        """Read the clock, then let it tick."""
        now_ns = self.now_ns
        self.now_ns += self.tick_ns
        return now_ns

    def advance(self, duration_ns: int) -> None:
        """Let time pass."""
        assert duration_ns >= 0
        self.now_ns += duration_ns


@dataclass(slots=True)
class RecordedSpan:
    """One phase that was run through, and the error that ended it, if any."""

    phase: Phase
    begin_ns: int
    end_ns: int
    error: BaseException | None = None


@dataclass(slots=True)
class _RecordingSpan(Span):
    phase: Phase
    recorder: "Recorder"
    begin_ns: int | None = None

    def __enter__(self) -> None:
        assert self.begin_ns is None, f"phase {self.phase.label} entered while it is open"
        self.begin_ns = self.recorder.clock()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self.begin_ns is not None
        span = RecordedSpan(self.phase, self.begin_ns, self.recorder.clock(), error)
        self.recorder.spans.append(span)
        self.recorder.open_group(self.phase).append(span)
        self.begin_ns = None


@dataclass(slots=True)
class _Groups:
    core: list[RecordedSpan] = field(default_factory=list)
    worker: list[RecordedSpan] = field(default_factory=list)


class Recorder(Instrument):
    """Keeps everything in lists, and checks that no span is entered twice.

    Instruments made by `for_thread` are kept in `threads`, by name; their lists are their own.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock = clock
        self.spans: list[RecordedSpan] = []
        self.steps: list[StepRecord] = []
        self.worker_steps: list[WorkerStepRecord] = []
        self.timelines: list[RequestTimeline] = []
        self.arrivals: list[RequestArrived] = []
        self.events: list[EventRecord] = []
        self.startups: list[StartupRecord] = []
        self.threads: dict[str, Recorder] = {}
        self.is_closed = False
        self._groups = _Groups()
        for phase in Phase:
            setattr(self, phase.label, _RecordingSpan(phase, self))

    @property
    def enabled(self) -> bool:
        """Always, for this class."""
        return True

    @property
    def phases_seen(self) -> set[Phase]:
        """The phases that were run through at least once, in this thread and those made of it."""
        seen = {span.phase for span in self.spans}
        return seen.union(*(thread.phases_seen for thread in self.threads.values()))

    def open_group(self, phase: Phase) -> list[RecordedSpan]:
        """The spans since the last record of the phase's kind."""
        is_worker = PHASES[phase].thread is ThreadName.WORKER
        return self._groups.worker if is_worker else self._groups.core

    def step(self, record: StepRecord) -> None:
        """Keep the record and give it the core loop's phases, as the live instrument does."""
        core_spans = [
            span for span in self._groups.core if PHASES[span.phase].thread is ThreadName.CORE_LOOP
        ]
        record.phases = _flat(core_spans)
        self._groups.core.clear()
        self.steps.append(record)

    def worker_step(self, record: WorkerStepRecord) -> None:
        """Keep the record and give it the worker's phases."""
        record.phases = _flat(self._groups.worker)
        self._groups.worker.clear()
        self.worker_steps.append(record)

    def request(self, timeline: RequestTimeline) -> None:
        """Keep the timeline."""
        self.timelines.append(timeline)

    def request_arrived(
        self,
        request_num: int,
        request_id: str,
        *,
        arrival_ns: int,
        num_prompt_tokens: int,
        traceparent: str | None = None,
    ) -> None:
        """Keep the arrival."""
        self.arrivals.append(
            RequestArrived(request_num, request_id, arrival_ns, num_prompt_tokens, traceparent)
        )

    def event(self, kind: Event, request_id: str = "", *, value: int = 0, detail: str = "") -> None:
        """Keep the event."""
        self.events.append(EventRecord(kind, self.clock(), request_id, value, detail))

    def startup(self, phase: StartupPhase, begin_ns: int, end_ns: int) -> None:
        """Keep the phase of start-up."""
        self.startups.append(StartupRecord(phase, begin_ns, end_ns))

    def for_thread(self, name: str) -> "Recorder":
        """Make a recorder for another thread, under its name."""
        self.threads[name] = Recorder(self.clock)
        return self.threads[name]

    def close(self) -> None:
        """Remember that it was closed."""
        self.is_closed = True


def _flat(spans: list[RecordedSpan]) -> tuple[int, ...]:
    return tuple(
        number for span in spans for number in (int(span.phase), span.begin_ns, span.end_ns)
    )
