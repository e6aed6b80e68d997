"""OpenTelemetry of one engine: what the frontend tells, and where it goes.

Knows the life of the SDK's objects. The caller's thread starts a request's span and leaves the rest
to `SpanThread`; it never waits for a receiver, a lock that is held for long, or that thread. The
engine core takes no part.
"""

import atexit
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.trace.export import SpanExporter

from instrumentation.config import ObservabilityConfig
from instrumentation.metrics.buckets import parse_buckets
from instrumentation.metrics.types import Metric
from instrumentation.otel import attributes as names
from instrumentation.otel.exporting import BoundedProcessor, GuardedExporter
from instrumentation.otel.health import ExportHealth, capture_exporter_logs
from instrumentation.otel.http_spans import HttpSpan
from instrumentation.otel.metrics_export import MetricsExport
from instrumentation.otel.operations import OperationLatencies
from instrumentation.otel.provider import (
    make_metric_exporter,
    make_resource,
    make_span_exporter,
    make_tracer_providers,
)
from instrumentation.otel.request_spans import RequestSpan
from instrumentation.otel.selftest import start_self_test
from instrumentation.otel.settings import OtlpSettings, Target
from instrumentation.otel.span_thread import SpanThread, Tracers
from instrumentation.otel.startup_spans import StartupPhaseTimes, write_startup
from instrumentation.record.request_records import RequestTimeline
from instrumentation.record.step_records import StepRecord, WorkerStepRecord

_MAX_INTERVAL_S = 86_400.0
CLOSE_TIMEOUT_S = 2.0
"""What shutting down may wait for receivers, all signals together."""


