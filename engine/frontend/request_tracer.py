"""Tells OpenTelemetry of requests: the seam between the engine's types and `instrumentation.otel`.

Knows `SamplingParams` and messages, and which attributes they make. Does not know spans, receivers
or the SDK, which is imported only where something is configured. The base class does nothing; what
fails in the other one is counted, logged once, and never reaches a request.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from engine.errors import ConfigError
from engine.frontend.output_processor import ProcessedOutputs
from engine.log import get_logger
from engine.types.messages import EngineCoreOutputs, EngineCoreReadyResponse
from engine.types.sampling import SamplingParams
from engine.version import __version__
from instrumentation import Metric, ObservabilityConfig, RequestTimeline, Role, StartupPhase
from instrumentation.otel.setup import open_telemetry

if TYPE_CHECKING:
    from instrumentation.otel.request_spans import RequestSpan
    from instrumentation.otel.telemetry import Telemetry

logger = get_logger(__name__)

TEXT_COMPLETION, CHAT = "text_completion", "chat"
"""What a request is for, in the words of the GenAI conventions."""


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

    def close(self) -> None:
        """Export what there is, within about two seconds; harmless when called twice."""


_Call = TypeVar("_Call", bound=Callable[..., Any])


def _fenced(call: _Call) -> _Call:
    """Count what a method raises; the first error is logged, and the answer is None."""

    @functools.wraps(call)
    def fenced(self: "OpenTelemetryTracer", *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except Exception as error:
            self.count_error(error)
            return None

    return fenced  # type: ignore[return-value]


class OpenTelemetryTracer(RequestTracer):
    """Traces through `instrumentation.otel`."""

    is_on = True

    def __init__(self, telemetry: "Telemetry") -> None:
        self.telemetry = telemetry
        self._begun: dict[str, tuple[RequestSpan, int]] = {}  # and samples still to be sent
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
        if span is None:
            return None
        self._begun[request_id] = (span, params.n)
        return span.traceparent

    @_fenced
    def expect(self, request_id: str, request_num: int) -> None:
        begun = self._begun.pop(request_id, None)
        if begun is None:
            return
        span, num_left = begun
        self.telemetry.expect(span, request_num)
        if num_left > 1:
            self._begun[request_id] = (span, num_left - 1)

    @_fenced
    def fail(self, request_id: str, error: BaseException) -> None:
        begun = self._begun.pop(request_id, None)
        if begun is not None:
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
        self.telemetry.observe(message.step, message.worker_step, done.timelines)

    @_fenced
    def observe_ended(self, timelines: Sequence[RequestTimeline]) -> None:
        self.telemetry.observe(None, None, timelines)

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
        begins_ns = ready.startup_begin_ns
        # Importing began before anything could be stamped, and ended when the rest began.
        first_ns = min(begins_ns.values(), default=0)
        core = [
            StartupPhaseTimes(label, Role.CORE, begin_ns, begin_ns + duration_ns)
            for label, duration_ns in ready.startup_ns.items()
            if (begin_ns := begins_ns.get(label, first_ns - duration_ns)) > 0
        ]
        self.telemetry.started(caller + core)

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
