"""Figures of a run: latencies, throughput, goodput, what the client itself cost.

Knows how figures are computed; `definitions.py` says it to those who read them. Does not know how
they are printed. Keys are those of vLLM's benchmark where it has the figure, times in milliseconds.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from engine.bench.records import NEVER_SENT, LoadRun, Outcome, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a request must keep to count as good; limits in milliseconds, None for no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        """Whether the request succeeded within the limits, from when it was intended."""
        if record.outcome is not Outcome.OK:
            return False
        measured = (
            (self.ttft_ms, first_chunk_ms(record, record.intended_ns)),
            (self.tpot_ms, per_token_ms(record)),
            (self.e2el_ms, (record.end_ns - record.intended_ns) / 1e6),
        )
        return all(limit is None or value is None or value <= limit for limit, value in measured)


def first_chunk_ms(record: RequestRecord, since_ns: int) -> float | None:
    """Time to the first chunk; None if none came."""
    return (record.chunk_ns[0] - since_ns) / 1e6 if record.chunk_ns else None


def per_token_ms(record: RequestRecord) -> float | None:
    """TPOT; None with fewer than two tokens, or with one chunk: there is no gap to be seen."""
    num_gaps = record.output_tokens() - 1
    if num_gaps < 1 or len(record.chunk_ns) < 2:
        return None
    return (record.chunk_ns[-1] - record.chunk_ns[0]) / 1e6 / num_gaps


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Percentile of ascending values, linear between neighbours (numpy's default)."""
    assert ordered, "no values"
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentile_name(percent: float) -> str:
    """`p99`, `p99.9`; with all digits, so that no two have one name."""
    return f"p{int(percent) if percent == int(percent) else percent}"


def distribution(values: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation (of the population), median, maximum and percentiles (`p99.9`, …)
    of values; empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered)
    figures = {
        "mean": mean,
        "std": math.sqrt(sum((value - mean) ** 2 for value in ordered) / len(ordered)),
        "median": percentile(ordered, 50),
    }
    figures |= {percentile_name(one): percentile(ordered, one) for one in percents}
    figures["max"] = ordered[-1]
    return {name: round(value, 3) for name, value in figures.items()}


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """The most requests that were in flight at one moment."""
    changes = [(record.sent_ns, 1) for record in records if record.detail != NEVER_SENT]
    changes += [(record.end_ns, -1) for record in records if record.detail != NEVER_SENT]
    peak = current = 0
    for _, change in sorted(changes):  # at one moment, ends come before beginnings
        current += change
        peak = max(peak, current)
    return peak


def steady_window_ns(records: Sequence[RequestRecord]) -> tuple[int, int] | None:
    """From the first good end to the last sending; None if nothing lies between."""
    ends = [record.end_ns for record in records if record.outcome is Outcome.OK]
    begin = min(ends, default=math.inf)
    end = max((record.sent_ns for record in records if record.detail != NEVER_SENT), default=0)
    return (int(begin), end) if end > begin else None


def tokens_within(records: Sequence[RequestRecord], begin_ns: int, end_ns: int) -> float:
    """Output tokens that arrived in a half-open window, a request's tokens spread over its chunks
    evenly."""
    total = 0.0
    for record in records:
        num_inside = sum(begin_ns <= at < end_ns for at in record.chunk_ns)
        if num_inside:
            total += record.output_tokens() * num_inside / len(record.chunk_ns)
    return total


