"""OpenTelemetry of one engine: what the frontend tells, and the thread that makes spans of it.

Knows the life of the exporting thread and of the SDK's objects. The caller's thread starts a
request's span and appends to a bounded inbox; it never waits for a receiver, a lock that is held
for long, or the exporting thread. The engine core takes no part.
"""

import atexit
import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import Tracer

from instrumentation.config import ObservabilityConfig
from instrumentation.histogram_buckets import parse_buckets
from instrumentation.metric_types import Metric
from instrumentation.otel import attributes as names
from instrumentation.otel.exporting import BoundedProcessor, GuardedExporter
from instrumentation.otel.health import ExportHealth, capture_exporter_logs
from instrumentation.otel.http_spans import HttpSpan, HttpSpans
from instrumentation.otel.metrics_export import MetricsExport
from instrumentation.otel.operations import OperationLatencies
from instrumentation.otel.provider import (
    make_metric_exporter,
    make_resource,
    make_span_exporter,
    make_tracer_providers,
)
from instrumentation.otel.request_spans import RequestSpan, RequestSpans
from instrumentation.otel.selftest import start_self_test
from instrumentation.otel.settings import OtlpSettings
from instrumentation.otel.startup_spans import StartupPhaseTimes, write_startup
from instrumentation.otel.step_spans import StepSpans
from instrumentation.records import RequestTimeline, StepRecord, WorkerStepRecord

_MAX_INTERVAL_S = 86_400.0
CLOSE_TIMEOUT_S = 2.0
"""What shutting down may wait for receivers, all signals together."""
_MAX_INBOX = 8192
_WAKE_AT = 512
_POLL_S = 0.25
_STEP_SHARES = {"off": 0.0, "sampled": 0.05, "all": 0.25}
"""Of one processor's time, for writing spans of steps; what does not fit in waits, or is lost."""
_STEPS_SHARE_OF_CLOSE = 0.5


