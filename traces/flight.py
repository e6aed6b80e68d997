"""A flight record as a table: the last steps, what was decided in each, and why it was written.

Knows how a step's decisions are put into words. Does not know when records are written.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from instrumentation.explain.step_budget import StepBudget, step_budgets
from instrumentation.labels import format_step_label
from instrumentation.names import AdmissionStop
from instrumentation.record.flight import is_flight_file
from instrumentation.record.records import EventRecord, FlightDump
from instrumentation.record.step_records import StepRecord, WorkerStepRecord
from traces.journal_reader import ProcessRecords, read_run
from traces.summary_text import format_ms

_MAX_EVENTS = 10
_OTHER_COLUMNS_WIDTH = 50
"""What the columns of numbers take beside a step's label, at most as a rule."""


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """What a flight record's file holds."""

    path: Path
    process: ProcessRecords
    dump: FlightDump | None
    """Why it was written; None in a file that is cut off."""
    steps: list[StepRecord]
    worker_steps: dict[int, WorkerStepRecord]
    """By the number of the step."""
    events: list[EventRecord]
    names: dict[int, str]
    """Ids of requests by their numbers, as far as they are known."""

    def budgets(self) -> dict[int, StepBudget]:
        """Where the time of each step went, by the number of the step."""
        budgets = step_budgets(self.steps, self.worker_steps.values())
        return {budget.step: budget for budget in budgets}


