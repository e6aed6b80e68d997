"""Snapshots of several frontends over one core, as one; and as bytes, to hand them around.

Knows which metrics add up (`MetricInfo.adds_up`). Does not know who the frontends are.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import msgspec

from instrumentation.metrics.info import METRICS, MetricInfo, MetricKind
from instrumentation.metrics.requests import REQUESTS_FINISHED, REQUESTS_IN_FLIGHT
from instrumentation.metrics.server import HTTP_IN_FLIGHT, HTTP_OUTCOMES, HTTP_REQUESTS, OTHER
from instrumentation.metrics.types import Counter, Gauge, Histogram, Metric


def merge_snapshots(snapshots: Iterable[Sequence[Metric]]) -> list[Metric]:
    """One snapshot: sums where a metric adds up, else what the first one says.

    Exemplars are kept where only one snapshot has the bucket's.
    """
    merged: dict[tuple[str, tuple[str, ...]], Metric] = {}
    for snapshot in snapshots:
        for metric in snapshot:
            key = (metric.name, tuple(metric.labels.values()))
            before = merged.get(key)
            if before is None:
                merged[key] = metric
            elif METRICS[metric.name].adds_up:
                merged[key] = _add(before, metric)
    return list(merged.values())


def regroup(
    series: Iterable[Metric], labels_of: Callable[[dict[str, str]], dict[str, str]]
) -> list[Metric]:
    """Series of one metric under other labels; those that come to have the same are added up."""
    grouped: dict[tuple[str, ...], Metric] = {}
    for metric in series:
        moved = dataclasses.replace(metric, labels=labels_of(metric.labels))
        key = tuple(moved.labels.values())
        grouped[key] = _add(grouped[key], moved) if key in grouped else moved
    return list(grouped.values())


def end_in_flight(snapshot: Sequence[Metric]) -> list[Metric]:
    """What a frontend that has died last said, with all that it had in flight counted as failed.

    Levels of its own are 0, and what it said of the core is left out: the living know better.
    """
    lost = sum(m.value for m in snapshot if _is(m, REQUESTS_IN_FLIGHT))
    lost_http = sum(m.value for m in snapshot if _is(m, HTTP_IN_FLIGHT))
    ended: list[Metric] = []
    for metric in snapshot:
        info = METRICS[metric.name]
        if info.kind is MetricKind.GAUGE:
            if not info.adds_up:
                continue
            assert isinstance(metric, Gauge)
            metric = dataclasses.replace(metric, value=0)
        elif _is(metric, REQUESTS_FINISHED) and metric.labels["finish_reason"] == "error":
            metric = dataclasses.replace(metric, value=metric.value + lost)
        elif _is(metric, HTTP_OUTCOMES) and metric.labels["outcome"] == "server_error":
            metric = dataclasses.replace(metric, value=metric.value + lost_http)
        ended.append(metric)
    if lost_http:  # by route and status nobody knows them any more
        (common,) = [m.labels for m in snapshot if _is(m, HTTP_IN_FLIGHT)]
        unknown = {"method": OTHER, "route": OTHER, "status": "500"}
        ended.append(Counter(HTTP_REQUESTS.name, common | unknown, lost_http))
    return ended


def encode_snapshot(snapshot: Sequence[Metric]) -> bytes:
    """The values, without exemplars."""
    return msgspec.msgpack.encode([_plain(metric) for metric in snapshot])


def decode_snapshot(data: bytes) -> list[Metric]:
    """What `encode_snapshot` made.

    Raises:
        msgspec.DecodeError: it did not.
    """
    return [
        _KINDS[kind](*values)
        for kind, *values in msgspec.msgpack.decode(data, type=list[list[Any]])
    ]


_KINDS: dict[str, type[Metric]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


def _is(metric: Metric, info: MetricInfo) -> TypeGuard[Counter | Gauge]:
    return metric.name == info.name


def _plain(metric: Metric) -> list[Any]:
    if isinstance(metric, Histogram):
        values = [metric.count, metric.sum, metric.buckets]
        return ["histogram", metric.name, metric.labels, *values]
    assert isinstance(metric, Counter | Gauge)
    kind = "counter" if isinstance(metric, Counter) else "gauge"
    return [kind, metric.name, metric.labels, metric.value]


def _add(one: Metric, other: Metric) -> Metric:
    if isinstance(one, Histogram):
        assert isinstance(other, Histogram)
        assert one.buckets.keys() == other.buckets.keys(), one.name
        buckets = {bound: count + other.buckets[bound] for bound, count in one.buckets.items()}
        exemplars = other.exemplars | one.exemplars
        return Histogram(
            one.name, one.labels, one.count + other.count, one.sum + other.sum, buckets, exemplars
        )
    assert isinstance(one, Counter | Gauge)
    assert isinstance(other, Counter | Gauge)
    return type(one)(one.name, one.labels, one.value + other.value)
