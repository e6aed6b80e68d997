"""A run as tables for people.

Knows how figures are laid out. Does not know how they come about (`measure.py` does).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from engine.bench.measure import percentile_name
from engine.bench.records import LoadRun, Outcome
from engine.bench.timeline import tokens_per_bin

_LABELS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2EL",
    "ttft_from_intended": "TTFT from intended",
    "e2el_from_intended": "E2EL from intended",
}
_BLOCKS = "▁▂▃▄▅▆▇█"
_LATE_MS = 20.0
"""From here on (99th percentile) the client's own lateness deserves a warning."""
_BUSY_SHARE = 0.7


def print_report(
    console: Console,
    run: LoadRun,
    document: Mapping[str, Any],
    *,
    metrics: Sequence[str],
    percents: Sequence[float],
    arrival: str,
) -> None:
    """Print the figures of a run, failures first where there are any."""
    parts: list[Any] = [
        _heading(document, arrival),
        _throughput(document),
        _latencies(document, metrics, percents),
        _over_time(run),
    ]
    failures = _failures(run)
    if failures is not None:
        parts.insert(1, failures)
    parts += [Text(f"note: {text}", style="yellow") for text in warnings_of(document)]
    console.print(Group(*parts))


def _heading(document: Mapping[str, Any], arrival: str) -> Text:
    settings = document["settings"]
    warmup = document["warmup"]
    state = ""
    if document["interrupted"]:
        state = " — INTERRUPTED, figures of what there is"
        if not document["num_prompts"]:
            state = " — INTERRUPTED before the first request of the load: nothing was measured"
    lines = [
        f"{settings['base_url']}  {settings['endpoint']}  {document['model_id']}{state}",
        f"{arrival}; {document['num_prompts']} requests in {document['duration']:.1f} s",
    ]
    if warmup["num_prompts"]:
        outcomes = ", ".join(f"{count} {name}" for name, count in warmup["outcomes"].items())
        lines.append(f"left out: {warmup['num_prompts']} warm-up requests ({outcomes})")
    return Text("\n".join(lines) + "\n")


def _failures(run: LoadRun) -> Table | None:
    """The kinds of failure, each with its first words."""
    counts: dict[tuple[str, str], int] = {}
    words: dict[tuple[str, str], str] = {}
    for record in run.records:
        if record.outcome is not Outcome.OK:
            key = (str(record.outcome), "" if record.status is None else str(record.status))
            counts[key] = counts.get(key, 0) + 1
            words.setdefault(key, record.detail)
    if not counts:
        return None
    table = Table(title="requests that failed", title_justify="left", style="red")
    for name in ("outcome", "HTTP status", "requests", "first of them"):
        table.add_column(name, justify="right" if name == "requests" else "left")
    for key, count in sorted(counts.items(), key=lambda item: -item[1]):
        table.add_row(*key, str(count), Text(words[key]))
    return table


def _throughput(document: Mapping[str, Any]) -> Table:
    table = Table(title="throughput", title_justify="left")
    for name in ("", "whole run", "steady state"):
        table.add_column(name, justify="right" if name else "left")
    steady = document["steady_state"] or {}
    rows = (
        ("requests/s", "request_throughput"),
        ("output tokens/s", "output_throughput"),
        ("input and output tokens/s", "total_token_throughput"),
        ("seconds", "duration"),
    )
    for label, key in rows:
        inside = f"{steady[key]:,.2f}" if key in steady else "–"
        table.add_row(label, f"{document[key]:,.2f}", inside)
    if "request_goodput" in document:
        ratio = document["goodput_ratio"]
        share = "" if ratio is None else f" ({ratio:.1%})"
        table.add_row("good requests/s", f"{document['request_goodput']:,.2f}{share}", "–")
    table.add_row("peak in flight", str(document["max_concurrent_requests"]), "–")
    cached = document["total_cached_tokens"]
    note = f", {cached:,} of them from a prefix cache" if cached else ""
    table.caption = (
        f"{document['total_input_tokens']:,} input tokens{note}; "
        f"{document['total_output_tokens']:,} output tokens, counted by "
        f"{document['tokens_counted_by']}"
    )
    table.caption_justify = "left"
    return table


def _latencies(
    document: Mapping[str, Any], metrics: Sequence[str], percents: Sequence[float]
) -> Table:
    columns = ["mean", *map(percentile_name, percents), "max"]
    table = Table(title="latency in ms", title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for name, label in _LABELS.items():
        if name.partition("_")[0] in metrics:
            values = [document.get(f"{column}_{name}_ms") for column in columns]
            cells = ["–" if value is None else f"{value:,.2f}" for value in values]
            table.add_row(label, *cells)
    return table


def _over_time(run: LoadRun) -> Padding:
    seconds, bins = tokens_per_bin(run, num_bins=60)
    peak = max(bins, default=0.0)
    scale = (len(_BLOCKS) - 1) / peak if peak else 0.0
    line = "".join(_BLOCKS[round(value * scale)] for value in bins)
    text = f"output tokens/s over time, {seconds:.3g} s a column, highest {peak:,.0f}\n{line}"
    return Padding(Text(text), (1, 0))


def warnings_of(document: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the figures."""
    notes = []
    client = document["client"]
    figure = "p99" if "p99" in client["sent_late_ms"] else "max"
    late = client["sent_late_ms"].get(figure, 0.0)
    limit = document["settings"]["max_concurrency"]
    if late > _LATE_MS:
        reason = (
            "--max-concurrency held requests back"
            if limit is not None and document["max_concurrent_requests"] >= limit
            else "this machine or the generator is too slow for the load"
        )
        notes.append(
            f"requests went out {late:,.0f} ms late ({figure}): {reason}; the rows "
            "`from intended` include the wait"
        )
    if client["cpu_share_of_a_core"] > _BUSY_SHARE:
        notes.append(
            f"the generator used {client['cpu_share_of_a_core']:.0%} of a core: part of what is "
            "measured is the generator; use another machine or several generators"
        )
    if document["failed"]:
        notes.append(
            f"{document['failed']} of {document['num_prompts']} requests failed and are in no "
            "latency figure"
        )
    if document["completed_without_output"]:
        notes.append(
            f"{document['completed_without_output']} answers were empty: they have no TTFT and no "
            "TPOT, and miss no limit of these"
        )
    per_chunk = document["tokens_per_chunk"]
    if per_chunk is not None and per_chunk > 1.2:
        notes.append(
            f"{per_chunk:.1f} tokens came per chunk: compare TPOT, not ITL, between servers"
        )
    if document["tokens_counted_by"] != "usage" and document["total_output_tokens"]:
        notes.append(f"tokens are counted by {document['tokens_counted_by']}")
    return notes
