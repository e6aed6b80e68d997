"""`AsyncLLM`: one engine for any number of tasks of an event loop, each with its own stream.

async with AsyncLLM() as llm:
    async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
        print(output.outputs[0].text)
"""

import asyncio
import functools
import itertools
import os
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

from engine.api.chat import Messages, chat_prompt, template_variables
from engine.api.engine_views import EngineViews
from engine.api.metrics_endpoint import serve_metrics
from engine.api.run_dir import make_run_dir
from engine.checkpoint.locate import EMBEDDED_MODEL
from engine.config import EngineConfig
from engine.errors import EngineDeadError, IsinglassError, TokenizerError
from engine.frontend.input_processor import ProcessedPrompt, Prompt
from engine.frontend.llm_engine import LLMEngine
from engine.frontend.observer import EngineObserver, make_observer
from engine.frontend.output_stream import RequestStream
from engine.frontend.request_tracer import CHAT, TEXT_COMPLETION, RequestTracer, open_tracer
from engine.frontend.tokenizer import Tokenizer
from engine.log import get_logger
from engine.transport.async_mp_client import AsyncMPClient
from engine.transport.client import EngineCoreClient
from engine.types.attachment import CoreAttachment
from engine.types.outputs import RequestOutput
from engine.types.sampling import SamplingParams
from instrumentation import Metric, ObservabilityConfig, ProfileStatus, RequestReport, Role
from instrumentation.audit import audit, without_effect
from instrumentation.setup import setup

if TYPE_CHECKING:
    from instrumentation.prometheus import MetricsServer

logger = get_logger(__name__)

LONG_TEXT = 2000
"""Characters from which on tokenising leaves the event loop: about a millisecond of it."""


class _AtOnce:
    """Makes the calls of `EngineViews` in the thread that asks, which waits for the loop."""

    def call(self, function: Callable[[], Any]) -> Any:
        return function()


