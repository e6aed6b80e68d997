"""Runs made of numbers: records with times that the test chooses, in milliseconds."""

from typing import Any

from engine.bench.records import LoadRun, Outcome, RequestRecord

START_NS = 5_000_000_000


def at_ns(milliseconds: float) -> int:
    """A moment after the start of the run."""
    return START_NS + round(milliseconds * 1e6)


def record(
    index: int,
    *,
    due: float,
    sent: float | None = None,
    chunks: tuple[float, ...] = (),
    end: float,
    **changes: Any,
) -> RequestRecord:
    """A record; times are milliseconds after the start."""
    values: dict[str, Any] = {
        "request_id": f"bench-{index}",
        "outcome": Outcome.OK,
        "status": 200,
        "prompt_tokens": 10,
        "completion_tokens": len(chunks),
        "num_events": len(chunks),
    }
    return RequestRecord(
        index=index,
        intended_ns=at_ns(due),
        sent_ns=at_ns(due if sent is None else sent),
        chunk_ns=tuple(map(at_ns, chunks)),
        end_ns=at_ns(end),
        **(values | changes),
    )


def load_run(*records: RequestRecord, end: float, **changes: Any) -> LoadRun:
    """A run of these records that ended so many milliseconds after its start."""
    values: dict[str, Any] = {
        "client_cpu_s": 0.0,
        "settings": {
            "base_url": "http://there",
            "endpoint": "completions",
            "max_concurrency": None,
        },
    }
    return LoadRun(
        model="m", records=records, start_ns=START_NS, end_ns=at_ns(end), **(values | changes)
    )
