"""The latencies that the GenAI conventions name, apart by operation: chats and completions.

Knows which latency is counted when, which is as in `request_metrics`, so that the operations add up
to the catalogue's own. Fed by the caller's thread, read by the one that exports.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace

from instrumentation.metrics import requests as request_metrics
from instrumentation.metrics.accumulators import HistogramFamily
from instrumentation.metrics.requests import exemplar_of
from instrumentation.metrics.types import Histogram
from instrumentation.otel import attributes as names
from instrumentation.record.request_records import RequestTimeline


class OperationLatencies:
    """Histograms of `names.GEN_AI_METRICS`, a series for each operation that has occurred.

    `buckets` replaces bounds by the catalogue's names, as for the catalogue's own.
    """

    def __init__(self, buckets: Mapping[str, tuple[float, ...]]) -> None:
        self._lock = threading.Lock()
        self._families = {
            info.name: HistogramFamily(
                replace(info, labels={names.OPERATION_NAME: ()}), buckets.get(info.name, ())
            )
            for info in (
                request_metrics.E2E_SECONDS,
                request_metrics.TIME_TO_FIRST_TOKEN,
                request_metrics.TIME_PER_OUTPUT_TOKEN,
            )
        }

    def observe_first_token(self, timeline: RequestTimeline, operation: str) -> None:
        """Count a request's time to first token, when that token is there."""
        self._observe(
            request_metrics.TIME_TO_FIRST_TOKEN.name, timeline.ttft_ns, timeline, operation
        )

    def observe_end(self, timeline: RequestTimeline, operation: str) -> None:
        """Count a request that has ended, whatever became of it."""
        self._observe(request_metrics.E2E_SECONDS.name, timeline.e2e_ns, timeline, operation)
        per_token_ns = timeline.mean_inter_token_ns
        self._observe(
            request_metrics.TIME_PER_OUTPUT_TOKEN.name,
            None if per_token_ns is None else round(per_token_ns),
            timeline,
            operation,
        )

    def snapshot(self, name: str, labels: dict[str, str]) -> list[Histogram]:
        """One metric's series, by the catalogue's name, under further labels."""
        with self._lock:
            return self._families[name].snapshot(labels)

    def _observe(
        self, name: str, value_ns: int | None, timeline: RequestTimeline, operation: str
    ) -> None:
        if value_ns is None:
            return
        with self._lock:
            self._families[name].observe(
                value_ns, operation, exemplar=exemplar_of(value_ns, timeline.traceparent)
            )
