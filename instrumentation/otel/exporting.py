"""Sending spans away: a bounded queue, a thread, and an exporter that may fail.

Knows the SDK's batch processor and exporters. Does not know what the spans mean. Nothing here
raises into who ends a span, waits for a receiver, or grows without bound.
"""

import os
import threading
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from instrumentation.otel.health import ExportHealth, last_reason, reasons_of_failure

DEFAULT_MAX_QUEUE_SIZE = 8192
"""Spans that may wait for export, unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise: a slow request's
steps come all at once."""


class GuardedExporter(SpanExporter):
    """An exporter whose failures are counted rather than logged again and again."""

    def __init__(self, inner: SpanExporter, health: ExportHealth) -> None:
        self._inner = inner
        self._health = health
        self._lock = threading.Lock()
        self._num_pending = 0
        self._num_under_way = 0
        self._closed = False

    @property
    def num_pending(self) -> int:
        """Spans that wait for their turn."""
        return self._num_pending

    def reserve(self, limit: int) -> bool:
        """Count a span in; False, and it counts as lost, where `limit` of them wait already."""
        with self._lock:
            if self._num_pending < limit and not self._closed:
                self._num_pending += 1
                return True
        self._health.dropped(1)
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; never raises."""
        with self._lock:
            if self._closed:  # counted when it was closed
                return SpanExportResult.FAILURE
            self._num_pending -= len(spans)
            self._num_under_way += len(spans)
        result, reason = SpanExportResult.FAILURE, ""
        with reasons_of_failure() as reasons:
            try:
                result = self._inner.export(spans)
            except Exception as error:
                reason = repr(error)
        with self._lock:
            num_lost = 0 if self._closed else len(spans)  # else counted as lost already
            self._num_under_way -= num_lost
        if result is SpanExportResult.SUCCESS:
            self._health.succeeded()
        else:
            self._health.failed(reason or last_reason(reasons), num_lost=num_lost)
        return result

    def shutdown(self) -> None:
        """Give up what waits and what is under way; harmless when called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            num_lost = self._num_pending + self._num_under_way
            self._num_pending = self._num_under_way = 0
        if num_lost:
            self._health.dropped(num_lost)
        with reasons_of_failure():
            self._inner.shutdown()


class BoundedProcessor(BatchSpanProcessor):
    """The SDK's batch processor, which turns new spans away when it is full, and counts them."""

    def __init__(self, exporter: GuardedExporter) -> None:
        self._guarded = exporter
        configured = "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ
        self._limit = self._default_max_queue_size() if configured else DEFAULT_MAX_QUEUE_SIZE
        super().__init__(exporter, max_queue_size=self._limit)

    @property
    def is_crowded(self) -> bool:
        """Whether a producer that can wait should."""
        return self._guarded.num_pending * 4 > self._limit * 3

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span that has ended, if it is sampled and there is room."""
        context = span.context
        if (
            context is not None
            and context.trace_flags.sampled
            and self._guarded.reserve(self._limit)
        ):
            super().on_end(span)
