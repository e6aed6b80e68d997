"""How exporting one signal goes: counts, and a warning when it begins to fail.

Knows outcomes. Does not know how anything is exported. While it goes on failing nothing more is
logged: a receiver that is down for a day costs one line.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_LOGGER = logging.getLogger("isinglass.telemetry")

_NOISY_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.metric_exporter",
)
_capture = threading.local()


class ExportHealth:
    """Counts of one signal; callable from any thread.

    Attributes:
        num_errors: exports that failed.
        num_drops: spans (or, for metrics, batches) that were lost.
    """

    def __init__(self, signal: str, target: str) -> None:
        self.num_errors = 0
        self.num_drops = 0
        self._signal = signal
        self._target = target
        self._failing = False
        self._lock = threading.Lock()

    def failed(self, reason: str, *, num_lost: int) -> None:
        """An export failed; logs only the first of a row."""
        with self._lock:
            self.num_errors += 1
            self.num_drops += num_lost
            first, self._failing = not self._failing, True
        if first:
            _LOGGER.warning(
                "OpenTelemetry %s cannot be exported to %s: %s. The engine goes on; check the "
                "address, the protocol (OTEL_EXPORTER_OTLP_PROTOCOL) and the receiver.",
                self._signal,
                self._target,
                reason,
            )

    def succeeded(self) -> None:
        """An export came through."""
        with self._lock:
            recovered, self._failing = self._failing, False
        if recovered:
            _LOGGER.info("OpenTelemetry %s are exported again", self._signal)

    def dropped(self, count: int) -> None:
        """Spans were lost for want of room or at the end."""
        with self._lock:
            self.num_drops += count


class _ReasonFilter(logging.Filter):
    """Keeps what the exporters log in a thread that asked for it, instead of printing it."""

    def filter(self, record: logging.LogRecord) -> bool:
        reasons: list[str] | None = getattr(_capture, "reasons", None)
        if reasons is None:
            return True
        reasons.append(record.getMessage())
        return False


_REASON_FILTER = _ReasonFilter()


def capture_exporter_logs() -> None:
    """Let `reasons_of_failure` see what the exporters log; harmless when called twice."""
    for name in _NOISY_LOGGERS:
        logger = logging.getLogger(name)
        if _REASON_FILTER not in logger.filters:
            # In front, since the exporters' own filter swallows repetitions.
            logger.filters.insert(0, _REASON_FILTER)


@contextmanager
def reasons_of_failure() -> Iterator[list[str]]:
    """Collect what the exporters log in this thread meanwhile; the last line says the most."""
    reasons: list[str] = []
    _capture.reasons = reasons
    try:
        yield reasons
    finally:
        _capture.reasons = None


def last_reason(reasons: Sequence[str]) -> str:
    """What they say of a failure; the cause, where the last line names none, is in the first."""
    if not reasons:
        return "the exporter gave no reason"
    last = reasons[-1].rstrip(". ")
    if len(reasons) == 1 or "code:" in last:
        return last
    return f"{last} ({reasons[0].rstrip('. ')})"