def measure(
    run: LoadRun,
    *,
    percents: Sequence[float] = (50, 90, 95, 99),
    objective: Objective | None = None,
) -> dict[str, object]:
    """The document of a run: flat figures under vLLM's names, and groups of our own."""
    records = run.records
    good = [record for record in records if record.outcome is Outcome.OK]
    duration_s = max((run.end_ns - run.start_ns) / 1e9, 1e-9)
    input_tokens = sum(record.prompt_tokens or 0 for record in good)
    # Tokens of streams that broke have been made and sent too.
    output_tokens = sum(record.output_tokens() for record in records)
    document: dict[str, object] = {
        "model_id": run.model,
        "duration": round(duration_s, 3),
        "interrupted": run.interrupted,
        "num_prompts": len(records),
        "completed": len(good),
        "completed_without_output": sum(not record.chunk_ns for record in good),
        "failed": len(records) - len(good),
        "outcomes": _outcomes(records),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "total_cached_tokens": sum(record.cached_tokens or 0 for record in good),
        "tokens_counted_by": _counted_by(records),
        "request_throughput": round(len(good) / duration_s, 3),
        "output_throughput": round(output_tokens / duration_s, 2),
        "total_token_throughput": round((input_tokens + output_tokens) / duration_s, 2),
        "max_concurrent_requests": peak_concurrency(records),
        "steady_state": _steady_state(records),
    }
    if objective is not None:
        num_met = sum(map(objective.is_met, records))
        document["request_goodput"] = round(num_met / duration_s, 3)
        document["goodput_ratio"] = round(num_met / len(records), 4) if records else None
        document["goodput_limits"] = asdict(objective)
    groups = latencies_ms(good)
    for name, values in groups.items():
        for figure, value in distribution(values, percents).items():
            document[f"{figure}_{name}_ms"] = value
    document["tokens_per_chunk"] = _ratio(
        sum(record.output_tokens() for record in good), sum(len(r.chunk_ns) for r in good)
    )
    document["client"] = _client(run, output_tokens, duration_s, percents)
    document["warmup"] = {"num_prompts": len(run.warmups), "outcomes": _outcomes(run.warmups)}
    document["settings"] = run.settings
    return document


def latencies_ms(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """All latencies by name: `ttft`, `tpot`, `itl`, `e2el`, and the two from the intended time."""
    first = [(record, at) for record in records if (at := first_chunk_ms(record, 0)) is not None]
    return {
        "ttft": [at - record.sent_ns / 1e6 for record, at in first],
        "tpot": [value for record in records if (value := per_token_ms(record)) is not None],
        "itl": [
            (later - earlier) / 1e6
            for record in records
            for earlier, later in zip(record.chunk_ns, record.chunk_ns[1:], strict=False)
        ],
        "e2el": [(record.end_ns - record.sent_ns) / 1e6 for record in records],
        "ttft_from_intended": [at - record.intended_ns / 1e6 for record, at in first],
        "e2el_from_intended": [(record.end_ns - record.intended_ns) / 1e6 for record in records],
    }


def _outcomes(records: Sequence[RequestRecord]) -> dict[str, int]:
    """How many ended how; HTTP errors by status."""
    names = (
        f"http_{record.status}" if record.outcome is Outcome.HTTP_ERROR else str(record.outcome)
        for record in records
    )
    return dict(sorted(Counter(names).items(), key=lambda item: (item[0] != "ok", -item[1])))


def _counted_by(records: Sequence[RequestRecord]) -> str:
    with_output = [record for record in records if record.num_events]
    by_usage = sum(record.completion_tokens is not None for record in with_output)
    if by_usage == len(with_output):
        return "usage"
    return "events" if by_usage == 0 else "usage, and events where a stream broke off"


def _steady_state(records: Sequence[RequestRecord]) -> dict[str, float] | None:
    window = steady_window_ns(records)
    if window is None:
        return None
    seconds = (window[1] - window[0]) / 1e9
    return {
        "duration": round(seconds, 3),
        "output_throughput": round(tokens_within(records, *window) / seconds, 2),
        "request_throughput": round(
            sum(
                # The end that opens the window is its border: it took place before it.
                record.outcome is Outcome.OK and window[0] < record.end_ns <= window[1]
                for record in records
            )
            / seconds,
            3,
        ),
    }


def _client(
    run: LoadRun, output_tokens: int, duration_s: float, percents: Sequence[float]
) -> dict[str, object]:
    late_ms = [
        (record.sent_ns - record.intended_ns) / 1e6
        for record in run.records
        if record.detail != NEVER_SENT
    ]
    return {
        "cpu_s": round(run.client_cpu_s, 3),
        "cpu_share_of_a_core": round(run.client_cpu_s / duration_s, 4),
        "cpu_us_per_output_token": _ratio(run.client_cpu_s * 1e6, output_tokens),
        "sent_late_ms": distribution(late_ms, percents),
    }


def _ratio(value: float, by: float) -> float | None:
    return round(value / by, 2) if by else None
