"""A run's summary as tables for a terminal, 80 columns wide.

Knows how numbers are shown. Does not know how they come about.
"""

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from traces.run_summary import Quantiles, RunSummary, StepGroup, ThreadSummary

_MAX_LABELS = 15
_BAR_WIDTH = 12
_BAR_COLUMNS = ("<", "<when")
_MIN_BAR = 1 / 64
"""Bars of less would be blank; what took any time shows."""


def render_summary(summary: RunSummary) -> RenderableType:
    """Lay the summary out as rich tables: where the time went."""
    parts: list[RenderableType] = [_heading(summary)]
    if summary.startups:
        parts.append(_startup_table(summary))
    if summary.steps_by_label:
        parts += [_kind_table(summary), _label_table(summary)]
    if summary.threads:
        parts.append(_phase_table(summary))
    if summary.budget.phases_ns:
        parts.append(_budget_table(summary))
    if summary.num_steps:
        parts.append(_cache_table(summary))
    if summary.requests.count:
        parts.append(_request_table(summary))
    return Group(*(part for pair in ((one, Text()) for one in parts) for part in pair))


def _heading(summary: RunSummary) -> Text:
    text = Text("Where the time went", style="bold")
    text.append(f"\n{summary.folder}\n", style="not bold dim")
    lines = [
        f"{summary.num_steps:,} steps in {_seconds(summary.elapsed_ns)}, "
        f"idle {_share(summary.idle_ns, summary.elapsed_ns)} of it",
        f"{summary.context_tokens_per_s:,.1f} prompt tokens/s, "
        f"{summary.sampled_tokens_per_s:,.1f} output tokens/s",
    ]
    if summary.num_cut_steps:
        lines.append(
            f"{summary.num_cut_steps:,} of the steps began before the recording: counted from then"
        )
    for process in summary.processes:
        notes = []
        if process.is_truncated:
            notes.append("its journal is cut off")
        if process.num_dropped:
            notes.append(f"{process.num_dropped:,} entries were dropped")
        if notes:
            lines.append(
                f"{process.role} {process.rank} (pid {process.pid}): {' and '.join(notes)}"
            )
    return text.append("\n".join(lines), style="not bold")


