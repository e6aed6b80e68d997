"""Layer 2: drives one engine core for callers that step it themselves.

engine.add_request("id", "prompt", params)
while engine.has_unfinished_requests():
    for output in engine.step(): ...
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.config import EngineConfig
from engine.errors import EngineDeadError, TokenizerError
from engine.frontend.engine_controls import EngineControls
from engine.frontend.engine_startup import start_engine
from engine.frontend.input_processor import InputProcessor, Prompt
from engine.frontend.observer import EngineObserver
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.queue_counter import QueueCounter
from engine.frontend.request_intake import RequestIntake
from engine.frontend.request_tracer import RequestTracer
from engine.log import configure, get_logger, serving
from engine.text.tokenizer import Tokenizer
from engine.transport import factory
from engine.transport.client import EngineCoreClient
from engine.types.messages import EngineCoreOutputs, FinishReason
from engine.types.outputs import RequestOutput
from engine.types.sampling import SamplingParams
from instrumentation import Instrument

logger = get_logger(__name__)


class LLMEngine:
    """Input processor, client of the core, output processor; one caller's thread at a time.

    Attributes:
        config: the settings; `config.model.max_model_len` is what the core has settled on.
        ready: what else the core decided while it came up.
        controls: recordings, profiles, flight records, time lines of requests.
        queue: what has been sent and no step has admitted yet.
        intake: sends requests whose prompt has been processed.
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
        make_client: Callable[..., EngineCoreClient] = factory.make_client,
        first_request_num: int = 0,
    ) -> None:
        configure(
            config.process.log_level,
            role="caller",
            own_process=False,
            log_format=config.observability.log_format,
        )
        started = start_engine(
            config,
            obs=obs,
            run_dir=run_dir,
            observer=observer,
            open_tracer=open_tracer,
            make_client=make_client,
        )
        self.obs = obs
        self._observer = observer
        self.config, self.ready = started.config, started.ready
        self.engine_core, self.tracer = started.engine_core, started.tracer
        self.model_config, self.tokenizer = started.model_config, started.tokenizer
        self.startup_spans_ns = started.spans_ns
        self.input_processor = InputProcessor(
            self.config, self.model_config, self.tokenizer, first_request_num=first_request_num
        )
        self.output_processor = OutputProcessor(self.tokenizer, obs=obs)
        self.queue = QueueCounter()
        self.intake = RequestIntake(
            self.config,
            self.engine_core,
            input_processor=self.input_processor,
            output_processor=self.output_processor,
            queue=self.queue,
            tracer=self.tracer,
            observer=observer,
            obs=obs,
        )
        self.counting_rejections = self.intake.counting_rejections
        started.announce(observer)
        self.controls = EngineControls(
            self.engine_core,
            self.output_processor,
            obs=obs,
            observer=observer,
            settings=config.observability,
        )

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
            own, priority = self.intake.check_request(
                request_id,
                params,
                arrival_ns=arrival_ns,
                priority=priority,
                traceparent=traceparent,
            )
            processed = self.input_processor.process_prompt(prompt, own)
        self.intake.add_processed(
            request_id,
            processed,
            own,
            arrival_ns=arrival_ns,
            priority=priority,
            traceparent=traceparent,
        )

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """End requests; each gives one last output that says abort. Unknown ids are ignored."""
        core_ids = self.output_processor.core_ids(request_ids)
        if core_ids:
            with self.obs.send:
                self.engine_core.abort_requests(core_ids)

    def discard_request(self, request_ids: Sequence[str]) -> None:
        """End requests at once, without a last output."""
        self.abort_request(request_ids)
        self.intake.abandon(request_ids, FinishReason.ABORT)

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
        if message.step is not None:
            self.queue.observe_step(message.step)
        elif message.idle_cached_blocks is not None:
            self.queue.observe_idle()
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
        self.intake.bury(error)
