"""The scrape endpoint: snapshots as Prometheus text or OpenMetrics, over HTTP.

Knows the formats through `prometheus_client`, which is told of our numbers at scrape only. Does
not know how they are counted. A scrape never fails for an error of ours: all are counted, the first
is logged, and what can be shown is shown.
"""

import functools
import gzip
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from threading import Lock, Thread
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.exposition import ThreadingWSGIServer, choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as ClientExemplar

from instrumentation.metrics.info import METRICS, MetricInfo, MetricKind
from instrumentation.metrics.types import Counter, Gauge, Histogram, Metric

_IDLE_TIMEOUT_S = 10.0
_OPENMETRICS = "application/openmetrics-text"
_LOGGER = logging.getLogger("isinglass.telemetry")

Snapshot = Callable[[], Sequence[Metric]]
Translation = Callable[[Sequence[Metric]], Iterable[Family]]
_Part = TypeVar("_Part")


class SnapshotCollector(Collector):
    """Offers the snapshots of any number of engines to `prometheus_client`.

    Args:
        snapshots: one for each engine; series differ by their labels.
        translations: other names for the same values (see `vllm_names`).

    Attributes:
        num_errors: parts of scrapes that have failed; for `EngineMetrics.watch`.
        num_drops: nothing is ever lost.
    """

    def __init__(
        self, snapshots: Sequence[Snapshot], *, translations: Sequence[Translation] = ()
    ) -> None:
        self.num_errors = 0
        self.num_drops = 0
        self._snapshots = snapshots
        self._translations = translations
        self._lock = Lock()

    def collect(self) -> list[Family]:
        """All series as they stand; without the part that fails."""
        series: list[Metric] = []
        for snapshot in self._snapshots:
            series += self._parts(snapshot)
        families = self._parts(to_families, series)
        for translate in self._translations:
            families += self._parts(translate, series)
        return families

    def encode(self, encoder: Callable[[Collector], bytes]) -> bytes:
        """All series as they stand, in a format; without the families that cannot be written."""
        families = _Families(self.collect())
        try:
            return encoder(families)
        except Exception as error:
            self._count(error)
            return encoder(_Families(one for one in families if _can_be_written(one, encoder)))

    def _parts(self, make: Callable[..., Iterable[_Part]], *arguments: Any) -> list[_Part]:
        """What is made, as far as it can be."""
        parts: list[_Part] = []
        try:
            parts.extend(make(*arguments))
        except Exception as error:
            self._count(error)
        return parts

    def _count(self, error: Exception) -> None:
        with self._lock:  # scrapes may come at the same time
            self.num_errors += 1
            is_first = self.num_errors == 1
        if is_first:
            _LOGGER.error(
                "a part of /metrics could not be made (logged once, all are counted): %r",
                error,
                exc_info=error,
            )


class _Families(list[Family], Collector):
    """What has been collected, for an encoder to read."""

    def collect(self) -> Iterable[Family]:
        return self


def _can_be_written(one: Family, encoder: Callable[[Collector], bytes]) -> bool:
    try:
        encoder(_Families([one]))
    except Exception:  # which has been counted with all the others
        return False
    return True


class MetricsServer:
    """Serves `/metrics` on its own threads until it is closed.

    Raises:
        OSError: the address cannot be listened at.
    """

    def __init__(self, collector: SnapshotCollector, *, host: str, port: int) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server_class = type("_Server", (ThreadingWSGIServer,), {"address_family": family})
        self._server: WSGIServer = make_server(
            host, port, _application(collector), server_class, handler_class=_QuietHandler
        )
        self.host = host
        self.port: int = self._server.server_port
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where Prometheus finds it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening; harmless when called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _QuietHandler(WSGIRequestHandler):
    timeout = _IDLE_TIMEOUT_S
    """Of a connection that says nothing: it holds a thread and a file descriptor."""

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write nothing: a scrape every few seconds is no news."""


def _application(collector: SnapshotCollector) -> Callable[..., list[bytes]]:
    """The endpoint as a WSGI application."""

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        if environ["PATH_INFO"].rstrip("/") != "/metrics":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"Metrics are at /metrics.\n"]
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD")])
            return []
        body, headers = exposition(
            collector,
            accept=environ.get("HTTP_ACCEPT", ""),
            accept_encoding=environ.get("HTTP_ACCEPT_ENCODING", ""),
        )
        start_response("200 OK", [*headers, ("Content-Length", str(len(body)))])
        return [body] if environ["REQUEST_METHOD"] == "GET" else []

    return serve


def exposition(
    collector: SnapshotCollector, *, accept: str, accept_encoding: str = ""
) -> tuple[bytes, list[tuple[str, str]]]:
    """A scrape's body and headers, in the format and the encoding that the scraper asks for."""
    encode, content_type = choose_encoder(accept)
    if content_type.startswith(_OPENMETRICS):
        # All our names are valid as they are; the library's other escapings would replace the
        # colon of vLLM's names in the samples but not in their types.
        encode = functools.partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
        content_type = f"{_OPENMETRICS}; version=1.0.0; charset=utf-8"
    body = collector.encode(encode)
    headers = [("Content-Type", content_type)]
    if "gzip" in accept_encoding:
        body = gzip.compress(body, compresslevel=1)
        headers.append(("Content-Encoding", "gzip"))
    return body, headers


def to_families(series: Iterable[Metric]) -> list[Family]:
    """Our series in the client library's form, grouped by metric in the catalogue's order."""
    by_name: dict[str, list[Metric]] = {}
    for metric in series:
        by_name.setdefault(metric.name, []).append(metric)
    return [family(METRICS[name], metrics) for name, metrics in by_name.items() if name in METRICS]


def family(info: MetricInfo, series: Sequence[Metric], *, name: str | None = None) -> Family:
    """One metric's series, under its own name or another."""
    name, help_text = name or info.name, info.help + "."
    if not series:
        series, labels = (), []
    else:
        labels = list(series[0].labels)
    result: Any
    if info.kind is MetricKind.COUNTER:
        result = CounterMetricFamily(name, help_text, labels=labels)
    elif info.kind is MetricKind.GAUGE:
        result = GaugeMetricFamily(name, help_text, labels=labels)
    else:
        result = HistogramMetricFamily(name, help_text, labels=labels)
    for metric in series:
        values = list(metric.labels.values())
        if isinstance(metric, Histogram):
            result.add_metric(values, _buckets(metric), sum_value=metric.sum)
        else:
            assert isinstance(metric, Counter | Gauge)
            result.add_metric(values, metric.value)
    return result


def _buckets(histogram: Histogram) -> list[tuple[Any, ...]]:
    """Bounds and cumulative counts, with exemplars where there are any."""
    buckets: list[tuple[Any, ...]] = []
    for bound, count in histogram.buckets.items():
        exemplar = histogram.exemplars.get(bound)
        if exemplar is None:
            buckets.append((bound, count))
            continue
        labels = {"trace_id": exemplar.trace_id, "span_id": exemplar.span_id}
        client = ClientExemplar(labels, exemplar.value, exemplar.wall_ns / 1e9)
        buckets.append((bound, count, client))
    return buckets
