"""Reading a run: all journals of its folder, sorted by process, thread and kind of record.

Knows how journals make up a run. Does not know any view of it. Also reads runs that were killed:
journals may be cut off, and any of them may be missing.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from instrumentation.journal import SUFFIX, Journal, read_journal
from instrumentation.names import Phase
from instrumentation.records import (
    ClockAnchor,
    Drops,
    EventRecord,
    ProcessHeader,
    Record,
    RequestArrived,
    RequestTimeline,
    Spans,
    StartupRecord,
    StepRecord,
    ThreadStarted,
    WorkerStepRecord,
)

RecordT = TypeVar("RecordT")


class PhaseSpan(NamedTuple):
    """One phase that was run through."""

    phase: Phase
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class ThreadRecords:
    """The records of one thread, in the order of writing."""

    name: str
    native_id: int
    records: list[Record]

    def of_type(self, record_type: type[RecordT]) -> list[RecordT]:
        """The records of one kind."""
        return [record for record in self.records if isinstance(record, record_type)]

    def phase_spans(self) -> list[PhaseSpan]:
        """All phases of this thread, whether or not a step record took them along."""
        spans = []
        for record in self.records:
            if isinstance(record, StepRecord | WorkerStepRecord | Spans):
                flat = record.phases
                for number, begin_ns, end_ns in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
                    spans.append(PhaseSpan(Phase(number), begin_ns, end_ns))
        return spans


@dataclass(frozen=True, slots=True)
class ProcessRecords:
    """One journal: who wrote it and what its threads left."""

    path: Path
    header: ProcessHeader
    anchors: list[ClockAnchor]
    threads: list[ThreadRecords]
    is_truncated: bool

    def of_type(self, record_type: type[RecordT]) -> list[RecordT]:
        """The records of one kind, of all threads."""
        return [record for thread in self.threads for record in thread.of_type(record_type)]

    @property
    def num_dropped(self) -> int:
        """Entries that were lost, as far as the journal tells."""
        return sum(
            max((drops.num_dropped for drops in thread.of_type(Drops)), default=0)
            for thread in self.threads
        )


@dataclass(frozen=True, slots=True)
class Run:
    """All that a run's folder holds."""

    folder: Path
    processes: list[ProcessRecords]

    def of_type(self, record_type: type[RecordT]) -> list[RecordT]:
        """The records of one kind, of all processes."""
        return [record for process in self.processes for record in process.of_type(record_type)]

    def threads(self) -> Iterator[tuple[ProcessRecords, ThreadRecords]]:
        """Every thread, with its process."""
        for process in self.processes:
            for thread in process.threads:
                yield process, thread

    @property
    def steps(self) -> list[StepRecord]:
        """All steps of the core, in the order in which they began."""
        return sorted(self.of_type(StepRecord), key=lambda step: (step.begin_ns, step.step))

    @property
    def worker_steps(self) -> list[WorkerStepRecord]:
        """All steps of all workers, in the order in which they began."""
        return sorted(self.of_type(WorkerStepRecord), key=lambda step: (step.begin_ns, step.step))

    @property
    def steps_of_first_worker(self) -> list[WorkerStepRecord]:
        """The steps of the worker of lowest rank; workers run every step side by side."""
        ranks = [one.header.rank for one in self.processes if one.of_type(WorkerStepRecord)]
        steps = [
            step
            for process in self.processes
            if process.header.rank == min(ranks, default=0)
            for step in process.of_type(WorkerStepRecord)
        ]
        return sorted(steps, key=lambda step: (step.begin_ns, step.step))

    @property
    def timelines(self) -> list[RequestTimeline]:
        """The requests whose end was recorded, by arrival."""
        return sorted(self.of_type(RequestTimeline), key=lambda timeline: timeline.arrival_ns)

    @property
    def arrivals(self) -> list[RequestArrived]:
        """The requests that the core took in, by arrival."""
        return sorted(self.of_type(RequestArrived), key=lambda arrival: arrival.arrival_ns)

    @property
    def events(self) -> list[EventRecord]:
        """The surprises, by time."""
        return sorted(self.of_type(EventRecord), key=lambda event: event.time_ns)

    @property
    def startups(self) -> list[StartupRecord]:
        """The phases of start-up, by begin."""
        return sorted(self.of_type(StartupRecord), key=lambda startup: startup.begin_ns)


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read all journals of a run's folder, leaving out those cut off before their header.

    Raises:
        ValueError: there is no readable journal, or one is of another version.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; name the trace_dir of a run")
    journals = [read_journal(file) for file in sorted(path.glob(f"*{SUFFIX}"))]
    processes = [process for process in map(_sort_out, journals) if process is not None]
    if not processes:
        raise ValueError(
            f"{path} holds no readable journal (*{SUFFIX}); name the trace_dir of a run that was "
            "started with tracing on"
        )
    return Run(path, processes)


def _sort_out(journal: Journal) -> ProcessRecords | None:
    headers = [record for _, record in journal.frames if isinstance(record, ProcessHeader)]
    if not headers:
        return None
    threads: dict[int, ThreadRecords] = {}
    anchors = []
    for number, record in journal.frames:
        if isinstance(record, ThreadStarted):
            threads[number] = ThreadRecords(record.name, record.native_id, [])
        elif isinstance(record, ClockAnchor):
            anchors.append(record)
        elif not isinstance(record, ProcessHeader):
            threads[number].records.append(record)
    return ProcessRecords(
        journal.path, headers[0], anchors, list(threads.values()), journal.is_truncated
    )
