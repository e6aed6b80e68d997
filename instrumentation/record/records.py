"""The records of events and processes, and the union of all that a journal can hold.

Knows the fields, their units and every record's tag. Does not know how records travel or who reads
them. All times are integer nanoseconds of CLOCK_MONOTONIC, which the processes of one host share;
a stamp of 0 means that it never happened. Fields are only ever added at the end, with a default, so
that older journals stay readable.
"""

import msgspec

from instrumentation.names import Event, FlightReason, StartupPhase
from instrumentation.record.request_records import RequestArrived, RequestTimeline
from instrumentation.record.step_records import StepRecord, WorkerStepRecord


class EventRecord(msgspec.Struct, array_like=True, tag=5, gc=False):
    """A surprise; `names.EVENTS` says what `value` and `detail` mean."""

    kind: Event
    time_ns: int
    request_id: str = ""
    value: int = 0
    detail: str = ""


class StartupRecord(msgspec.Struct, array_like=True, tag=6, gc=False):
    """One phase of start-up."""

    phase: StartupPhase
    begin_ns: int
    end_ns: int


class Spans(msgspec.Struct, array_like=True, tag=7, gc=False):
    """Phases that belong to no step record. Flat triples: phase, begin_ns, end_ns, ..."""

    phases: tuple[int, ...]


class ThreadStarted(msgspec.Struct, array_like=True, tag=8, gc=False):
    """Names a thread; the frames of its records carry its number."""

    name: str
    native_id: int


class ClockAnchor(msgspec.Struct, array_like=True, tag=9, gc=False):
    """The host's clocks at one instant, for views that show the time of day."""

    monotonic_ns: int
    wall_ns: int
    boottime_ns: int


class ProcessHeader(msgspec.Struct, array_like=True, tag=10, gc=False, kw_only=True):
    """Who wrote a journal; its first record."""

    role: str
    rank: int
    pid: int
    host: str
    version: str
    python_version: str
    argv: tuple[str, ...]
    started_ns: int
    title: str = ""
    """What the process is called where that says more than its role, as `ApiServer_2`."""


class Drops(msgspec.Struct, array_like=True, tag=11, gc=False):
    """Entries of a thread that were lost since start-up."""

    num_dropped: int


class FlightDump(msgspec.Struct, array_like=True, tag=12, gc=False):
    """Why a flight record was written; the last record of its file."""

    reason: FlightReason
    time_ns: int
    detail: str = ""
    step: int = -1
    """The step that was the reason, -1 for none."""


Record = (
    StepRecord
    | WorkerStepRecord
    | RequestArrived
    | RequestTimeline
    | EventRecord
    | StartupRecord
    | Spans
    | ThreadStarted
    | ClockAnchor
    | ProcessHeader
    | Drops
    | FlightDump
)
"""Any record; the tag tells them apart."""
