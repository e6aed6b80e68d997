"""Whether and where to export: the engine's options and the standard OTEL_* variables.

Knows which signals have a receiver and by which protocol it is reached. Imports nothing of
OpenTelemetry, since most engines export nothing. Headers, TLS, time-outs, compression, resource,
sampler and batch sizes are left to the SDK, which reads their variables itself.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from instrumentation.config import ObservabilityConfig

GRPC, HTTP = "grpc", "http/protobuf"
_HTTP_PORT = 4318
_SIGNALS = ("TRACES", "METRICS")


@dataclass(frozen=True, slots=True)
class Target:
    """A receiver of one signal; without an endpoint the exporter reads the variables itself."""

    protocol: str
    endpoint: str | None
    shown: str
    """The address, for messages."""


@dataclass(frozen=True, slots=True)
class OtlpSettings:
    """The receivers of both signals, None where a signal is not exported."""

    traces: Target | None
    metrics: Target | None

    @property
    def exports_anything(self) -> bool:
        """Whether any signal has a receiver."""
        return self.traces is not None or self.metrics is not None


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Whether OTEL_SDK_DISABLED turns everything off."""
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def read_settings(config: ObservabilityConfig, environ: Mapping[str, str]) -> OtlpSettings:
    """Decide where each signal goes.

    The most specific address wins: `OTEL_EXPORTER_OTLP_<SIGNAL>_ENDPOINT`, except that the option
    `otlp_traces_endpoint` comes first for traces; then the option, then
    `OTEL_EXPORTER_OTLP_ENDPOINT`. `OTEL_<SIGNAL>_EXPORTER=none` turns a signal off.

    Raises:
        ValueError: an address or protocol that cannot be used.
    """
    if is_disabled(environ):
        return OtlpSettings(None, None)
    traces, metrics = (_target(signal, config, environ) for signal in _SIGNALS)
    return OtlpSettings(traces, metrics)


def application_provider() -> Any | None:
    """The tracer provider that the application has set for its process, if it has.

    Imports nothing: an application that has set one has imported OpenTelemetry.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    unset = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)
    return None if isinstance(provider, unset) else provider


def _target(signal: str, config: ObservabilityConfig, environ: Mapping[str, str]) -> Target | None:
    exporters = environ.get(f"OTEL_{signal}_EXPORTER", "otlp").strip().lower()
    if exporters == "none":
        return None
    option = config.otlp_traces_endpoint
    own = environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "").strip()
    common = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    if option and (signal == "TRACES" or not own):
        if urlsplit(option).scheme not in ("http", "https"):
            raise ValueError(
                f"otlp_traces_endpoint is {option!r}; it must begin with http:// or https:// "
                "(TLS), as http://localhost:4317"
            )
        protocol = _protocol(signal, option, environ)
        endpoint = option if protocol == GRPC else _signal_url(option, signal)
        return Target(protocol, endpoint, endpoint)
    address = own or common
    if not address:
        return None
    return Target(_protocol(signal, address, environ), None, address)


def _protocol(signal: str, address: str, environ: Mapping[str, str]) -> str:
    """The variables' choice; without one HTTP for port 4318 or a path, gRPC otherwise."""
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        chosen = environ.get(name, "").strip().lower()
        if chosen:
            if chosen not in (GRPC, HTTP):
                raise ValueError(f"{name} is {chosen!r}; it must be {GRPC} or {HTTP}")
            return chosen
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"the OTLP endpoint {address!r} has no valid port: {error}") from error
    has_path = bool(parts.netloc) and parts.path.strip("/") != ""
    return HTTP if port == _HTTP_PORT or has_path else GRPC


def _signal_url(endpoint: str, signal: str) -> str:
    """The URL of one signal; an address that names one signal's path stands for the others'."""
    base = endpoint.rstrip("/")
    for other in _SIGNALS:
        base = base.removesuffix(f"/v1/{other.lower()}")
    return f"{base}/v1/{signal.lower()}"
