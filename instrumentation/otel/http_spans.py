"""HTTP server spans: what came over HTTP, above the request spans of the engine.

Knows the trace's headers and explicit times. Does not know HTTP's messages. A span begins on the
event loop, since its identity travels on with the request, and is ended by the exporting thread.
"""

from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from instrumentation.otel import attributes as names
from instrumentation.otel.request_spans import traceparent_of, wall_offset_ns

_PROPAGATOR = TraceContextTextMapPropagator()


class HttpSpan:
    """One exchange's span while it is open; `traceparent` is what its children are given."""

    __slots__ = ("offset_ns", "span", "traceparent")

    def __init__(self, span: Span, *, offset_ns: int) -> None:
        self.span = span
        self.offset_ns = offset_ns
        self.traceparent = traceparent_of(span.get_span_context())


class HttpSpans:
    """All open exchanges. A request span whose traceparent is one of theirs becomes its child, and
    keeps the trace state, which a traceparent alone does not carry."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[str, HttpSpan] = {}

    def begin(
        self,
        name: str,
        attributes: Mapping[str, Any],
        *,
        begin_ns: int,
        traceparent: str | None,
        tracestate: str | None,
    ) -> HttpSpan:
        """Open a span below the client's trace, or as a trace of its own."""
        headers = {"traceparent": traceparent, "tracestate": tracestate}
        carrier = {name: value for name, value in headers.items() if value is not None}
        offset_ns = wall_offset_ns()
        span = self._tracer.start_span(
            name,
            context=_PROPAGATOR.extract(carrier, Context()),
            kind=SpanKind.SERVER,
            attributes=dict(attributes),
            start_time=begin_ns + offset_ns,
        )
        exchange = HttpSpan(span, offset_ns=offset_ns)
        if exchange.traceparent is not None:
            self._open[exchange.traceparent] = exchange
        return exchange

    def parent_of(self, traceparent: str) -> tuple[Context, int] | None:
        """The open exchange that a traceparent names, as a parent, and the offset of its times in
        ns; None if it names none."""
        exchange = self._open.get(traceparent)
        if exchange is None:
            return None
        return set_span_in_context(exchange.span, Context()), exchange.offset_ns

    def end(
        self, exchange: HttpSpan, attributes: Mapping[str, Any], *, end_ns: int, error: str | None
    ) -> None:
        """End a span; `error` is what failed on our side, None for whatever the client did."""
        if exchange.traceparent is not None:
            self._open.pop(exchange.traceparent, None)
        exchange.span.set_attributes(dict(attributes))
        if error is not None:
            exchange.span.set_status(Status(StatusCode.ERROR, error))
        exchange.span.end(end_ns + exchange.offset_ns)

    def end_all(self, error_type: str, *, end_ns: int) -> None:
        """End all that are open: nothing can be exported any more."""
        for exchange in list(self._open.values()):
            self.end(exchange, {names.ERROR_TYPE: error_type}, end_ns=end_ns, error=error_type)
