"""Tells OpenTelemetry of requests: the seam between the engine's types and `instrumentation.otel`.

Knows `SamplingParams` and messages, and which attributes they make. Does not know spans, receivers
or the SDK, which is imported only where something is configured. What fails here is counted, logged
once, and never reaches a request.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from engine.errors import ConfigError
from engine.frontend.output_processor import ProcessedOutputs
from engine.frontend.request_tracer import TEXT_COMPLETION, HttpArrival, RequestTracer
from engine.log import get_logger
from engine.types.messages import EngineCoreOutputs, EngineCoreReadyResponse
from engine.types.sampling import SamplingParams
from engine.version import __version__
from instrumentation import Metric, ObservabilityConfig, RequestTimeline, Role, StartupPhase
from instrumentation.otel.setup import open_telemetry

if TYPE_CHECKING:
    from instrumentation.otel.http_spans import HttpSpan
    from instrumentation.otel.request_spans import RequestSpan
    from instrumentation.otel.telemetry import Telemetry

logger = get_logger(__name__)

_HTTP_METHODS = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"}
)

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def _fenced(
    call: Callable[Concatenate["OpenTelemetryTracer", _Arguments], _Answer],
) -> Callable[Concatenate["OpenTelemetryTracer", _Arguments], _Answer | None]:
    """Count what a method raises; the first error is logged, and the answer is None."""

    @functools.wraps(call)
    def fenced(
        self: "OpenTelemetryTracer", /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Answer | None:
        try:
            return call(self, *args, **kwargs)
        except Exception as error:
            self.count_error(error)
            return None

    return fenced


class OpenTelemetryTracer(RequestTracer):
    """Traces through `instrumentation.otel`."""

    is_on = True

    def __init__(self, telemetry: "Telemetry") -> None:
        self.telemetry = telemetry
        # Span if there is one, samples still to be sent, operation.
        self._begun: dict[str, tuple[RequestSpan | None, int, str]] = {}
        self._operations: dict[int, str] = {}  # by number, until the end
        self._num_failed_calls = 0

    @property
    def num_errors(self) -> int:
        return self.telemetry.num_errors + self._num_failed_calls

    @property
    def num_drops(self) -> int:
        return self.telemetry.num_drops

    def count_error(self, error: Exception) -> None:
        """One of our own calls failed."""
        self._num_failed_calls += 1
        if self._num_failed_calls == 1:
            logger.error("a request could not be traced: %r (logged once)", error, exc_info=error)

    def begin(
        self,
        request_id: str,
        params: SamplingParams,
        *,
        arrival_ns: int,
        traceparent: str | None,
        operation: str,
    ) -> str | None:
        own = self._begin(
            request_id,
            params,
            arrival_ns=arrival_ns,
            traceparent=traceparent,
            operation=operation,
        )
        return own or traceparent

    @_fenced
    def _begin(
        self,
        request_id: str,
        params: SamplingParams,
        *,
        arrival_ns: int,
        traceparent: str | None,
        operation: str,
    ) -> str | None:
        span = self.telemetry.begin_request(
            self._attributes(request_id, params, operation),
            arrival_ns=arrival_ns,
            num_samples=params.n,
            traceparent=traceparent,
        )
        self._begun[request_id] = (span, params.n, operation)
        return None if span is None else span.traceparent

    @_fenced
    def expect(self, request_id: str, request_num: int) -> None:
        begun = self._begun.pop(request_id, None)
        if begun is None:
            return
        span, num_left, operation = begun
        self._operations[request_num] = operation
        if span is not None:
            self.telemetry.expect(span, request_num)
        if num_left > 1:
            self._begun[request_id] = (span, num_left - 1, operation)

    @_fenced
    def fail(self, request_id: str, error: BaseException) -> None:
        begun = self._begun.pop(request_id, None)
        if begun is not None and begun[0] is not None:
            self.telemetry.fail(begun[0], type(error).__name__, str(error))

    @_fenced
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
        known_time = isinstance(arrival_ns, int) and 0 < arrival_ns < 1 << 63
        span = self.telemetry.begin_request(
            self._attributes(request_id, params, operation),
            arrival_ns=arrival_ns if known_time else time.monotonic_ns(),
            traceparent=traceparent if isinstance(traceparent, str) else None,
        )
        if span is not None:
            self.telemetry.fail(span, type(error).__name__, str(error))

    @_fenced
    def observe(self, message: EngineCoreOutputs, done: ProcessedOutputs) -> None:
        for timeline in done.first_tokens:
            operation = self._operations.get(timeline.request_num, TEXT_COMPLETION)
            self.telemetry.count_first_token(timeline, operation)
        self._count_ended(done.timelines)
        self.telemetry.observe(message.step, message.worker_step, done.timelines)

    @_fenced
    def observe_ended(self, timelines: Sequence[RequestTimeline]) -> None:
        self._count_ended(timelines)
        self.telemetry.observe(None, None, timelines)

    def _count_ended(self, timelines: Sequence[RequestTimeline]) -> None:
        for timeline in timelines:
            operation = self._operations.pop(timeline.request_num, TEXT_COMPLETION)
            self.telemetry.count_end(timeline, operation)

    @_fenced
    def engine_is_ready(
        self,
        ready: EngineCoreReadyResponse,
        startup_spans_ns: Mapping[StartupPhase, tuple[int, int]],
    ) -> None:
        from instrumentation.otel.startup_spans import StartupPhaseTimes

        caller = [
            StartupPhaseTimes(phase.label, Role.CALLER, begin_ns, end_ns)
            for phase, (begin_ns, end_ns) in startup_spans_ns.items()
        ]
        core = [
            StartupPhaseTimes(label, Role.CORE, begin_ns, begin_ns + ready.startup_ns[label])
            for label, begin_ns in ready.startup_begin_ns.items()
        ]
        self.telemetry.started(caller + core)

    @_fenced
    def begin_http(self, request: HttpArrival) -> "HttpSpan | None":
        is_known = request.method in _HTTP_METHODS
        method = request.method if is_known else "HTTP"
        return self.telemetry.begin_http(
            method if request.route is None else f"{method} {request.route}",
            _http_attributes(request, is_known=is_known),
            begin_ns=request.begin_ns,
            traceparent=request.traceparent,
            tracestate=request.tracestate,
        )

    @_fenced
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
        from instrumentation.otel import attributes as names

        attributes: dict[str, Any] = {
            names.HTTP_RESPONSE_STATUS_CODE: status,
            names.HTTP_RESPONSE_BODY_SIZE: num_bytes,
        }
        if error_type is not None:
            attributes[names.ERROR_TYPE] = error_type
        self.telemetry.end_http(
            span, attributes, end_ns=end_ns, error=error_type if is_ours else None
        )

    @_fenced
    def close(self) -> None:
        self.telemetry.close()

    def _attributes(self, request_id: Any, params: Any, operation: str) -> dict[str, Any]:
        """What the request asks for; zeros too, but nothing that it leaves to the engine."""
        from instrumentation.otel import attributes as names

        attributes: dict[str, Any] = {
            names.OPERATION_NAME: operation,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: self.telemetry.model,
            names.RESPONSE_MODEL: self.telemetry.model,
        }
        if isinstance(request_id, str):
            attributes[names.RESPONSE_ID] = request_id
        if isinstance(params, SamplingParams):
            asked = {
                names.REQUEST_MAX_TOKENS: params.max_tokens,
                names.REQUEST_TEMPERATURE: params.temperature,
                names.REQUEST_TOP_P: params.top_p,
                names.REQUEST_TOP_K: params.top_k,
                names.REQUEST_SEED: params.seed,
                names.REQUEST_STOP_SEQUENCES: tuple(params.stop_strings) or None,
                names.REQUEST_FREQUENCY_PENALTY: params.frequency_penalty,
                names.REQUEST_PRESENCE_PENALTY: params.presence_penalty,
                names.REQUEST_CHOICE_COUNT: params.n,
            }
            attributes |= {name: value for name, value in asked.items() if value is not None}
        return attributes


def _http_attributes(request: HttpArrival, *, is_known: bool) -> dict[str, Any]:
    """The conventions' attributes that are known when a request comes in."""
    from instrumentation.otel import attributes as names

    client, server = request.client, request.server
    attributes = {
        names.HTTP_REQUEST_METHOD: request.method if is_known else "_OTHER",
        names.HTTP_REQUEST_METHOD_ORIGINAL: None if is_known else request.method,
        names.HTTP_ROUTE: request.route,
        names.URL_PATH: request.path,
        names.URL_SCHEME: request.scheme,
        names.NETWORK_PROTOCOL_VERSION: request.protocol_version,
        names.CLIENT_ADDRESS: None if client is None else client[0],
        names.CLIENT_PORT: None if client is None else client[1],
        names.SERVER_ADDRESS: None if server is None else server[0],
        names.SERVER_PORT: None if server is None else server[1],
        names.USER_AGENT: request.user_agent,
        names.REQUEST_ID: request.request_id,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def open_tracer(
    config: ObservabilityConfig,
    *,
    model: str,
    collect: Callable[[], list[Metric]] | None = None,
) -> RequestTracer:
    """The tracer of an engine; `collect` takes a snapshot of its metrics, to be exported too.

    Raises:
        ConfigError: an option or an OTEL_* variable that cannot be used.
    """
    try:
        telemetry = open_telemetry(config, model=model, version=__version__, collect=collect)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return RequestTracer() if telemetry is None else OpenTelemetryTracer(telemetry)
