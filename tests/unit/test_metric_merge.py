"""Snapshots of several frontends as one."""

from instrumentation.metric_info import METRICS
from instrumentation.metric_merge import (
    decode_snapshot,
    encode_snapshot,
    end_in_flight,
    merge_snapshots,
)
from instrumentation.metric_types import Counter, Gauge, Histogram, Metric
from instrumentation.metrics import Metrics
from instrumentation.records import RequestTimeline
from instrumentation.request_metrics import ArrivedRequest


def frontend(num_arrived: int, num_ended: int) -> list[Metric]:
    """The snapshot of a frontend with so many requests, a second each."""
    metrics = Metrics({"model_name": "m", "engine": "0"})
    for _ in range(num_arrived):
        metrics.requests.observe_arrival(ArrivedRequest(1, 16))
    for number in range(num_ended):
        metrics.requests.observe_end(timeline(number))
    return metrics.snapshot()


def timeline(number: int) -> RequestTimeline:
    second = 10**9
    return RequestTimeline(
        request_id=str(number),
        request_num=number,
        arrival_ns=second,
        queued_ns=second,
        first_scheduled_ns=second,
        first_token_ns=second + second // 2,
        last_token_ns=2 * second,
        delivered_ns=2 * second,
        num_prompt_tokens=3,
        num_generation_tokens=2,
        finish_reason="stop",
    )


def value_of(snapshot: list[Metric], name: str, **labels: str) -> float:
    found = [
        metric
        for metric in snapshot
        if metric.name == f"isinglass_{name}" and labels.items() <= metric.labels.items()
    ]
    (metric,) = found
    assert isinstance(metric, Counter | Gauge)
    return metric.value


def test_counters_histograms_and_what_is_in_flight_add_up() -> None:
    merged = merge_snapshots([frontend(5, 3), frontend(7, 4)])
    assert value_of(merged, "requests_arrived_total") == 12
    assert value_of(merged, "requests_finished_total", finish_reason="stop") == 7
    assert value_of(merged, "requests_in_flight") == 5
    (latency,) = [m for m in merged if m.name == "isinglass_request_e2e_seconds"]
    assert isinstance(latency, Histogram)
    assert (latency.count, latency.sum, latency.buckets["+Inf"]) == (7, 7.0, 7)


def test_other_gauges_are_the_first_ones() -> None:
    first, second = Metrics(), Metrics()
    for metrics, up in ((first, 1), (second, 0)):
        metrics.engine._up.set(up)
    assert value_of(merge_snapshots([first.snapshot(), second.snapshot()]), "engine_up") == 1
    assert value_of(merge_snapshots([second.snapshot(), first.snapshot()]), "engine_up") == 0


def test_one_snapshot_stays_as_it_is_and_all_series_survive_the_wire() -> None:
    snapshot = frontend(5, 3)
    assert merge_snapshots([snapshot]) == snapshot
    assert decode_snapshot(encode_snapshot(snapshot)) == snapshot


def test_the_dead_frontends_requests_count_as_failed() -> None:
    ended = end_in_flight(frontend(5, 3))
    assert value_of(ended, "requests_in_flight") == 0
    assert value_of(ended, "requests_finished_total", finish_reason="error") == 2
    arrived = value_of(ended, "requests_arrived_total")
    assert arrived == 5
    rest = frontend(5, 3)
    changed = {m.name for m, before in zip(ended, rest, strict=True) if m != before}
    assert changed == {"isinglass_requests_in_flight", "isinglass_requests_finished_total"}


def test_only_gauges_stand_for_one_core() -> None:
    standing = {info.kind for info in METRICS.values() if not info.adds_up}
    assert {kind.value for kind in standing} == {"gauge"}
