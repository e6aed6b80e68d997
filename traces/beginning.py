"""The beginning of a recording that was started amid load: it counts from its first phase.

Knows which step was under way. Does not know any view of it.

A recording begins between two steps of the core loop. Under async scheduling the next step has been
scheduled by then, beside a step that is not on record: until that one was over, nothing is known
that would explain the time. So such a step is cut at the first phase of the core loop that is on
record, the first instant from which on all is known.
"""

from dataclasses import replace

import msgspec

from instrumentation.record.records import Spans
from instrumentation.record.step_records import StepRecord
from traces.journal_reader import ProcessRecords, Run, ThreadRecords


def cut_at_beginning(run: Run) -> tuple[Run, int]:
    """The run with the core's steps cut at its beginning; and that instant, 0 where none was.

    Steps of workers stay whole: their records hold all of their phases.
    """
    begin_ns = min(
        (
            _first_known_ns(process, thread)
            for process, thread in run.threads()
            if _has_steps(thread)
        ),
        default=0,
    )
    if not any(_is_cut(step, begin_ns) for step in run.of_type(StepRecord)):
        return run, 0
    processes = [_cut_process(process, begin_ns) for process in run.processes]
    return replace(run, processes=processes), begin_ns


def _has_steps(thread: ThreadRecords) -> bool:
    return any(isinstance(record, StepRecord) for record in thread.records)


def _first_known_ns(process: ProcessRecords, thread: ThreadRecords) -> int:
    """The first phase up to the first step's record; without phases, the recording's begin."""
    begins: list[int] = []
    for record in thread.records:
        if isinstance(record, StepRecord | Spans):
            begins += record.phases[1::3]
        if isinstance(record, StepRecord):
            break
    return min(begins, default=process.header.started_ns)


def _is_cut(record: object, begin_ns: int) -> bool:
    return isinstance(record, StepRecord) and record.begin_ns < begin_ns < record.end_ns


def _cut_process(process: ProcessRecords, begin_ns: int) -> ProcessRecords:
    return replace(process, threads=[_cut_thread(one, begin_ns) for one in process.threads])


def _cut_thread(thread: ThreadRecords, begin_ns: int) -> ThreadRecords:
    return replace(
        thread,
        records=[
            msgspec.structs.replace(record, begin_ns=begin_ns)
            if _is_cut(record, begin_ns)
            else record
            for record in thread.records
        ],
    )
