"""What a tracer of requests is told, and the one that does nothing with it.

Knows the moments of a request's life that are worth telling. Does not know spans nor receivers:
`engine.frontend.opentelemetry_tracer` is the tracer of an engine that has some.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.frontend.output_processor import ProcessedOutputs
from engine.types.messages import EngineCoreOutputs, EngineCoreReadyResponse
from engine.types.sampling import SamplingParams
from instrumentation import RequestTimeline, StartupPhase

if TYPE_CHECKING:
    from instrumentation.otel.http_spans import HttpSpan

TEXT_COMPLETION, CHAT = "text_completion", "chat"
"""What a request is for, in the words of the GenAI conventions."""


class HttpArrival(NamedTuple):
    """What is known of an HTTP request when it comes in."""

    method: str
    route: str | None
    """The template of its path, None where there is no such path."""
    path: str
    scheme: str
    protocol_version: str
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
    user_agent: str | None
    request_id: str
    begin_ns: int
    traceparent: str | None
    tracestate: str | None


class RequestTracer:
    """Traces nothing; what an engine has for which no receiver is configured."""

    is_on = False

    @property
    def num_errors(self) -> int:
        """Exports that have failed, and calls of this object that did."""
        return 0

    @property
    def num_drops(self) -> int:
        """Spans, batches of metrics and messages of the core that were lost."""
        return 0

    def begin(
        self,
        request_id: str,
        params: SamplingParams,
        *,
        arrival_ns: int,
        traceparent: str | None,
        operation: str,
    ) -> str | None:
        """A request goes to the core; returns the traceparent that it takes along."""
        return traceparent

    def expect(self, request_id: str, request_num: int) -> None:
        """One of the request's `n` samples goes to the core under that number."""

    def fail(self, request_id: str, error: BaseException) -> None:
        """A request that has begun did not get to the core; harmless where it did."""

    def reject(
        self,
        error: Exception,
        *,
        request_id: Any,
        params: Any,
        arrival_ns: Any,
        traceparent: Any,
        operation: str,
    ) -> None:
        """A request was refused before it began; arguments as they came, of any type."""

    def observe(self, message: EngineCoreOutputs, done: ProcessedOutputs) -> None:
        """One message from the core, and what became of it."""

    def observe_ended(self, timelines: Sequence[RequestTimeline]) -> None:
        """Requests that were given up."""

    def engine_is_ready(
        self,
        ready: EngineCoreReadyResponse,
        startup_spans_ns: Mapping[StartupPhase, tuple[int, int]],
    ) -> None:
        """The core has come up; the frontend's own phases of start-up, begin and end."""

    def begin_http(self, request: HttpArrival) -> "HttpSpan | None":
        """An HTTP request has come in; what comes back has the traceparent of its span."""
        return None

    def end_http(
        self,
        span: "HttpSpan",
        *,
        end_ns: int,
        status: int,
        num_bytes: int,
        error_type: str | None = None,
        is_ours: bool = False,
    ) -> None:
        """Its last byte has gone out, or its client has left.

        Args:
            error_type: what went wrong, None if nothing did.
            is_ours: whether that was the server's fault.
        """

    def close(self) -> None:
        """Export what there is, within about two seconds; harmless when called twice."""