class _Message(NamedTuple):
    """One message from the core."""

    step: StepRecord | None
    worker: WorkerStepRecord | None
    timelines: Sequence[RequestTimeline]


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
        self._slow_ns: float = float("inf")
        if config.trace_slow_request_s is not None:
            self._slow_ns = config.trace_slow_request_s * 1e9
        shown = [
            "" if target is None else target.shown for target in (settings.traces, settings.metrics)
        ]
        self._trace_health = ExportHealth("traces", shown[0])
        self._metric_health = ExportHealth("metrics", shown[1])
        self._num_inbox_drops = 0
        self._exporter: GuardedExporter | None = None
        self._processor: BoundedProcessor | None = None
        resource = make_resource()
        tracers = self._make_tracers(span_exporter, provider, resource, version)
        self._step_mode = "off" if tracers is None else config.trace_steps
        self._tracer = None if tracers is None else tracers[0]
        self._requests: RequestSpans | None = None
        self._steps: StepSpans | None = None
        self._http: HttpSpans | None = None
        if tracers is not None:
            self._http = HttpSpans(tracers[0])
            self._requests = RequestSpans(tracers[0], parent_of=self._http.context_of)
            self._steps = StepSpans(
                tracers[1],
                self._requests.context_of,
                mode=self._step_mode,
            )
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
        self._inbox: deque[Callable[[], None] | _Message] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._pid = os.getpid()
        self._close_lock = threading.Lock()
        self._closed = False
        self._close_timeout_s = CLOSE_TIMEOUT_S
        self._thread = threading.Thread(target=self._run, name="isinglass-otel", daemon=True)
        self._thread.start()
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
    ) -> tuple[Tracer, Tracer] | None:
        """Tracers of requests and of steps, None where spans go nowhere."""
        scope: dict[str, Any] = {
            "instrumenting_module_name": names.SCOPE,
            "instrumenting_library_version": version,
            "schema_url": names.SCHEMA_URL,
        }
        if provider is not None:
            tracer = provider.get_tracer(**scope)
            return tracer, tracer
        if exporter is None:
            return None
        self._exporter = GuardedExporter(exporter, self._trace_health)
        self._processor = BoundedProcessor(self._exporter)
        requests, steps = make_tracer_providers(self._processor, resource)
        return requests.get_tracer(**scope), steps.get_tracer(**scope)

    # -- the caller's thread ---------------------------------------------------------------------

    @property
    def num_errors(self) -> int:
        """Exports that have failed, of both signals."""
        return self._trace_health.num_errors + self._metric_health.num_errors

    @property
    def num_drops(self) -> int:
        """Spans, steps, batches of metrics and messages of the core that were lost."""
        num_drops = self._num_inbox_drops + (0 if self._steps is None else self._steps.num_drops)
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
        if self._http is None or self._closed:
            return None
        return self._http.begin(
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
        http = self._http
        assert http is not None
        self._put(lambda: http.end(exchange, attributes, end_ns=end_ns, error=error))

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
        if self._requests is None:
            return None
        return self._requests.begin(
            attributes, arrival_ns=arrival_ns, num_samples=num_samples, traceparent=traceparent
        )

    def expect(self, request: RequestSpan, request_num: int) -> None:
        """A sample of the request goes to the core under that number."""
        assert self._requests is not None
        self._requests.expect(request, request_num)

    def fail(self, request: RequestSpan, error_type: str, message: str) -> None:
        """End the span of a request that was refused or lost on its way in."""
        assert self._requests is not None
        self._requests.fail(request, error_type, message)

    def observe(
        self,
        step: StepRecord | None,
        worker: WorkerStepRecord | None,
        timelines: Sequence[RequestTimeline],
    ) -> None:
        """One message from the core: a step, and the requests that ended in it."""
        if self._requests is None:
            return
        if step is not None and self._step_mode == "off" and not step.num_context_requests:
            step = None  # nothing would become of it
        if step is None and not timelines:
            return
        # Requests' ends are never turned away: a span that does not end is never seen.
        if len(self._inbox) >= _MAX_INBOX and step is not None:
            self._num_inbox_drops += 1
            step = worker = None
            if not timelines:
                return
        self._put(_Message(step, worker, tuple(timelines)))

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
        tracer, kept = self._tracer, list(phases)
        if tracer is not None:
            self._put(lambda: write_startup(tracer, kept, model=self.model))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Export what there is, as far as that goes in so much time; harmless when called twice."""
        if os.getpid() != self._pid:  # a fork's end is not the engine's
            return
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._close_timeout_s = timeout_s
        deadline = time.monotonic() + timeout_s
        if self._metrics is not None:
            self._metrics.close()
        self._closing.set()
        self._wake.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._exporter is not None:
            self._exporter.shutdown()
        if self._metrics is not None:
            self._metrics.join(deadline - time.monotonic())

    def _put(self, item: Callable[[], None] | _Message) -> None:
        self._inbox.append(item)
        if len(self._inbox) >= _WAKE_AT:
            self._wake.set()

    # -- the exporting thread --------------------------------------------------------------------

    def _run(self) -> None:
        share, before = _STEP_SHARES[self._step_mode], time.monotonic()
        while not self._closing.is_set():
            self._wake.wait(_POLL_S)
            self._wake.clear()
            self._drain()
            now = time.monotonic()
            self._export_steps(share * (now - before))
            before = now
        self._drain()
        if self._steps is not None:
            self._export_steps(self._close_timeout_s * _STEPS_SHARE_OF_CLOSE)
            self._steps.drop_waiting()
        if self._requests is not None:
            self._requests.fail_all("shutdown", "the engine was shut down")
        if self._http is not None:
            self._http.end_all("shutdown", end_ns=time.monotonic_ns())
        if self._processor is not None:
            self._processor.shutdown()  # may block; `close` does not wait for ever

    def _drain(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            try:
                self._process(item) if isinstance(item, _Message) else item()
            except Exception as error:
                # One malformed record must not cost all later ones.
                self._trace_health.failed(f"a span could not be made: {error!r}", num_lost=1)

    def _process(self, message: _Message) -> None:
        requests, steps = self._requests, self._steps
        assert requests is not None
        assert steps is not None
        step = message.step
        if step is not None:
            if step.num_context_requests:
                requests.add_chunks(
                    step.scheduled, step.first_tokens, step=step.step, begin_ns=step.begin_ns
                )
            steps.observe(step, message.worker)
        remarkable = [one for one in message.timelines if self._is_remarkable(one)]
        if remarkable:
            steps.export_served(
                {one.request_num for one in remarkable},
                since_ns=min(one.arrival_ns for one in remarkable),
            )
        for timeline in message.timelines:
            requests.end(timeline)

    def _is_remarkable(self, timeline: RequestTimeline) -> bool:
        return (
            timeline.e2e_ns >= self._slow_ns
            or bool(timeline.preemptions)
            or timeline.finish_reason == "error"
        )

    def _export_steps(self, budget_s: float) -> None:
        """Write spans of steps for so long, unless the exporter is behind already."""
        steps, processor = self._steps, self._processor
        if steps is None:
            return
        until = time.monotonic() + budget_s
        while True:
            try:
                steps.export_waiting(
                    lambda: time.monotonic() < until and not (processor and processor.is_crowded)
                )
                return
            except Exception as error:
                # A processor or sampler of the application: the step is lost, the others are not.
                self._trace_health.failed(f"a step's span could not be made: {error!r}", num_lost=1)


def _interval_s() -> float:
    """OTEL_METRIC_EXPORT_INTERVAL, which is in milliseconds; a minute without it."""
    with contextlib.suppress(ValueError):
        interval_s = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "60000")) / 1000
        if math.isfinite(interval_s):
            return min(max(0.01, interval_s), _MAX_INTERVAL_S)
    return 60.0
