"""Reading a run: all journals of its folder, sorted by process, thread and kind of record.

Knows how journals make up a run. Does not know any view of it. Also reads runs that were killed:
journals may be cut off, and any of them may be missing.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

from instrumentation.names import Phase
from instrumentation.record.flight import is_flight_file
from instrumentation.record.journal import SUFFIX, Journal, read_journal
from instrumentation.record.records import (
    ClockAnchor,
    Drops,
    EventRecord,
    ProcessHeader,
    Record,
    Spans,
    StartupRecord,
    ThreadStarted,
)
from instrumentation.record.request_records import RequestArrived, RequestTimeline
from instrumentation.record.step_records import StepRecord, WorkerStepRecord

RecordT = TypeVar("RecordT")
_PART = re.compile(r"\.part(\d+)$")
"""How the name of a file ends, without suffix, that is one of a chain: a recording in ring mode."""


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
    is_damaged: bool = False
    """Whether what is missing at its end is more than a record cut off by the process's death."""

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
    unreadable: list[str] = field(default_factory=list)
    """Why each journal that had to be left out could not be read."""

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

    Flight records in the folder are left out too, since they repeat what the journals hold. Given a
    file instead, such as a flight record, it reads only that. The files of one recording in ring
    mode count as one journal.

    Raises:
        ValueError: there is no readable journal.
    """
    path = Path(folder)
    if path.is_file():
        process = _sort_out([read_journal(path)])
        if process is None:
            raise ValueError(f"{path} is cut off before it says who wrote it")
        return Run(path, [process])
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a folder; name the trace_dir of a run, or a flight record's file"
        )
    files = [file for file in sorted(path.glob(f"*{SUFFIX}")) if not is_flight_file(file)]
    unreadable: list[str] = []
    chains = [_read_chain(list(chain), unreadable) for _, chain in groupby(files, key=_chain_of)]
    processes = [process for process in map(_sort_out, chains) if process is not None]
    if not processes and unreadable:
        raise ValueError("; ".join(unreadable))
    if not processes:
        raise ValueError(
            f"{path} holds no readable journal (*{SUFFIX}); name the trace_dir of a run that was "
            "started with tracing on"
        )
    return Run(path, processes, unreadable)


def _chain_of(file: Path) -> str:
    """What the files of one recording have in common."""
    return _PART.sub(".part", file.name.removesuffix(SUFFIX))


def _read_chain(files: list[Path], unreadable: list[str]) -> list[Journal]:
    """Read files in order; those that the engine, which may be running, deletes meanwhile are not
    there. Why others cannot be read is added to the list."""
    journals = []
    for file in files:
        try:
            journals.append(read_journal(file))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            unreadable.append(str(error))
    return journals


def _sort_out(journals: list[Journal]) -> ProcessRecords | None:
    """Make one process of the files of one recording, oldest first."""
    frames = [frame for journal in journals for frame in journal.frames]
    headers = [record for _, record in frames if isinstance(record, ProcessHeader)]
    if not headers:
        return None
    threads: dict[int, ThreadRecords] = {}
    anchors = []
    arrived: set[int] = set()
    for number, record in frames:
        if isinstance(record, ThreadStarted):
            # Each file of a chain names the threads again.
            threads.setdefault(number, ThreadRecords(record.name, record.native_id, []))
        elif isinstance(record, ClockAnchor):
            anchors.append(record)
        elif isinstance(record, RequestArrived):
            # ... and the requests that were under way.
            if record.request_num not in arrived:
                arrived.add(record.request_num)
                threads[number].records.append(record)
        elif not isinstance(record, ProcessHeader):
            threads[number].records.append(record)
    return ProcessRecords(
        journals[0].path,
        headers[0],
        anchors,
        list(threads.values()),
        any(journal.is_truncated for journal in journals),
        any(journal.is_damaged for journal in journals),
    )
