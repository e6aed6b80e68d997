"""The SDK's objects: exporters by protocol, resource, tracer providers.

Knows the SDK. Whatever a standard OTEL_* variable sets is read by the SDK itself: headers, TLS,
time-out, compression, resource attributes, sampler, limits, batch sizes.
"""

import os
from typing import Any

from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

from instrumentation.otel.attributes import DEFAULT_SERVICE_NAME
from instrumentation.otel.settings import GRPC, Target

_MAX_LINKS = 1024
"""A step links to every request that it served; the SDK's default of 128 would cut that short."""


def make_span_exporter(target: Target, *, timeout_s: float | None = None) -> SpanExporter:
    """An exporter of spans by the target's protocol.

    Raises:
        ImportError: the exporter of that protocol is not installed.
    """
    if target.protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # type: ignore[assignment]  # same interface
            OTLPSpanExporter,
        )
    return OTLPSpanExporter(**_arguments(target, timeout_s))


def make_metric_exporter(target: Target, *, timeout_s: float | None = None) -> MetricExporter:
    """An exporter of metrics by the target's protocol.

    Raises:
        ImportError: the exporter of that protocol is not installed.
    """
    if target.protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    else:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # type: ignore[assignment]  # same
            OTLPMetricExporter,
        )
    return OTLPMetricExporter(**_arguments(target, timeout_s))


def _arguments(target: Target, timeout_s: float | None) -> dict[str, Any]:
    given = {"endpoint": target.endpoint, "timeout": timeout_s}
    return {name: value for name, value in given.items() if value is not None}


def make_resource() -> Resource:
    """Who we are: the variables' resource, with a service name of our own where they have none."""
    resource = Resource.create({"process.pid": os.getpid()})
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: DEFAULT_SERVICE_NAME}))
    return resource


def make_tracer_providers(
    processor: SpanProcessor, resource: Resource
) -> tuple[TracerProvider, TracerProvider]:
    """The providers of request spans and of step spans, over one processor.

    Requests are sampled as OTEL_TRACES_SAMPLER says. Steps are not: which of them are exported is
    `trace_steps`'s choice, unless that variable turns all traces off.
    """
    own_limit = os.environ.get("OTEL_SPAN_LINK_COUNT_LIMIT")
    limits = SpanLimits() if own_limit else SpanLimits(max_links=_MAX_LINKS)
    requests = TracerProvider(resource=resource, shutdown_on_exit=False, span_limits=limits)
    requests.add_span_processor(processor)
    off = os.environ.get("OTEL_TRACES_SAMPLER", "").strip().lower().endswith("always_off")
    sampler: Sampler = requests.sampler if off else ALWAYS_ON
    steps = TracerProvider(
        resource=resource, shutdown_on_exit=False, span_limits=limits, sampler=sampler
    )
    steps.add_span_processor(processor)
    return requests, steps
