"""Layer 2: drives one engine core for callers that step it themselves.

engine.add_request("id", "prompt", params)
while engine.has_unfinished_requests():
    for output in engine.step(): ...
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from engine.checkpoint.architecture import read_model_config
from engine.checkpoint.locate import resolve_model
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError, PromptError
from engine.frontend.input_processor import InputProcessor, ProcessedPrompt, Prompt
from engine.frontend.observer import EngineObserver
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.parallel_sampling import ParentRequest
from engine.frontend.tokenizer import Tokenizer, get_tokenizer
from engine.log import configure, get_logger
from engine.resolve import resolve_limits
from engine.transport.client import EngineCoreClient
from engine.transport.interrupts import deferred_interrupts
from engine.types.messages import FinishReason
from engine.types.outputs import RequestOutput
from engine.types.sampling import SamplingParams
from instrumentation import Instrument, StartupPhase

logger = get_logger(__name__)


class LLMEngine:
    """Input processor, client of the core, output processor; one caller's thread at a time.

    Attributes:
        config: the settings; `config.model.max_model_len` is what the core has settled on.
        ready: what else the core decided while it came up.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        obs: Instrument,
        run_dir: str | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        configure(config.process.log_level, role="caller", own_process=False)
        self.obs = obs
        self._observer = observer
        began_ns = time.monotonic_ns()
        source = resolve_model(config.model.model, config.model.revision, config.model.download_dir)
        self.model_config = read_model_config(source)
        resolve_limits(config, self.model_config)  # a wrong setting fails before a core is spawned
        resolved_ns = time.monotonic_ns()
        obs.startup(StartupPhase.RESOLVE_CONFIG, began_ns, resolved_ns)
        self.engine_core = EngineCoreClient.make_client(config, run_dir=run_dir, obs=obs)
        try:
            spawned_ns = time.monotonic_ns()
            obs.startup(StartupPhase.SPAWN, resolved_ns, spawned_ns)
            # The tokenizer loads while the core boots.
            self.tokenizer: Tokenizer | None = None
            if not config.model.skip_tokenizer_init:
                self.tokenizer = get_tokenizer(
                    source, name=config.model.tokenizer, download_dir=config.model.download_dir
                )
            tokenizer_ns = time.monotonic_ns()
            obs.startup(StartupPhase.TOKENIZER, spawned_ns, tokenizer_ns)
            self.ready = self.engine_core.wait_ready()
            obs.startup(StartupPhase.WAIT_READY, tokenizer_ns, time.monotonic_ns())
        except BaseException:
            self.engine_core.shutdown()
            raise
        self.config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, max_model_len=self.ready.max_model_len),
        )
        self.input_processor = InputProcessor(self.config, self.model_config, self.tokenizer)
        self.output_processor = OutputProcessor(self.tokenizer, obs=obs)

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
            PromptError: the prompt is no good, or the id belongs to an unfinished request.
            SamplingParamsError: a parameter that this model or engine cannot honour.
            ConfigError: a priority without scheduling_policy="priority".
            EngineDeadError: the core has died.
        """
        if priority != 0:
            self.require_priority_scheduling()
        arrival_ns = time.monotonic_ns() if arrival_ns is None else arrival_ns
        with self.obs.process_inputs:
            priority = self.input_processor.check_priority(priority)
            own = self.input_processor.process_params(params)
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
    ) -> None:
        """Send a request whose prompt and parameters the input processor has made."""
        if request_id in self.output_processor:
            raise PromptError(
                f"request id {request_id!r} belongs to an unfinished request; use another."
            )
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
            with deferred_interrupts(), self.obs.send:
                self.output_processor.add_request(
                    request_id, request, prompt, parent=parent, index=index
                )
                self.engine_core.add_request(request)

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
            self._bury(error)
            raise
        with deferred_interrupts(), self.obs.process_outputs:
            done = self.output_processor.process_outputs(message)
            if done.to_abort:
                self.engine_core.abort_requests(done.to_abort)
        if self._observer is not None:
            self._observer.observe(message, done)
        return done.request_outputs

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
        self.engine_core.shutdown()
        self.obs.close()

    def _bury(self, error: EngineDeadError) -> None:
        self._abandon(self.output_processor.unfinished_ids(), FinishReason.ERROR, error=str(error))

    def _abandon(
        self, request_ids: Sequence[str], reason: FinishReason, *, error: str | None = None
    ) -> None:
        timelines = self.output_processor.abandon(request_ids, reason, error=error)
        if self._observer is not None:
            self._observer.observe_ended(timelines)
