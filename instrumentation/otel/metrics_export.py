"""Metrics over OTLP: the snapshot that every reader gets, in OpenTelemetry's shape.

Knows the two shapes. Does not count anything, so its values are those of Prometheus and of
`LLM.get_metrics()`. Always cumulative since start-up, with the catalogue's bucket bounds.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.metrics.export import Gauge as OtlpGauge
from opentelemetry.sdk.metrics.export import Histogram as OtlpHistogram
from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
from opentelemetry.sdk.metrics.export import Sum as OtlpSum
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from instrumentation.metrics.info import METRICS
from instrumentation.metrics.types import Counter, Gauge, Histogram, Metric
from instrumentation.otel import attributes as names
from instrumentation.otel.health import ExportHealth, last_reason, reasons_of_failure
from instrumentation.otel.operations import OperationLatencies

_LOGGER = logging.getLogger("isinglass.telemetry")
_CUMULATIVE = AggregationTemporality.CUMULATIVE


def to_otlp(
    metrics: Iterable[Metric],
    resource: Resource,
    *,
    start_ns: int,
    now_ns: int,
    gen_ai_attributes: dict[str, str],
    latencies: OperationLatencies,
) -> MetricsData:
    """Convert a snapshot; times are wall clock. Series of one name become points of one metric.

    What the GenAI conventions name comes a second time, from `latencies`.
    """
    by_name: dict[str, list[Metric]] = {}
    for metric in metrics:
        by_name.setdefault(metric.name, []).append(metric)
    converted = []
    for name, series in by_name.items():
        info = METRICS.get(name)
        described = ("", "") if info is None else (info.help, names.ucum(info.unit))
        converted.append(_metric(name, described, series, start_ns, now_ns))
        alias = names.GEN_AI_METRICS.get(name)
        if alias is not None:
            by_operation = latencies.snapshot(name, series[0].labels | gen_ai_attributes)
            if by_operation:
                converted.append(_metric(alias, described, by_operation, start_ns, now_ns))
    scope = ScopeMetrics(InstrumentationScope(names.SCOPE), converted, names.SCHEMA_URL)
    return MetricsData([ResourceMetrics(resource, [scope], resource.schema_url)])


def _metric(
    name: str,
    described: tuple[str, str],
    series: Sequence[Metric],
    start_ns: int,
    now_ns: int,
) -> OtlpMetric:
    """The series of one name, which are all of one kind."""
    data: OtlpHistogram | OtlpSum | OtlpGauge
    histograms = [one for one in series if isinstance(one, Histogram)]
    if histograms:
        points = [_distribution(one, start_ns, now_ns) for one in histograms]
        data = OtlpHistogram(points, _CUMULATIVE)
    else:
        numbers = [
            NumberDataPoint(one.labels, start_ns, now_ns, one.value)
            for one in series
            if isinstance(one, Counter | Gauge)
        ]
        is_sum = isinstance(series[0], Counter)
        data = OtlpSum(numbers, _CUMULATIVE, True) if is_sum else OtlpGauge(numbers)
    return OtlpMetric(name, described[0], described[1], data)


def _distribution(series: Histogram, start_ns: int, now_ns: int) -> HistogramDataPoint:
    """Cumulative counts by upper bound become counts between bounds."""
    bounds = [float(bound) for bound in series.buckets]
    cumulative = list(series.buckets.values())
    counts = [count - before for count, before in zip(cumulative, [0, *cumulative], strict=False)]
    return HistogramDataPoint(
        attributes=series.labels,
        start_time_unix_nano=start_ns,
        time_unix_nano=now_ns,
        count=series.count,
        sum=series.sum,
        bucket_counts=counts,
        explicit_bounds=bounds[:-1],
        exemplars=[
            Exemplar({}, one.value, one.wall_ns, int(one.span_id, 16), int(one.trace_id, 16))
            for one in series.exemplars.values()
        ],
        # Not kept. The wire has them as optional; the SDK's type has not.
        min=None,  # type: ignore[arg-type]
        max=None,  # type: ignore[arg-type]
    )


class MetricsExport:
    """A thread that exports the snapshot at intervals, and once more at the end."""

    def __init__(
        self,
        exporter: MetricExporter,
        collect: Callable[[], list[Metric]],
        resource: Resource,
        *,
        health: ExportHealth,
        interval_s: float,
        model: str,
        latencies: OperationLatencies,
    ) -> None:
        self._exporter = exporter
        self._collect = collect
        self._resource = resource
        self._health = health
        self._interval_s = interval_s
        self._gen_ai_attributes = {
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: model,
        }
        self._latencies = latencies
        self._start_ns = time.time_ns()
        self._closing = threading.Event()
        self._closed = False
        self._thread = threading.Thread(
            target=self._run, name="isinglass-otel-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ask for the last export; `join` waits for it."""
        self._closing.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the last export so long, then give it up."""
        self._thread.join(max(0.0, timeout_s))
        if not self._closed:
            self._closed = True
            with reasons_of_failure():
                self._exporter.shutdown()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        result, reason = MetricExportResult.FAILURE, ""
        with reasons_of_failure() as reasons:
            try:
                data = to_otlp(
                    self._collect(),
                    self._resource,
                    start_ns=self._start_ns,
                    now_ns=time.time_ns(),
                    gen_ai_attributes=self._gen_ai_attributes,
                    latencies=self._latencies,
                )
                result = self._exporter.export(data)
            except Exception as error:
                reason = repr(error)
        if result is MetricExportResult.SUCCESS:
            self._health.succeeded()
        else:
            self._health.failed(reason or last_reason(reasons), num_lost=1)
