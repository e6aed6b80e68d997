"""A run's summary as tables for a terminal.

Knows how numbers are shown. Does not know how they come about.
"""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from traces.run_summary import Quantiles, RunSummary, StepGroup, ThreadSummary

_MAX_LABELS = 15


def render_summary(summary: RunSummary) -> RenderableType:
    """Lay the summary out as rich tables: where the time went."""
    parts: list[RenderableType] = [_heading(summary)]
    if summary.startups:
        parts.append(_startup_table(summary))
    if summary.num_steps:
        parts.append(_step_table("Steps by kind", summary.steps_by_kind, summary.elapsed_ns))
        parts.append(
            _step_table(
                f"Steps by label (at most {_MAX_LABELS} of {len(summary.steps_by_label)})",
                summary.steps_by_label[:_MAX_LABELS],
                summary.elapsed_ns,
            )
        )
    parts.extend(_thread_table(thread) for thread in summary.threads)
    if summary.num_steps:
        parts.append(_cache_table(summary))
    if summary.requests.count:
        parts.append(_request_table(summary))
    return Group(*parts)


def _heading(summary: RunSummary) -> Text:
    lines = [
        f"Where the time went: {summary.folder}",
        f"{summary.num_steps} steps in {_seconds(summary.elapsed_ns)} s, "
        f"idle {_share(summary.idle_ns, summary.elapsed_ns)} of it; "
        f"{summary.context_tokens_per_s:,.1f} prompt tokens/s, "
        f"{summary.sampled_tokens_per_s:,.1f} output tokens/s",
    ]
    for process in summary.processes:
        notes = []
        if process.is_truncated:
            notes.append("its journal is cut off")
        if process.num_dropped:
            notes.append(f"{process.num_dropped} entries were dropped")
        if notes:
            lines.append(
                f"{process.role} {process.rank} (pid {process.pid}): {' and '.join(notes)}"
            )
    return Text("\n".join(lines))


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _startup_table(summary: RunSummary) -> Table:
    table = _table("Start-up", "phase", "process", "ms")
    for startup in summary.startups:
        table.add_row(startup.phase, startup.role, _ms(startup.duration_ns))
    return table


def _step_table(title: str, groups: list[StepGroup], elapsed_ns: int) -> Table:
    table = _table(title, "steps", "count", "tokens", "total ms", "of run", "p50 ms", "p99 ms")
    for group in groups:
        table.add_row(
            group.name,
            f"{group.durations.count:,}",
            f"{group.num_tokens:,}",
            _ms(group.total_ns),
            _share(group.total_ns, elapsed_ns),
            _ms(group.durations.p50_ns),
            _ms(group.durations.p99_ns),
        )
    if sum(group.total_ns for group in groups) > elapsed_ns:
        table.caption = "steps overlap, so their times add up to more than the run's"
        table.caption_justify = "left"
    return table


def _thread_table(thread: ThreadSummary) -> Table:
    rank = f" {thread.rank}" if thread.rank else ""
    table = _table(
        f"Phases of {thread.role}{rank}, {thread.name}",
        "phase",
        "count",
        "total ms",
        "in steps ms",
        "of steps",
    )
    for phase in thread.phases:
        table.add_row(
            phase.name,
            f"{phase.count:,}",
            _ms(phase.total_ns),
            *_in_steps(phase.in_steps_ns, thread.steps_ns),
        )
    if thread.steps_ns:
        table.add_section()
        table.add_row("unexplained", "", "", *_in_steps(thread.unexplained_ns, thread.steps_ns))
        table.add_row("steps", "", "", *_in_steps(thread.steps_ns, thread.steps_ns))
    return table


def _in_steps(duration_ns: int, steps_ns: int) -> tuple[str, str]:
    return (_ms(duration_ns), _share(duration_ns, steps_ns)) if steps_ns else ("", "")


def _cache_table(summary: RunSummary) -> Table:
    prefix, pool, preemptions = summary.prefix, summary.pool, summary.preemptions
    table = _table("Cache and admission", "what", "count", "share")
    table.add_row(
        "prefix tokens hit, first admission",
        f"{prefix.hit_tokens:,} of {prefix.query_tokens:,}",
        _share(prefix.hit_tokens, prefix.query_tokens),
    )
    table.add_row(
        "prefix tokens hit, after preemption",
        f"{prefix.preempted_hit_tokens:,} of {prefix.preempted_query_tokens:,}",
        _share(prefix.preempted_hit_tokens, prefix.preempted_query_tokens),
    )
    for name, peak in (
        ("most blocks used", pool.peak_used),
        ("most blocks cached and free", pool.peak_cached_free),
        ("most blocks free", pool.peak_free),
    ):
        table.add_row(name, f"{peak:,} of {pool.num_blocks:,}", _share(peak, pool.num_blocks))
    table.add_row("blocks evicted", f"{pool.num_evicted:,}", "")
    table.add_row(
        "preemptions",
        f"{preemptions.count:,}",
        f"{preemptions.tokens_lost:,} tokens lost" if preemptions.count else "",
    )
    for reason, count in summary.admission_stops.items():
        table.add_row(
            f"steps that stopped admission: {reason}",
            f"{count:,}",
            _share(count, summary.num_steps),
        )
    return table


def _request_table(summary: RunSummary) -> Table:
    requests = summary.requests
    reasons = ", ".join(f"{count} {name}" for name, count in requests.by_finish_reason.items())
    table = _table(
        f"{requests.count:,} requests ({reasons}), "
        f"{requests.num_prompt_tokens:,} prompt tokens ({requests.num_cached_tokens:,} cached), "
        f"{requests.num_generation_tokens:,} output tokens",
        "interval",
        "count",
        "mean ms",
        "p50 ms",
        "p99 ms",
        "max ms",
    )
    intervals: dict[str, Quantiles] = {
        "time to first token": requests.ttft,
        "between tokens (mean of a request)": requests.inter_token,
        "end to end": requests.e2e,
        "queue": requests.queue,
        "prefill": requests.prefill,
        "decode": requests.decode,
        "preempted": requests.preempted,
    }
    for name, interval in intervals.items():
        table.add_row(
            name,
            f"{interval.count:,}",
            _ms(interval.mean_ns),
            _ms(interval.p50_ns),
            _ms(interval.p99_ns),
            _ms(interval.max_ns),
        )
    return table


def _ms(duration_ns: float) -> str:
    return f"{duration_ns * 1e-6:,.3f}"


def _seconds(duration_ns: float) -> str:
    return f"{duration_ns * 1e-9:,.3f}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "n/a"
