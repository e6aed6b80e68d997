"""Snapshots of several frontends as one."""

from instrumentation.metrics.frontend import Metrics
from instrumentation.metrics.info import METRICS
from instrumentation.metrics.merge import (
    decode_snapshot,
    encode_snapshot,
    end_in_flight,
    merge_snapshots,
)
from instrumentation.metrics.requests import ArrivedRequest
from instrumentation.metrics.server import ServerMetrics
from instrumentation.metrics.types import Counter, Gauge, Histogram, Metric
from instrumentation.record.request_records import RequestTimeline


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
    gauges = [m for m in frontend(5, 3) if isinstance(m, Gauge) and not METRICS[m.name].adds_up]
    rest = [m for m in frontend(5, 3) if m not in gauges]
    assert gauges
    changed = {m.name for m, before in zip(ended, rest, strict=True) if m != before}
    assert changed == {"isinglass_requests_in_flight", "isinglass_requests_finished_total"}


def test_the_dead_frontends_http_requests_have_an_outcome_and_it_takes_up_nothing() -> None:
    server = ServerMetrics({"model_name": "m", "engine": "0"})
    for _ in range(5):
        server.observe_arrival()
    for number in range(2):
        server.observe_end(
            method="GET", route="/a", status=200, outcome="completed", duration_ns=number
        )
    alive = server.snapshot()
    assert value_of(alive, "frontend_resident_memory_bytes") > 0
    merged = merge_snapshots([alive, end_in_flight(alive), end_in_flight(alive)])
    assert value_of(merged, "http_requests_in_flight") == 3
    assert value_of(merged, "http_request_outcomes_total", outcome="server_error") == 6
    for name in ("http_request_outcomes_total", "http_requests_total"):
        ended = [m.value for m in merged if isinstance(m, Counter) and m.name.endswith(name)]
        assert value_of(merged, "http_requests_arrived_total") == sum(ended) + 3
    for name in ("frontend_resident_memory_bytes", "frontend_open_file_descriptors"):
        assert value_of(merged, name) == value_of(alive, name)


def test_what_a_dead_frontend_said_of_the_core_counts_no_more() -> None:
    dead, living = Metrics(), Metrics()
    dead.engine._up.set(1)
    living.engine._up.set(0)
    assert (
        value_of(merge_snapshots([end_in_flight(dead.snapshot()), living.snapshot()]), "engine_up")
        == 0
    )


def test_only_gauges_stand_for_one_core() -> None:
    standing = {info.kind for info in METRICS.values() if not info.adds_up}
    assert {kind.value for kind in standing} == {"gauge"}