def read_flight(path: str | os.PathLike[str]) -> FlightRecord:
    """Read a flight record.

    Raises:
        ValueError: the file is no journal, or is cut off before it says who wrote it.
        OSError: it cannot be read.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file} is no file; name a flight record (flight-….journal)")
    run = read_run(file)
    dumps = run.of_type(FlightDump)
    return FlightRecord(
        file,
        run.processes[0],
        dumps[-1] if dumps else None,
        run.steps,
        {step.step: step for step in run.worker_steps},
        run.events,
        {arrival.request_num: arrival.request_id for arrival in run.arrivals},
    )


def render_flight(record: FlightRecord, *, num_last: int = 20) -> RenderableType:
    """Lay a flight record out: why it was written, the last steps, and the last surprises."""
    parts: list[RenderableType] = [_heading(record), Text()]
    if record.steps:
        parts += [_StepTable(record, num_last), _hint(record)]
    else:
        parts.append(Text("It holds no step."))
    if record.events:
        parts += [Text(), _event_table(record)]
    return Group(*parts)


def _heading(record: FlightRecord) -> Text:
    header, dump = record.process.header, record.dump
    text = Text("Flight record", style="bold")
    text.append(f"\n{record.path}\n", style="not bold dim")
    writer = f"{header.role} {header.rank} (pid {header.pid} on {header.host})"
    text.append(f"written by {writer}\n", style="not bold")
    if dump is None:
        if is_flight_file(record.path):
            text.append("the file is cut off: it does not say why it was written", style="red")
        else:
            text.append("an ordinary journal of a recording, and no flight record", style="yellow")
        return text
    text.append(f"why: {dump.reason.label}", style="bold yellow")
    if dump.detail:
        text.append(f" - {dump.detail}", style="not bold")
    return text


class _StepTable:
    """The table of steps, as wide as there is room."""

    def __init__(self, record: FlightRecord, num_last: int) -> None:
        self._record, self._num_last = record, num_last

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _step_table(self._record, self._num_last, options.max_width)


def _step_table(record: FlightRecord, num_last: int, max_width: int) -> Table:
    shown = record.steps[-num_last:]
    budgets = record.budgets()
    last = shown[-1]
    num_blocks = last.num_blocks_used + last.num_blocks_cached_free + last.num_blocks_free
    table = Table(
        title=f"The last {len(shown)} of {len(record.steps)} steps, of {num_blocks:,} KV blocks",
        title_justify="left",
        title_style="bold",
        box=box.HORIZONTALS,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
        border_style="dim",
    )
    table.add_column("step", justify="right")
    labels = [format_step_label(step.label) for step in shown]
    # A label is one word and stays whole; where there is little room, all else folds.
    longest = max(map(len, labels))
    is_narrow = max_width < longest + _OTHER_COLUMNS_WIDTH
    table.add_column(
        "label and decisions",
        overflow="fold",
        width=longest if is_narrow else None,
        min_width=longest,
    )
    for name in ("ms", "run", "wait", "blocks"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("slowest", overflow="fold")
    reason = record.dump.step if record.dump is not None else -1
    for label, step in zip(labels, shown, strict=True):
        worker = record.worker_steps.get(step.step)
        timed = worker if worker is not None else step
        table.add_row(
            str(step.step),
            "\n".join([label, *decisions(step, record.names)]),
            format_ms(timed.end_ns - timed.begin_ns),
            f"{step.num_running:,}",
            f"{step.num_waiting:,}",
            f"{step.num_blocks_used:,}",
            budgets[step.step].slowest if budgets[step.step].duration_ns else "-",
            style="yellow" if step.step == reason else None,
        )
    return table


def decisions(step: StepRecord, names: dict[int, str]) -> Iterator[str]:
    """What the scheduler decided in a step, in words; requests by id where that is known."""

    def name(request_num: int) -> str:
        return names.get(request_num, f"number {request_num}")

    for lost in step.preempted:
        by = name(lost.by_request_num) if lost.by_request_num >= 0 else "unknown"
        whom = "itself" if lost.by_request_num == lost.request_num else f"request {by}"
        yield (
            f"  preempted {name(lost.request_num)} for {whom}: {lost.tokens_lost} tokens, "
            f"{lost.blocks_lost} blocks lost"
        )
    for admission in step.admissions:
        age = ""
        if admission.evicted_age_ns >= 0:
            age = f" {admission.evicted_age_ns / 1e6:,.1f} ms ago"
        yield (
            f"  {'resumed' if admission.is_resumed else 'admitted'} "
            f"{name(admission.request_num)}: {admission.num_hit_tokens} of "
            f"{admission.num_query_tokens} tokens cached ({admission.miss.label}{age})"
        )
    if step.admission_stop is not AdmissionStop.NONE:
        at = ""
        if step.admission_stop_request_num >= 0:
            at = f" at {name(step.admission_stop_request_num)}"
        yield f"  stopped admitting{at}: {step.admission_stop.label}"
    if step.finished:
        yield f"  finished {', '.join(map(name, step.finished))}"


def _hint(record: FlightRecord) -> Text:
    """Where the time of the step that was the reason went, else of the slowest one."""
    budgets = record.budgets()
    reason = record.dump.step if record.dump is not None else -1
    budget = budgets.get(reason) or max(budgets.values(), key=lambda one: one.duration_ns)
    step = next(step for step in record.steps if step.step == budget.step)
    which = "the reason" if budget.step == reason else "the longest"
    duration_ns = step.end_ns - step.begin_ns
    text = f"step {budget.step} ({which}) took {_ms(duration_ns)} from scheduling to its end"
    if not budget.duration_ns:
        return Text(f"{text}, all of it beside the steps before it", style="yellow")
    # Steps overlap: what has gone by until the step before was done is on that one's account.
    is_alone = budget.duration_ns == duration_ns
    of_it = ", most of it" if is_alone else f"; {_ms(budget.duration_ns)} is its own, most of it"
    parts = sorted(budget.phases_ns.items(), key=lambda item: -item[1])[:4]
    phases = ", ".join(f"{phase.label} {_ms(time_ns)}" for phase, time_ns in parts)
    return Text(
        f"{text}{of_it} in {budget.slowest}: {phases or 'no phase is on record'}; unexplained "
        f"{_ms(budget.unexplained_ns)}",
        style="yellow",
    )


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:,.3f} ms"


def _event_table(record: FlightRecord) -> Table:
    shown = record.events[-_MAX_EVENTS:]
    table = Table(
        title=f"The last {len(shown)} of {len(record.events)} events",
        title_justify="left",
        title_style="bold",
        box=box.HORIZONTALS,
        show_edge=False,
        pad_edge=False,
        header_style="dim",
        border_style="dim",
    )
    for column in ("s before", "event", "request", "value", "detail"):
        is_number = column in ("s before", "value")
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    end_ns = record.dump.time_ns if record.dump is not None else shown[-1].time_ns
    for event in shown:
        table.add_row(
            f"{(end_ns - event.time_ns) / 1e9:,.3f}",
            event.kind.label,
            event.request_id,
            f"{event.value:,}",
            event.detail,
        )
    return table