class Telemetry:
    """Spans and metrics of one engine over OTLP, or spans through the application's own provider.

    Args:
        settings: the receivers.
        provider: the application's tracer provider; takes the spans where no receiver of our own
            is set for them by option.
        collect: takes a snapshot of the metrics, None where none are kept.
    """

    def __init__(
        self,
        config: ObservabilityConfig,
        settings: OtlpSettings,
        *,
        model: str,
        version: str,
        provider: Any | None = None,
        collect: Callable[[], list[Metric]] | None = None,
    ) -> None:
        capture_exporter_logs()
        # First what may fail, so that no thread is left behind.
        span_exporter = None
        if settings.traces is not None and provider is None:
            span_exporter = make_span_exporter(settings.traces)
        metric_exporter = None
        if settings.metrics is not None and collect is not None:
            metric_exporter = make_metric_exporter(settings.metrics)
        self.model = model
        self._trace_health = _health("traces", settings.traces)
        self._metric_health = _health("metrics", settings.metrics)
        self._exporter: GuardedExporter | None = None
        self._processor: BoundedProcessor | None = None
        resource = make_resource()
        tracers = self._make_tracers(span_exporter, provider, resource, version)
        self._metrics: MetricsExport | None = None
        self._latencies: OperationLatencies | None = None
        if metric_exporter is not None and collect is not None:
            self._latencies = OperationLatencies(parse_buckets(config.custom_histogram_buckets))
            self._metrics = MetricsExport(
                metric_exporter,
                collect,
                resource,
                health=self._metric_health,
                interval_s=_interval_s(),
                model=model,
                latencies=self._latencies,
            )
        self._pid = os.getpid()
        self._close_lock = threading.Lock()
        self._closed = False
        self._spans: SpanThread | None = None
        if tracers is not None:
            slow_s = config.trace_slow_request_s
            self._spans = SpanThread(
                tracers,
                self._processor,
                self._trace_health,
                step_mode=config.trace_steps,
                slow_ns=math.inf if slow_s is None else slow_s * 1e9,
            )
        atexit.register(self.close)
        used = OtlpSettings(
            settings.traces if self._exporter is not None else None,
            settings.metrics if self._metrics is not None else None,
        )
        self.self_test = start_self_test(
            used, traces=self._trace_health, metrics=self._metric_health
        )

    def _make_tracers(
        self, exporter: SpanExporter | None, provider: Any | None, resource: Any, version: str
    ) -> Tracers | None:
        """Tracers of requests and of steps, None where spans go nowhere."""
        scope: dict[str, Any] = {
            "instrumenting_module_name": names.SCOPE,
            "instrumenting_library_version": version,
            "schema_url": names.SCHEMA_URL,
        }
        if provider is not None:
            tracer = provider.get_tracer(**scope)
            return Tracers(tracer, tracer)
        if exporter is None:
            return None
        self._exporter = GuardedExporter(exporter, self._trace_health)
        self._processor = BoundedProcessor(self._exporter)
        requests, steps = make_tracer_providers(self._processor, resource)
        return Tracers(requests.get_tracer(**scope), steps.get_tracer(**scope))

    @property
    def num_errors(self) -> int:
        """Exports that have failed, of both signals."""
        return self._trace_health.num_errors + self._metric_health.num_errors

    @property
    def num_drops(self) -> int:
        """Spans, steps, batches of metrics and messages of the core that were lost."""
        num_drops = 0 if self._spans is None else self._spans.num_drops
        return num_drops + self._trace_health.num_drops + self._metric_health.num_drops

    def begin_http(
        self,
        name: str,
        attributes: Mapping[str, Any],
        *,
        begin_ns: int,
        traceparent: str | None = None,
        tracestate: str | None = None,
    ) -> HttpSpan | None:
        """Open the span of an HTTP exchange; None where spans go nowhere."""
        if self._spans is None or self._closed:
            return None
        return self._spans.http.begin(
            name,
            attributes,
            begin_ns=begin_ns,
            traceparent=traceparent,
            tracestate=tracestate,
        )

    def end_http(
        self, exchange: HttpSpan, attributes: Mapping[str, Any], *, end_ns: int, error: str | None
    ) -> None:
        """End it; `error` is what failed on our side."""
        assert self._spans is not None
        http = self._spans.http
        self._spans.put(lambda: http.end(exchange, attributes, end_ns=end_ns, error=error))

    def begin_request(
        self,
        attributes: Mapping[str, Any],
        *,
        arrival_ns: int,
        num_samples: int = 1,
        traceparent: str | None = None,
    ) -> RequestSpan | None:
        """Open a request's span; None where spans go nowhere.

        The attributes must have `gen_ai.operation.name` and `gen_ai.request.model`.
        """
        if self._spans is None:
            return None
        return self._spans.requests.begin(
            attributes, arrival_ns=arrival_ns, num_samples=num_samples, traceparent=traceparent
        )

    def expect(self, request: RequestSpan, request_num: int) -> None:
        """A sample of the request goes to the core under that number."""
        assert self._spans is not None
        self._spans.requests.expect(request, request_num)

    def fail(self, request: RequestSpan, error_type: str, message: str) -> None:
        """End the span of a request that was refused or lost on its way in."""
        assert self._spans is not None
        self._spans.requests.fail(request, error_type, message)

    def observe(
        self,
        step: StepRecord | None,
        worker: WorkerStepRecord | None,
        timelines: Sequence[RequestTimeline],
    ) -> None:
        """One message from the core: a step, and the requests that ended in it."""
        if self._spans is not None:
            self._spans.observe(step, worker, timelines)

    def count_first_token(self, timeline: RequestTimeline, operation: str) -> None:
        """A request of an operation has got its first token."""
        if self._latencies is not None:
            self._latencies.observe_first_token(timeline, operation)

    def count_end(self, timeline: RequestTimeline, operation: str) -> None:
        """A request of an operation has ended."""
        if self._latencies is not None:
            self._latencies.observe_end(timeline, operation)

    def started(self, phases: Iterable[StartupPhaseTimes]) -> None:
        """Start-up is over; write its trace."""
        kept = list(phases)
        if self._spans is not None:
            tracer = self._spans.tracers.requests
            self._spans.put(lambda: write_startup(tracer, kept, model=self.model))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Export what there is, as far as that goes in so much time; harmless when called twice."""
        if os.getpid() != self._pid:  # a fork's end is not the engine's
            return
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        deadline = time.monotonic() + timeout_s
        if self._metrics is not None:
            self._metrics.close()
        if self._spans is not None:
            self._spans.close(timeout_s, until=deadline)
        if self._exporter is not None:
            self._exporter.shutdown()
        if self._metrics is not None:
            self._metrics.join(deadline - time.monotonic())


def _health(signal: str, target: Target | None) -> ExportHealth:
    return ExportHealth(signal, "" if target is None else target.shown)


def _interval_s() -> float:
    """OTEL_METRIC_EXPORT_INTERVAL, which is in milliseconds; a minute without it."""
    with contextlib.suppress(ValueError):
        interval_s = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "60000")) / 1000
        if math.isfinite(interval_s):
            return min(max(0.01, interval_s), _MAX_INTERVAL_S)
    return 60.0
