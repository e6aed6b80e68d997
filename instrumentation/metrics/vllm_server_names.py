"""A server's values under the names that vLLM's server has: `http_*`, and Prometheus' own
`process_*`.

Knows the labels that go with them: a route is a `handler`, a path that no route has is `none`, a
status is `2xx`; what probes and scrapers ask for is not counted. There is no label of a model. Of
several frontends these are the sums, so `process_*` is what all their processes take together; the
engine core's is not in it, as with vLLM.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric as Family
from prometheus_client.core import SummaryMetricFamily

from instrumentation.metrics import server as server_metrics
from instrumentation.metrics.info import MetricInfo
from instrumentation.metrics.merge import regroup
from instrumentation.metrics.prometheus import family
from instrumentation.metrics.types import Counter, Metric

PROCESS_NAMES: dict[str, MetricInfo] = {
    "process_cpu_seconds_total": server_metrics.FRONTEND_CPU,
    "process_resident_memory_bytes": server_metrics.FRONTEND_MEMORY,
    "process_virtual_memory_bytes": server_metrics.FRONTEND_VIRTUAL_MEMORY,
    "process_open_fds": server_metrics.FRONTEND_DESCRIPTORS,
    "process_max_fds": server_metrics.FRONTEND_MAX_DESCRIPTORS,
    "process_start_time_seconds": server_metrics.FRONTEND_START,
}
HTTP_NAMES: dict[str, MetricInfo] = {
    "http_requests_total": server_metrics.HTTP_REQUESTS,
    "http_request_duration_seconds": server_metrics.HTTP_SECONDS,
    "http_request_duration_highr_seconds": server_metrics.HTTP_SECONDS,
    "http_request_size_bytes": server_metrics.HTTP_REQUEST_BYTES,
    "http_response_size_bytes": server_metrics.HTTP_RESPONSE_BYTES,
}
LEFT_OUT = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
"""Routes that `HTTP_NAMES` do not count, as with vLLM."""


def server_families(by_name: Mapping[str, Sequence[Metric]]) -> Iterable[Family]:
    """The families of these names that the series, by our names, make up."""
    for name, info in PROCESS_NAMES.items():
        if info.name in by_name:
            yield family(info, regroup(by_name[info.name], lambda labels: {}), name=name)
    num_requests = _counted(by_name, server_metrics.HTTP_REQUESTS)
    for name, info in HTTP_NAMES.items():
        series = _counted(by_name, info)
        if not series:
            continue
        if name.endswith("_size_bytes"):
            yield _sizes(name, info, regroup(series, _handler), regroup(num_requests, _handler))
        elif name.endswith("_highr_seconds"):
            yield family(info, regroup(series, lambda labels: {}), name=name)
        else:
            yield family(info, regroup(series, _labels), name=name)


def _counted(by_name: Mapping[str, Sequence[Metric]], info: MetricInfo) -> list[Metric]:
    return [one for one in by_name.get(info.name, ()) if one.labels["route"] not in LEFT_OUT]


def _handler(labels: dict[str, str]) -> dict[str, str]:
    route = labels["route"]
    return {"handler": "none" if route == server_metrics.OTHER else route}


def _labels(labels: dict[str, str]) -> dict[str, str]:
    moved = {**_handler(labels), "method": labels["method"]}
    status = labels.get("status")
    if status is not None:  # a number, but where there are more series than are kept
        moved["status"] = f"{status[0]}xx" if status.isdigit() else status
    return moved


def _sizes(name: str, info: MetricInfo, sums: Sequence[Metric], counts: Sequence[Metric]) -> Family:
    """Bytes and requests by handler; a handler may have sent bytes and ended no request yet."""
    num_requests = {one.labels["handler"]: one.value for one in counts if isinstance(one, Counter)}
    result: Any = SummaryMetricFamily(name, info.help + ".", labels=["handler"])
    for one in sums:
        assert isinstance(one, Counter)
        handler = one.labels["handler"]
        result.add_metric([handler], count_value=num_requests.get(handler, 0), sum_value=one.value)
    return result
