"""A request's story as JSON: what `RequestReport` and an HTTP exchange know, in seconds and dates.

Knows the forms. Does not know how either is found.
"""

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from engine.server.http.exchange import ExchangeState
from instrumentation import RequestReport, RequestTimeline, parse_traceparent


def timeline_fields(timeline: RequestTimeline) -> dict[str, Any]:
    """One sequence: what it was, how far it got, and where its time went."""
    trace = parse_traceparent(timeline.traceparent)
    return {
        "id": timeline.request_id,
        "parent_id": timeline.parent_id,
        "index": timeline.index,
        "trace_id": None if trace is None else trace.trace_id,
        "span_id": None if trace is None else trace.span_id,
        "state": "unfinished" if timeline.finish_reason is None else "finished",
        "finish_reason": timeline.finish_reason,
        "stop_reason": timeline.stop_reason,
        "error": timeline.error,
        "arrived": _date(timeline.arrival_ns),
        "num_prompt_tokens": timeline.num_prompt_tokens,
        "num_cached_tokens": timeline.num_cached_tokens,
        "num_output_tokens": timeline.num_generation_tokens,
        "num_preemptions": len(timeline.preemptions),
        "seconds": {
            "end_to_end": timeline.e2e_ns / 1e9,
            "intake": timeline.intake_ns / 1e9,  # part of queue
            "queue": timeline.queue_ns / 1e9,
            "prefill": timeline.prefill_ns / 1e9,
            "decode": timeline.decode_ns / 1e9,
            "preempted": timeline.preempted_ns / 1e9,
            "delivery": timeline.delivery_ns / 1e9,
            "time_to_first_token": _seconds(timeline.ttft_ns),
            "mean_inter_token": _seconds(timeline.mean_inter_token_ns),
        },
    }


def report_fields(report: RequestReport) -> dict[str, Any]:
    """One sequence with its steps, and why it waited; offsets are from its arrival."""
    arrival_ns = report.timeline.arrival_ns
    return timeline_fields(report.timeline) | {
        "is_complete": report.is_complete,
        "cost_s": report.cost_ns / 1e9,
        "intake_step": report.intake_step or None,
        "admissions": [
            {
                "num_query_tokens": one.num_query_tokens,
                "num_hit_tokens": one.num_hit_tokens,
                "is_resumed": one.is_resumed,
                "miss": one.miss.label,
            }
            for one in report.admissions
        ],
        "waits": [
            {
                "cause": one.cause,
                "first_step": one.first_step,
                "last_step": one.last_step,
                "begin_s": (one.begin_ns - arrival_ns) / 1e9,
                "end_s": (one.end_ns - arrival_ns) / 1e9,
            }
            for one in report.waits
        ],
        "preemptions": [
            {
                "step": one.step,
                "at_s": (one.time_ns - arrival_ns) / 1e9,
                "for": one.by_request_id,
                "num_blocks_lost": one.num_blocks_lost,
                "num_tokens_lost": one.num_tokens_lost,
                "num_recomputed_tokens": one.num_recomputed_tokens,
            }
            for one in report.preemptions
        ],
        "steps": [
            {
                "step": one.step,
                "label": one.label,
                "num_tokens": one.num_tokens,
                "num_context_tokens": one.num_context_tokens,
                "begin_s": (one.begin_ns - arrival_ns) / 1e9,
                "end_s": (one.end_ns - arrival_ns) / 1e9,
                "share_s": one.share_ns / 1e9,
            }
            for one in report.steps
        ],
    }


def exchange_fields(exchange: ExchangeState) -> dict[str, Any]:
    """One HTTP request, ended or under way."""
    is_over = bool(exchange.outcome)
    trace = parse_traceparent(exchange.traceparent)
    first_byte_ns = exchange.first_byte_ns
    return {
        "request_id": exchange.request_id,
        "engine_id": exchange.engine_id,
        "trace_id": None if trace is None else trace.trace_id,
        "method": exchange.method,
        "path": exchange.path,
        "client": exchange.client,
        "arrived": _date(exchange.arrival_ns),
        "state": "ended" if is_over else "under way",
        "status": exchange.status or None,
        "outcome": exchange.outcome or None,
        "refusal": exchange.refusal,
        "error_type": exchange.error_type,
        "response_bytes": exchange.num_bytes,
        "num_chunks": exchange.num_chunks,
        "first_byte_s": (first_byte_ns - exchange.arrival_ns) / 1e9 if first_byte_ns else None,
        "duration_s": ((exchange.end_ns if is_over else time.monotonic_ns()) - exchange.arrival_ns)
        / 1e9,
    }


def story_text(exchanges: Iterable[ExchangeState], reports: Iterable[RequestReport]) -> str:
    """The same to read: a line for each exchange, a table for each sequence."""
    parts = []
    for exchange in exchanges:
        fields = exchange_fields(exchange)
        parts.append(
            f"{fields['method']} {fields['path']} (X-Request-Id {fields['request_id']}): "
            f"{fields['outcome'] or fields['state']}, status {fields['status']}, "
            f"{fields['response_bytes']} bytes, {fields['duration_s']:.3f} s"
        )
    return "\n\n".join([*parts, *map(str, reports)]) + "\n"


def _seconds(duration_ns: float | None) -> float | None:
    return None if duration_ns is None else duration_ns / 1e9


def _date(monotonic_ns: int) -> str:
    """The time of day of a stamp."""
    wall_ns = monotonic_ns + time.time_ns() - time.monotonic_ns()
    date = datetime.fromtimestamp(wall_ns / 1e9, UTC)
    return date.isoformat(timespec="milliseconds").replace("+00:00", "Z")
