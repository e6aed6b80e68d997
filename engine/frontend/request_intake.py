"""The way into the engine: requests are checked, counted, traced and sent to the core.

Knows who is to be told of a request that comes, that is refused, or that is given up. Does not know
what comes out of one.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError, IsinglassError, PromptError
from engine.frontend.input_processor import InputProcessor, ProcessedParams, ProcessedPrompt
from engine.frontend.observer import EngineObserver
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.parallel_sampling import ParentRequest
from engine.frontend.queue_counter import QueueCounter
from engine.frontend.request_tracer import TEXT_COMPLETION, RequestTracer
from engine.log import get_logger, serving
from engine.transport.client import EngineCoreClient
from engine.types.messages import EngineCoreRequest, FinishReason
from engine.types.sampling import SamplingParams
from instrumentation import Instrument

logger = get_logger(__name__)


class RequestIntake:
    """Sends requests to the core, and gives up those that it will not answer.

    Args:
        queue: counts what is sent.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine_core: EngineCoreClient,
        *,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        queue: QueueCounter,
        tracer: RequestTracer,
        observer: EngineObserver | None,
        obs: Instrument,
    ) -> None:
        self._config = config
        self._engine_core = engine_core
        self._input_processor = input_processor
        self._output_processor = output_processor
        self._queue = queue
        self._tracer = tracer
        self._observer = observer
        self._obs = obs

    def add_processed(
        self,
        request_id: str,
        prompt: ProcessedPrompt,
        params: SamplingParams,
        *,
        arrival_ns: int,
        priority: int = 0,
        traceparent: str | None = None,
        operation: str = TEXT_COMPLETION,
    ) -> None:
        """Send a request whose prompt and parameters the input processor has made."""
        arrived: dict[str, Any] = {
            "request_id": request_id,
            "params": params,
            "arrival_ns": arrival_ns,
            "traceparent": traceparent,
            "operation": operation,
        }
        with self.counting_rejections(**arrived):
            if request_id in self._output_processor:
                raise id_in_use(request_id)
        traceparent = self._tracer.begin(
            request_id,
            params,
            arrival_ns=arrival_ns,
            traceparent=traceparent,
            operation=operation,
        )
        try:
            with serving(request_id, traceparent):
                logger.debug("request arrived with %d prompt tokens", len(prompt.token_ids))
                self._send_samples(
                    request_id,
                    prompt,
                    params,
                    arrival_ns=arrival_ns,
                    priority=priority,
                    traceparent=traceparent,
                )
        except BaseException as error:
            self._tracer.fail(request_id, error)
            raise

    def _send_samples(
        self,
        request_id: str,
        prompt: ProcessedPrompt,
        params: SamplingParams,
        *,
        arrival_ns: int,
        priority: int,
        traceparent: str | None,
    ) -> None:
        parent = ParentRequest(request_id, params) if params.n > 1 else None
        for index in range(params.n):
            request = self._input_processor.make_request(
                request_id if parent is None else f"{request_id}/{index}",
                prompt,
                params if parent is None else parent.child_params(index),
                arrival_ns=arrival_ns,
                priority=priority,
                traceparent=traceparent,
            )
            with self._engine_core.uninterrupted(), self._obs.send:
                self._output_processor.add_request(
                    request_id, request, prompt, parent=parent, index=index
                )
                self._tracer.expect(request_id, request.request_num)
                if self._observer is not None:
                    self._observer.observe_arrival(params, index=index)
                self._queue.add(request.request_num, len(prompt.token_ids))
                self._send(request)

    @contextmanager
    def counting_rejections(
        self,
        *,
        request_id: Any = None,
        params: Any = None,
        arrival_ns: Any = None,
        traceparent: Any = None,
        operation: str = TEXT_COMPLETION,
    ) -> Iterator[None]:
        """Count and trace a request that what is inside refuses, once; arguments as they came.

        What is inside may raise another error from the engine's. That the engine is dead refuses
        nobody: it is one error for all, and has a metric of its own.
        """
        began_ns = time.monotonic_ns()
        try:
            yield
        except Exception as error:
            refusal = error if isinstance(error, IsinglassError) else error.__cause__
            is_fresh = not isinstance(refusal, EngineDeadError)
            if isinstance(refusal, IsinglassError) and is_fresh and not refusal.is_counted:
                refusal.is_counted = True
                if self._observer is not None:
                    self._observer.observe_rejection(refusal)
                self._tracer.reject(
                    refusal,
                    request_id=request_id,
                    params=params,
                    arrival_ns=began_ns if arrival_ns is None else arrival_ns,
                    traceparent=traceparent,
                    operation=operation,
                )
            raise

    def _send(self, request: EngineCoreRequest) -> None:
        try:
            self._engine_core.add_request(request)
        except EngineDeadError as error:
            self.bury(error)
            raise
        self._obs.request_sent(
            request.request_num,
            request.request_id,
            arrival_ns=request.arrival_ns,
            num_prompt_tokens=len(request.prompt_token_ids),
        )

    def check_request(
        self,
        request_id: str,
        params: SamplingParams | ProcessedParams,
        *,
        arrival_ns: int,
        priority: int,
        traceparent: str | None,
    ) -> tuple[SamplingParams, int]:
        """Check all of a request but its prompt; returns what the core gets of it.

        Raises:
            RequestError, PromptError, SamplingParamsError, ConfigError: as `add_request`.
        """
        processor = self._input_processor
        processor.check_request(request_id, arrival_ns, traceparent)
        if priority != 0:
            self.require_priority_scheduling()
        priority = processor.check_priority(priority)
        if isinstance(params, ProcessedParams):
            return params.params, priority
        return processor.process_params(params), priority

    def require_priority_scheduling(self) -> None:
        """Refuse priorities that would have no effect.

        Raises:
            ConfigError: the engine serves requests in the order in which they come.
        """
        if self._config.scheduler.scheduling_policy != "priority":
            raise ConfigError('priority needs LLM(scheduling_policy="priority")', param="priority")

    def bury(self, error: EngineDeadError) -> None:
        """The core has died: every request is lost, and counted as such."""
        if self._observer is not None:
            self._observer.engine_died()
        unfinished = self._output_processor.unfinished_ids()
        self.abandon(unfinished, FinishReason.ERROR, error=str(error))

    def abandon(
        self, request_ids: Sequence[str], reason: FinishReason, *, error: str | None = None
    ) -> None:
        """End requests without a last output, for the reason given."""
        timelines = self._output_processor.abandon(request_ids, reason, error=error)
        self._queue.remove(timeline.request_num for timeline in timelines)
        if self._observer is not None:
            self._observer.observe_ended(timelines)
        self._tracer.observe_ended(timelines)


def id_in_use(request_id: str) -> PromptError:
    """The error of a request whose id another one has that has not finished."""
    return PromptError(
        f"request id {request_id!r} belongs to an unfinished request; use another.",
        param="request_id",
    )