class _Bar:
    """A bar over part of a line, from one share of its width to another."""

    def __init__(self, begin: float, end: float, *, width: int = _BAR_WIDTH) -> None:
        self._begin, self._end, self._width = begin, end, width

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, min(self._width, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self._width, options.max_width)
        full, half = ("=", "=") if options.ascii_only else ("━", "╸")
        first = min(int(self._begin * width), width - 1)
        # In half cells, of which there is always one.
        halves = max(1, round(self._end * width * 2) - 2 * first)
        text = full * (halves // 2) + half * (halves % 2)
        if self._end <= 0:
            text = ""
        line = (" " * first + text).ljust(width)[:width]
        yield Segment(line, console.get_style("cyan"))


def _table(title: str, *columns: str, caption: str | None = None) -> Table:
    """A table whose columns are named; `<` in front of a name aligns it to the left."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
        box=box.HORIZONTALS,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
        border_style="dim",
    )
    for column in columns:
        is_text = column.startswith("<") and column not in _BAR_COLUMNS
        table.add_column(
            column.removeprefix("<"),
            justify="left" if column.startswith("<") else "right",
            # Where a line is too short, bars get shorter, then numbers fold; no text is cut.
            no_wrap=is_text,
            overflow="fold",
        )
    return table


def _startup_table(summary: RunSummary) -> Table:
    total_ns = max(startup.offset_ns + startup.duration_ns for startup in summary.startups)
    table = _table(f"Start-up: {_seconds(total_ns)}", "<process", "<phase", "ms", "<when")
    roles = {(startup.role, startup.pid) for startup in summary.startups}
    for startup in summary.startups:
        end_ns = startup.offset_ns + startup.duration_ns
        table.add_row(
            _named_apart(startup.role, startup.pid, roles),
            startup.phase,
            format_ms(startup.duration_ns),
            _Bar(startup.offset_ns / total_ns, end_ns / total_ns, width=36) if total_ns else "",
        )
    return table


def _steps_caption(summary: RunSummary) -> str:
    if not summary.are_steps_of_workers:
        return (
            "no worker's record: times are from scheduling to updating; steps may overlap "
            "and add up to more than the run"
        )
    return (
        "a step is what the worker took for it; from scheduling to updating "
        f"p50 {format_ms(summary.latency.p50_ns)} ms, p99 {format_ms(summary.latency.p99_ns)} ms"
    )


def _kind_table(summary: RunSummary) -> Table:
    table = _table(
        "Steps by kind",
        *("<kind", "count", "tokens", "total ms", "p50 ms", "p99 ms", "of run", "<"),
        caption=_steps_caption(summary),
    )
    for group in summary.steps_by_kind:
        table.add_row(
            group.name,
            f"{group.durations.count:,}",
            f"{group.num_tokens:,}",
            format_ms(group.total_ns),
            format_ms(group.durations.p50_ns),
            format_ms(group.durations.p99_ns),
            *_share_and_bar(group.total_ns, summary.elapsed_ns),
        )
    return table


def _label_table(summary: RunSummary) -> Table:
    groups = summary.steps_by_label
    shown: list[StepGroup] = groups[:_MAX_LABELS]
    title = "Steps by label"
    if len(groups) > len(shown):
        title += f": the {len(shown)} of {len(groups):,} that took most time in all"
    table = _table(title, "<label", "count", "p50 ms", "p99 ms", "of run")
    for group in shown:
        table.add_row(
            group.name,
            f"{group.durations.count:,}",
            format_ms(group.durations.p50_ns),
            format_ms(group.durations.p99_ns),
            _share(group.total_ns, summary.elapsed_ns),
        )
    return table


def _phase_table(summary: RunSummary) -> Table:
    table = _table(
        "Phases by thread",
        *("<thread", "<phase", "count", "total ms", "in steps ms", "of steps", "<"),
    )
    names = {(_thread_name(thread), thread.pid) for thread in summary.threads}
    for number, thread in enumerate(summary.threads):
        if thread.steps_ns and number:
            table.add_section()
        _add_thread(table, thread, _named_apart(_thread_name(thread), thread.pid, names))
    return table


def _thread_name(thread: ThreadSummary) -> str:
    return f"{thread.name} {thread.rank}" if thread.rank else thread.name


def _named_apart(name: str, pid: int, names: set[tuple[str, int]]) -> str:
    """The name, with the process where others have it too, as every frontend is a caller."""
    return f"{name} pid {pid}" if any(one == name and of != pid for one, of in names) else name


def _add_thread(table: Table, thread: ThreadSummary, name: str) -> None:
    """Add a thread's phases, and where it has steps what no phase explains."""
    for phase in thread.phases:
        table.add_row(
            name,
            phase.name,
            f"{phase.count:,}",
            format_ms(phase.total_ns),
            *_in_steps(phase.in_steps_ns, thread.steps_ns),
        )
        name = ""
    # Threads without steps have few phases; they share a section.
    if thread.steps_ns:
        table.add_row(
            *("", "unexplained", "", ""),
            *_in_steps(thread.unexplained_ns, thread.steps_ns),
            style="yellow",
        )
        table.add_row(
            "", "all steps", "", "", *_in_steps(thread.steps_ns, thread.steps_ns)[:2], style="dim"
        )
        table.add_section()


def _in_steps(duration_ns: int, steps_ns: int) -> tuple[RenderableType, ...]:
    if not steps_ns:
        return "", "", ""
    return (format_ms(duration_ns), *_share_and_bar(duration_ns, steps_ns))


def _budget_table(summary: RunSummary) -> Table:
    budget = summary.budget
    table = _table(
        "Step-time budget: each instant of a step once, for the worker's phase first",
        *("<phase", "total ms", "of steps", "<"),
    )
    for name, time_ns in budget.phases_ns.items():
        table.add_row(name, format_ms(time_ns), *_share_and_bar(time_ns, budget.duration_ns))
    table.add_row(
        "unexplained",
        format_ms(budget.unexplained_ns),
        *_share_and_bar(budget.unexplained_ns, budget.duration_ns),
        style="yellow",
    )
    return table


def _cache_table(summary: RunSummary) -> Table:
    prefix, pool, preemptions = summary.prefix, summary.pool, summary.preemptions
    table = _table("Cache and admission", "<what", "count", "of", "share")

    def add(name: str, count: int, whole: int) -> None:
        table.add_row(name, f"{count:,}", f"{whole:,}", _share(count, whole))

    add("prompt tokens found in the prefix cache", prefix.hit_tokens, prefix.query_tokens)
    if preemptions.count:
        add(
            "tokens found in it after a preemption",
            prefix.preempted_hit_tokens,
            prefix.preempted_query_tokens,
        )
    add("KV blocks used, at most", pool.peak_used, pool.num_blocks)
    add("KV blocks cached and free, at most", pool.peak_cached_free, pool.num_blocks)
    table.add_row("cached blocks evicted", f"{pool.num_evicted:,}")
    table.add_row("preemptions", f"{preemptions.count:,}")
    if preemptions.count:
        table.add_row("tokens lost to them", f"{preemptions.tokens_lost:,}")
    for reason, count in summary.admission_stops.items():
        add(f"steps that stopped admission: {reason}", count, summary.num_steps)
    return table


def _request_table(summary: RunSummary) -> Table:
    requests = summary.requests
    reasons = ", ".join(f"{count:,} {name}" for name, count in requests.by_finish_reason.items())
    table = _table(
        f"Requests: {requests.count:,} ({reasons})",
        *("<interval", "count", "mean ms", "p50 ms", "p99 ms", "max ms"),
        caption=(
            f"{requests.num_prompt_tokens:,} prompt tokens, {requests.num_cached_tokens:,} of them "
            f"cached; {requests.num_generation_tokens:,} output tokens"
        ),
    )
    intervals: dict[str, Quantiles] = {
        "queue": requests.queue,
        "prefill": requests.prefill,
        "decode": requests.decode,
        "preempted": requests.preempted,
        "time to first token": requests.ttft,
        "between tokens, mean of each": requests.inter_token,
        "end to end": requests.e2e,
    }
    for name, interval in intervals.items():
        table.add_row(
            name,
            f"{interval.count:,}",
            format_ms(interval.mean_ns),
            format_ms(interval.p50_ns),
            format_ms(interval.p99_ns),
            format_ms(interval.max_ns),
        )
        if interval is requests.preempted:
            table.add_section()
    return table


def _share_and_bar(part: float, whole: float) -> tuple[RenderableType, RenderableType]:
    share = part / whole if whole else 0.0
    return _share(part, whole), _Bar(0, min(share, 1.0)) if share >= _MIN_BAR else ""


def format_ms(duration_ns: float) -> str:
    """A duration in milliseconds, as exact as it is of use."""
    duration_ms = duration_ns * 1e-6
    return f"{duration_ms:,.1f}" if duration_ms >= 10 else f"{duration_ms:,.3f}"


def _seconds(duration_ns: float) -> str:
    return f"{duration_ns * 1e-9:,.3f} s"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "n/a"