class AsyncLLM:
    """An engine on an event loop. All methods are called on that loop.

    The constructor only checks settings; the engine starts with `start`, with `async with`, or with
    the first request.

    Args:
        model: folder of a Transformers checkpoint, .gguf file or hub name; without it the embedded
            SmolLM2-135M-Instruct.
        attachment: where another process's core is, for one of several frontends over it.
        **kwargs: every setting of `engine.config`, under vLLM's name where vLLM has it.

    Raises:
        ConfigError: an unknown or wrong setting.

    Attributes:
        llm_engine: the engine behind it, once it has started.
    """

    llm_engine: LLMEngine

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        attachment: CoreAttachment | None = None,
        **kwargs: Any,
    ) -> None:
        self._attachment = attachment
        self._config = EngineConfig.from_kwargs(
            model=None if model is None else os.fspath(model),
            **{k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in kwargs.items()},
        )
        if not self._config.process.enable_multiprocessing:
            raise IsinglassError(
                "AsyncLLM runs its core in a process of its own: leave enable_multiprocessing out."
            )
        self._starting: asyncio.Task[None] | None = None
        self._unready_client: AsyncMPClient | None = None
        self._is_killed = False
        self._handler: asyncio.Task[None] | None = None
        self._views = EngineViews()
        self._metrics_server: MetricsServer | None = None
        self.metric_sources: list[Callable[[], list[Metric]]] = []
        """What snapshots hold besides the engine's own metrics, such as a server's."""
        self._streams: dict[str, RequestStream] = {}
        self._ids = itertools.count()
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._dead_error: EngineDeadError | None = None

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring the engine up, once; later calls wait for the first.

        Raises:
            ModelError, ConfigError, EngineStartError: why it does not come up.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start engine")
        await asyncio.shield(self._starting)

    @property
    def is_running(self) -> bool:
        """Whether requests are taken: started, neither dead nor shut down."""
        return self._handler is not None and self._dead_error is None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why no request can be served any more; None while that is not so."""
        return self._dead_error

    async def wait_for_death(self) -> EngineDeadError:
        """Wait until the engine has died, or has been shut down; returns why."""
        await self.start()
        assert self._handler is not None
        await asyncio.wait([self._handler])
        return self._dead_error or EngineDeadError("the engine has been shut down")

    @property
    def config(self) -> EngineConfig:
        """The settings in force; once started, with what the core settled on."""
        return self.llm_engine.config if self._handler is not None else self._config

    @property
    def model_name(self) -> str:
        """The model as it was asked for; the embedded one's own name without that."""
        return self._config.model.model or EMBEDDED_MODEL

    @property
    def run_dir(self) -> str | None:
        """Folder with this run's journals, None while nothing has been recorded."""
        return self._views.run_dir if self._handler is not None else None

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output has not been made yet."""
        return len(self._streams)

    async def shutdown(self) -> None:
        """Stop the engine and leave nothing behind; streams end with EngineDeadError."""
        if self._starting is None:
            return
        await asyncio.gather(self._starting, return_exceptions=True)
        if self._handler is None:
            return
        self._handler.cancel()
        await asyncio.gather(self._handler, return_exceptions=True)
        self._end(EngineDeadError("the engine has been shut down"))
        self._client.detach()
        self._tokenizer_thread.shutdown(wait=False)
        try:
            await asyncio.to_thread(self.llm_engine.shutdown)
        finally:
            self._close_metrics()

    def kill(self) -> None:
        """End the core at once; a start under way fails. `shutdown` has still to be awaited.

        A core that belongs to another process is left alone.
        """
        self._is_killed = True
        if self._unready_client is not None:
            self._unready_client.kill()

    def fail_unfinished(self, error: Exception) -> None:
        """End every stream: its reader gets what it has not read yet and then this error, and the
        request is aborted."""
        for stream in list(self._streams.values()):
            stream.fail(error)

    async def __aenter__(self) -> "AsyncLLM":
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    # -- requests ----------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        traceparent: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Outputs of one request as they come; `output_kind` says which part of the text each has.

        Leaving the loop aborts the request (close the generator, or use `contextlib.aclosing`, to
        have that happen at once).

        Raises:
            PromptError, SamplingParamsError: before anything is sent.
            EngineDeadError: the core has died.
        """
        stream = await self.submit(
            prompt, sampling_params, request_id, priority=priority, traceparent=traceparent
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        traceparent: str | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """As `generate`, for the next message of a conversation; options as in `LLM.chat`."""
        prompt = await self.render_chat(messages, **template_options)
        stream = await self.submit(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            traceparent=traceparent,
            operation=CHAT,
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def submit(
        self,
        prompt: Prompt | ProcessedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        arrival_ns: int | None = None,
        priority: int = 0,
        traceparent: str | None = None,
        operation: str = TEXT_COMPLETION,
    ) -> RequestStream:
        """Validate a request and send it; what comes back is to be iterated over, or closed.

        Raises:
            PromptError, SamplingParamsError, ConfigError: before anything is sent.
            EngineDeadError: the core has died.
        """
        await self.start()
        arrival_ns = time.monotonic_ns() if arrival_ns is None else arrival_ns
        request_id = str(next(self._ids)) if request_id is None else request_id
        engine = self.llm_engine
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        with engine.counting_rejections(
            request_id=request_id,
            params=params,
            arrival_ns=arrival_ns,
            traceparent=traceparent,
            operation=operation,
        ):
            engine.input_processor.check_request(request_id, arrival_ns, traceparent)
            if priority != 0:
                engine.require_priority_scheduling()
            priority = engine.input_processor.check_priority(priority)
            own = engine.input_processor.process_params(params)
            processed = await self._process_prompt(prompt, own)
        stream = RequestStream(request_id, own.output_kind, on_close=self._release)
        engine.add_processed(
            request_id,
            processed,
            own,
            arrival_ns=arrival_ns,
            priority=priority,
            traceparent=traceparent,
            operation=operation,
        )
        self._streams[request_id] = stream
        return stream

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with one last output that says abort."""
        if self.is_running:
            self.llm_engine.abort_request([request_id])

    # -- text --------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            TokenizerError: the engine was made with skip_tokenizer_init=True.
        """
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise TokenizerError("the engine has no tokenizer (skip_tokenizer_init=True)")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none: the model's own, see `generation_config`."""
        if self._config.model.generation_config == "vllm":
            return SamplingParams()
        return SamplingParams.from_generation_defaults(
            self.llm_engine.model_config.generation_defaults
        )

    async def render_chat(
        self,
        messages: Messages,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Prompt:
        """A conversation as a prompt; made off the event loop.

        Raises:
            PromptError: the messages do not fit the template, or there is none.
        """
        await self.start()
        tokenizer = self.get_tokenizer()
        variables = template_variables(chat_template_kwargs)
        return await self._off_loop(
            lambda: chat_prompt(tokenizer, messages, **options, **variables)
        )

    # -- views -------------------------------------------------------------------------------------

    def get_metrics(self) -> list[Metric]:
        """Every metric of the catalogue as it stands.

        Raises:
            IsinglassError: the engine was made with disable_log_stats=True.
        """
        return self._views.get_metrics()

    @property
    def observer(self) -> EngineObserver | None:
        """What sees every message; None before the start, and with disable_log_stats=True."""
        return self._views._observer if self._handler is not None else None

    async def kv_block_map(self) -> dict[str, Any]:
        """The KV pool block by block: see `engine.core.block_map`.

        Raises:
            EngineDeadError: the core has died.
        """
        return await self._client.call_utility_async("kv_block_map")

    def request_timeline(self, request_id: str) -> RequestReport:
        """See `LLM.request_timeline`."""
        return self._views.request_timeline(request_id)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests are running."""
        return await asyncio.to_thread(self.llm_engine.reset_prefix_cache)

    async def start_trace(self, trace_dir: str | os.PathLike[str] | None = None) -> str:
        """See `LLM.start_trace`."""
        return await asyncio.to_thread(self._views.start_trace, trace_dir)

    async def stop_trace(self) -> str | None:
        """See `LLM.stop_trace`."""
        return await asyncio.to_thread(self._views.stop_trace)

    async def start_profile(self, **options: Any) -> list[ProfileStatus]:
        """See `LLM.start_profile`."""
        return await asyncio.to_thread(lambda: self._views.start_profile(**options))

    async def stop_profile(self) -> list[ProfileStatus]:
        """See `LLM.stop_profile`."""
        return await asyncio.to_thread(self._views.stop_profile)

    async def profile_status(self) -> list[ProfileStatus]:
        """See `LLM.profile_status`."""
        return await asyncio.to_thread(self._views.profile_status)

    async def dump_flight_record(self) -> str:
        """See `LLM.dump_flight_record`."""
        return await asyncio.to_thread(self._views.dump_flight_record)

    # -- inside ------------------------------------------------------------------------------------

    async def _start(self) -> None:
        wanted = self._config.observability
        attachment = self._attachment
        if attachment is not None:
            run_dir = attachment.run_dir
            make_client = functools.partial(EngineCoreClient.attach_client, attachment)
        else:
            run_dir = None if wanted.trace_dir is None else make_run_dir(wanted.trace_dir)
            make_client = EngineCoreClient.make_async_mp_client
        obs = setup(wanted, role=Role.CALLER, run_dir=run_dir)
        observer = make_observer(
            wanted,
            obs,
            model_name=self._config.model.model,
            counts_steps=attachment is None or attachment.counts_steps,
        )
        if observer is not None:
            observer.metrics.sources = self.metric_sources
        try:
            self._metrics_server = serve_metrics(wanted, observer)
            # Off the loop, which meanwhile serves whoever asks how far the start is.
            self.llm_engine = await asyncio.to_thread(
                lambda: LLMEngine(
                    self._config,
                    obs=obs,
                    run_dir=run_dir,
                    observer=observer,
                    open_tracer=_opens_tracer(wanted, observer),
                    make_client=lambda *args, **kwargs: self._keep(make_client(*args, **kwargs)),
                    first_request_num=0 if attachment is None else attachment.first_request_num,
                )
            )
        except BaseException:
            self._close_metrics()
            obs.close()
            raise
        views = self._views
        views.llm_engine, views.run_dir, views._observer = self.llm_engine, run_dir, observer
        views._metrics_server, views._between_steps = self._metrics_server, _AtOnce()
        client = self.llm_engine.engine_core
        assert isinstance(client, AsyncMPClient)
        self._client = client
        client.attach()
        self._handler = asyncio.create_task(self._handle_outputs(), name="output handler")
        for line in without_effect(audit(wanted)):
            logger.warning("%s is without effect: %s", line.option, line.detail)

    def _keep(self, client: EngineCoreClient) -> EngineCoreClient:
        """Remember the client before its core is up, so that `kill` can end it."""
        assert isinstance(client, AsyncMPClient)
        self._unready_client = client
        if self._is_killed:
            client.kill()
        return client

    async def _handle_outputs(self) -> None:
        """Take each message of the core in, and hand its outputs to their streams."""
        client, engine, streams = self._client, self.llm_engine, self._streams
        try:
            while True:
                message = await client.get_output_async()
                for output in engine.take(message):
                    stream = streams.get(output.request_id)
                    if stream is not None:
                        stream.put(output)
                await asyncio.sleep(0)  # a backlog of messages must not keep readers waiting
        except EngineDeadError as error:
            engine.bury(error)
            self._end(error)
        except Exception as error:  # ours; nobody would get outputs any more
            logger.exception("the output handler failed")
            death = EngineDeadError(f"the output handler failed: {error!r}")
            engine.bury(death)
            self._end(death)

    async def _process_prompt(
        self, prompt: Prompt | ProcessedPrompt, params: SamplingParams
    ) -> ProcessedPrompt:
        if isinstance(prompt, ProcessedPrompt):
            return prompt
        processor, obs = self.llm_engine.input_processor, self.llm_engine.obs
        if _is_long(prompt):
            return await self._off_loop(lambda: processor.process_prompt(prompt, params))
        with obs.process_inputs:
            return processor.process_prompt(prompt, params)

    async def _off_loop(self, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizer_thread, function)

    def _release(self, request_id: str) -> None:
        """A stream has ended, or its reader has left."""
        del self._streams[request_id]
        engine = self.llm_engine
        if request_id in engine.output_processor:
            try:
                engine.discard_request([request_id])
            except EngineDeadError:
                # The output handler learns of it too, and buries all requests, this one included.
                logger.debug("request %s was left after the engine's death", request_id)

    def _end(self, error: EngineDeadError) -> None:
        self._dead_error = self._dead_error or error
        for stream in list(self._streams.values()):
            stream.fail(error)

    def _close_metrics(self) -> None:
        server, self._metrics_server = self._metrics_server, None
        if server is not None:
            server.close()


def _opens_tracer(wanted: ObservabilityConfig, observer: Any) -> Callable[[str], RequestTracer]:
    collect = None if observer is None else observer.metrics.snapshot
    return lambda model: open_tracer(wanted, model=model, collect=collect)


def _is_long(prompt: Prompt) -> bool:
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    if isinstance(prompt, dict) and prompt.get("prompt_token_ids") is not None:
        return False
    return isinstance(text, str) and len(text) > LONG_TEXT
