"""Does the receiver answer? Asked once at start-up, in the background.

Sends an empty batch of each signal with a short time-out: that goes through address, protocol, TLS
and headers, and leaves nothing behind at the receiver. A failure is logged and counted, no more.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.metrics.export import MetricsData

from instrumentation.otel.health import ExportHealth, last_reason, reasons_of_failure
from instrumentation.otel.provider import make_metric_exporter, make_span_exporter
from instrumentation.otel.settings import OtlpSettings, Target

TIMEOUT_S = 3.0


def start_self_test(
    settings: OtlpSettings, *, traces: ExportHealth, metrics: ExportHealth
) -> threading.Thread:
    """Begin the test; the thread ends by itself."""

    def test() -> None:
        if settings.traces is not None:
            _test(settings.traces, make_span_exporter, [], traces)
        if settings.metrics is not None:
            _test(settings.metrics, make_metric_exporter, MetricsData([]), metrics)

    thread = threading.Thread(target=test, name="isinglass-otel-selftest", daemon=True)
    thread.start()
    return thread


def _test(
    target: Target, make_exporter: Callable[..., Any], nothing: Any, health: ExportHealth
) -> None:
    with reasons_of_failure() as reasons:
        try:
            exporter = make_exporter(target, timeout_s=TIMEOUT_S)
            succeeded = exporter.export(nothing).name == "SUCCESS"
            exporter.shutdown()
        except Exception as error:
            succeeded = False
            reasons.append(repr(error))
    if succeeded:
        health.succeeded()
        return
    reason = last_reason(reasons)
    if "code:" not in reason:  # the HTTP exporter keeps the cause of a time-out to itself
        reason = _why_unreachable(target.shown) or reason
    health.failed(reason, num_lost=0)


def _why_unreachable(address: str) -> str | None:
    """Why no connection can be made, None if one can."""
    parts = urlsplit(address)
    with contextlib.suppress(ValueError):
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            with socket.create_connection((parts.hostname or "", port), timeout=TIMEOUT_S):
                return None
        except OSError as error:
            return f"no connection ({error})"
    return None
