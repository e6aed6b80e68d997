"""Layer 2: drives one engine core for callers that step it themselves.

engine.add_request("id", "prompt", params)
while engine.has_unfinished_requests():
    for output in engine.step(): ...
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.checkpoint.architecture import read_model_config
from engine.checkpoint.locate import ModelSource, resolve_model
from engine.config import EngineConfig
from engine.errors import (
    ConfigError,
    EngineDeadError,
    IsinglassError,
    PromptError,
    TokenizerError,
)
from engine.frontend.engine_controls import EngineControls
from engine.frontend.input_processor import (
    InputProcessor,
    ProcessedParams,
    ProcessedPrompt,
    Prompt,
)
from engine.frontend.observer import EngineObserver
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.parallel_sampling import ParentRequest
from engine.frontend.queue_counter import QueueCounter
from engine.frontend.request_tracer import TEXT_COMPLETION, RequestTracer
from engine.frontend.tokenizer import Tokenizer, get_tokenizer
from engine.log import configure, get_logger, serving
from engine.resolve import resolve_limits
from engine.transport.client import EngineCoreClient
from engine.types.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from engine.types.outputs import RequestOutput
from engine.types.sampling import SamplingParams
from engine.version import __version__
from instrumentation import Instrument, SinkName, StartupPhase

logger = get_logger(__name__)


class LLMEngine:
    """Input processor, client of the core, output processor; one caller's thread at a time.

    Attributes:
        config: the settings; `config.model.max_model_len` is what the core has settled on.
        ready: what else the core decided while it came up.
        controls: recordings, profiles, flight records, time lines of requests.
        queue: what has been sent and no step has admitted yet.
        startup_spans_ns: begin and end of the frontend's own phases of start-up.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        obs: Instrument,
        run_dir: str | None = None,
        observer: EngineObserver | None = None,
        open_tracer: Callable[..., RequestTracer] | None = None,
        make_client: Callable[..., EngineCoreClient] = EngineCoreClient.make_client,
        first_request_num: int = 0,
    ) -> None:
        configure(
            config.process.log_level,
            role="caller",
            own_process=False,
            log_format=config.observability.log_format,
        )
        self.obs = obs
        self._observer = observer
        self.tracer = RequestTracer()
        self.startup_spans_ns: dict[StartupPhase, tuple[int, int]] = {}
        began_ns = time.monotonic_ns()
        source = resolve_model(config.model.model, config.model.revision, config.model.download_dir)
        _check_revision(config, source)
        self.model_config = read_model_config(source)
        resolve_limits(config, self.model_config)  # a wrong setting fails before a core is spawned
        resolved_ns = time.monotonic_ns()
        self._keep_startup(StartupPhase.RESOLVE_CONFIG, began_ns, resolved_ns)
        self.engine_core = make_client(
            config,
            run_dir=run_dir,
            obs=obs,
            # At once, since an idle engine's caller would notice only with its next request.
            on_death=None if observer is None else observer.engine_died,
        )
        try:
            spawned_ns = time.monotonic_ns()
            self._keep_startup(StartupPhase.SPAWN, resolved_ns, spawned_ns)
            # Tracer and tokenizer load while the core boots.
            if open_tracer is not None:
                self.tracer = open_tracer(model=source.name)
                if observer is not None:
                    observer.metrics.engine.watch(SinkName.OPENTELEMETRY, self.tracer)
            self.tokenizer: Tokenizer | None = None
            if not config.model.skip_tokenizer_init:
                self.tokenizer = get_tokenizer(
                    source, name=config.model.tokenizer, download_dir=config.model.download_dir
                )
            tokenizer_ns = time.monotonic_ns()
            self._keep_startup(StartupPhase.TOKENIZER, spawned_ns, tokenizer_ns)
            self.ready = self.engine_core.wait_ready()
            self._keep_startup(StartupPhase.WAIT_READY, tokenizer_ns, time.monotonic_ns())
        except BaseException:
            self.engine_core.shutdown()
            self.tracer.close()
            raise
        self.config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, max_model_len=self.ready.max_model_len),
        )
        self.input_processor = InputProcessor(
            self.config, self.model_config, self.tokenizer, first_request_num=first_request_num
        )
        self.output_processor = OutputProcessor(self.tokenizer, obs=obs)
        self.queue = QueueCounter()
        if observer is not None:
            startup_ns = {
                phase.label: end_ns - begin_ns
                for phase, (begin_ns, end_ns) in self.startup_spans_ns.items()
            }
            observer.engine_is_ready(
                self.config,
                self.ready,
                version=__version__,
                model=source.name,
                startup_ns=startup_ns | self.ready.startup_ns,
            )
        self.tracer.engine_is_ready(self.ready, self.startup_spans_ns)
        self.controls = EngineControls(
            self.engine_core,
            self.output_processor,
            obs=obs,
            observer=observer,
            settings=config.observability,
        )

    def _keep_startup(self, phase: StartupPhase, begin_ns: int, end_ns: int) -> None:
        self.startup_spans_ns[phase] = (begin_ns, end_ns)
        self.obs.startup(phase, begin_ns, end_ns)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_ns: int | None = None,
        priority: int = 0,
        traceparent: str | None = None,
    ) -> None:
        """Validate a request and send it to the core.

        Raises:
            RequestError: the id, arrival_ns or traceparent is of a wrong type.
            PromptError: the prompt is no good, or the id belongs to an unfinished request.
            SamplingParamsError: a parameter that this model or engine cannot honour.
            ConfigError: a priority without scheduling_policy="priority".
            EngineDeadError: the core has died.
        """
        arrival_ns = time.monotonic_ns() if arrival_ns is None else arrival_ns
        arrived: dict[str, Any] = {
            "request_id": request_id,
            "params": params,
            "arrival_ns": arrival_ns,
            "traceparent": traceparent,
        }
        with (
            serving(request_id, traceparent),
            self.counting_rejections(**arrived),
            self.obs.process_inputs,
        ):
            own, priority = self.check_request(
                request_id,
                params,
                arrival_ns=arrival_ns,
                priority=priority,
                traceparent=traceparent,
            )
            processed = self.input_processor.process_prompt(prompt, own)
        self.add_processed(
            request_id,
            processed,
            own,
            arrival_ns=arrival_ns,
            priority=priority,
            traceparent=traceparent,
        )

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
            if request_id in self.output_processor:
                raise id_in_use(request_id)
        traceparent = self.tracer.begin(
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
            self.tracer.fail(request_id, error)
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
            request = self.input_processor.make_request(
                request_id if parent is None else f"{request_id}/{index}",
                prompt,
                params if parent is None else parent.child_params(index),
                arrival_ns=arrival_ns,
                priority=priority,
                traceparent=traceparent,
            )
            with self.engine_core.uninterrupted(), self.obs.send:
                self.output_processor.add_request(
                    request_id, request, prompt, parent=parent, index=index
                )
                self.tracer.expect(request_id, request.request_num)
                if self._observer is not None:
                    self._observer.observe_arrival(params, index=index)
                self.queue.add(request.request_num, len(prompt.token_ids))
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
        """Count and trace a request that what is inside refuses; arguments as they came."""
        began_ns = time.monotonic_ns()
        try:
            yield
        except IsinglassError as error:
            if self._observer is not None:
                self._observer.observe_rejection(error)
            self.tracer.reject(
                error,
                request_id=request_id,
                params=params,
                arrival_ns=began_ns if arrival_ns is None else arrival_ns,
                traceparent=traceparent,
                operation=operation,
            )
            raise

    def _send(self, request: EngineCoreRequest) -> None:
        try:
            self.engine_core.add_request(request)
        except EngineDeadError as error:
            self.bury(error)
            raise
        self.obs.request_sent(
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
        processor = self.input_processor
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
        if self.config.scheduler.scheduling_policy != "priority":
            raise ConfigError('priority needs LLM(scheduling_policy="priority")')

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """End requests; each gives one last output that says abort. Unknown ids are ignored."""
        core_ids = self.output_processor.core_ids(request_ids)
        if core_ids:
            with self.obs.send:
                self.engine_core.abort_requests(core_ids)

    def discard_request(self, request_ids: Sequence[str]) -> None:
        """End requests at once, without a last output."""
        self.abort_request(request_ids)
        self._abandon(request_ids, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Wait for the core's next outputs and turn them into the caller's.

        Raises:
            EngineDeadError: the core has died; all requests are lost.
        """
        try:
            with self.obs.receive:
                message = self.engine_core.get_output()
        except EngineDeadError as error:
            self.bury(error)
            raise
        return self.take(message)

    def take(self, message: EngineCoreOutputs) -> list[RequestOutput]:
        """Turn one message of the core into the caller's outputs."""
        received_ns = time.monotonic_ns()
        self.obs.received_step(message.step, message.worker_step)
        with self.engine_core.uninterrupted(), self.obs.process_outputs:
            done = self.output_processor.process_outputs(message)
            if done.to_abort:
                self.engine_core.abort_requests(done.to_abort)
        if message.step is not None and message.step.admissions:
            self.queue.remove(admission.request_num for admission in message.step.admissions)
        if done.first_tokens or done.timelines:  # the step's record may be another frontend's
            self.queue.remove(one.request_num for one in (*done.first_tokens, *done.timelines))
        if self._observer is not None:
            self._observer.observe(message, done, received_ns=received_ns)
        self.tracer.observe(message, done)
        return done.request_outputs

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            TokenizerError: the engine was made with skip_tokenizer_init=True.
        """
        if self.tokenizer is None:
            raise TokenizerError("the engine has no tokenizer (skip_tokenizer_init=True)")
        return self.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """The model's own, or ours with generation_config="vllm"."""
        if self.config.model.generation_config == "vllm":
            return SamplingParams()
        return SamplingParams.from_generation_defaults(self.model_config.generation_defaults)

    def has_unfinished_requests(self) -> bool:
        """Whether outputs are still to come."""
        return self.output_processor.num_unfinished > 0

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests are running."""
        return self.engine_core.call_utility("reset_prefix_cache")

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call one of the core's utility methods."""
        return self.engine_core.call_utility(method, *args)

    def shutdown(self) -> None:
        """Stop the core and write out what was recorded; harmless when called twice."""
        try:
            self.engine_core.shutdown()
        finally:
            self.obs.close()
            if self._observer is not None:
                self._observer.engine_died()
            self.tracer.close()

    def bury(self, error: EngineDeadError) -> None:
        """The core has died: every request is lost, and counted as such."""
        if self._observer is not None:
            self._observer.engine_died()
        self._abandon(self.output_processor.unfinished_ids(), FinishReason.ERROR, error=str(error))

    def _abandon(
        self, request_ids: Sequence[str], reason: FinishReason, *, error: str | None = None
    ) -> None:
        timelines = self.output_processor.abandon(request_ids, reason, error=error)
        self.queue.remove(timeline.request_num for timeline in timelines)
        if self._observer is not None:
            self._observer.observe_ended(timelines)
        self.tracer.observe_ended(timelines)


def id_in_use(request_id: str) -> PromptError:
    """The error of a request whose id another one has that has not finished."""
    return PromptError(f"request id {request_id!r} belongs to an unfinished request; use another.")


def _check_revision(config: EngineConfig, source: ModelSource) -> None:
    """Refuse a revision that would have no effect.

    Raises:
        ConfigError: the model is not fetched from the hub.
    """
    revision = config.model.revision
    if revision is None:
        return
    if source.kind != "folder" or Path(source.name).expanduser().is_dir():
        raise ConfigError(
            f"revision={revision!r} chooses a version of a hub repository, but the model "
            f"{source.name!r} is a local one; leave revision out, or give a hub name."
        )
