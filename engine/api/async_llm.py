"""`AsyncLLM`: one engine for any number of tasks of an event loop, each with its own stream.

async with AsyncLLM() as llm:
    async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
        print(output.outputs[0].text)
"""

import asyncio
import contextlib
import functools
import itertools
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

from engine.api.async_views import AsyncViews
from engine.api.chat import Messages, chat_prompt, template_variables
from engine.api.metrics_endpoint import serve_metrics
from engine.api.run_dir import make_run_dir
from engine.api.text_threads import Result, TextThreads, is_long
from engine.checkpoint.locate import EMBEDDED_MODEL
from engine.config import EngineConfig
from engine.errors import EngineDeadError, IsinglassError
from engine.frontend.input_processor import ProcessedParams, ProcessedPrompt, Prompt
from engine.frontend.llm_engine import LLMEngine, id_in_use
from engine.frontend.observer import make_observer, tracer_opener
from engine.frontend.output_stream import RequestStream
from engine.frontend.request_tracer import CHAT, TEXT_COMPLETION
from engine.frontend.tokenizer import Tokenizer
from engine.log import get_logger
from engine.transport.async_mp_client import AsyncMPClient
from engine.transport.client import EngineCoreClient
from engine.transport.interrupts import children_outlive_sigterm
from engine.types.attachment import CoreAttachment
from engine.types.outputs import RequestOutput
from engine.types.sampling import SamplingParams
from instrumentation import Metric, Role
from instrumentation.audit import audit, without_effect
from instrumentation.setup import setup

if TYPE_CHECKING:
    from instrumentation.prometheus import MetricsServer

logger = get_logger(__name__)


class AsyncLLM(AsyncViews):
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
        self.labelled_name: str | None = None
        """The model's name in metrics, set before the start; the model's own if None."""
        self.attachment = attachment
        """Where the core is, where another process owns it."""
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
        self._metrics_server: MetricsServer | None = None
        self.metric_sources: list[Callable[[], list[Metric]]] = []
        """What snapshots hold besides the engine's own metrics, such as a server's."""
        self._streams: dict[str, RequestStream] = {}
        self._ids = itertools.count()
        self._text_threads = TextThreads()
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
    def num_unfinished(self) -> int:
        """Requests whose last output has not been made yet."""
        return len(self._streams)

    def has_request(self, request_id: str) -> bool:
        """Whether an id is in use: until the last output has been made, and read or left."""
        return request_id in self._streams or (
            self._handler is not None and request_id in self.llm_engine.output_processor
        )

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
        self._text_threads.close()
        # A thread of its own: those that the loop lends may all be busy for longer.
        thread = ThreadPoolExecutor(1, thread_name_prefix="shutdown")
        try:
            await asyncio.get_running_loop().run_in_executor(thread, self.llm_engine.shutdown)
        finally:
            thread.shutdown(wait=False)
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
        with contextlib.closing(stream):
            async for output in stream:
                yield output

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
        with contextlib.closing(stream):
            async for output in stream:
                yield output

    async def submit(
        self,
        prompt: Prompt | ProcessedPrompt,
        sampling_params: SamplingParams | ProcessedParams | None = None,
        request_id: str | None = None,
        *,
        arrival_ns: int | None = None,
        priority: int = 0,
        traceparent: str | None = None,
        operation: str = TEXT_COMPLETION,
    ) -> RequestStream:
        """Validate a request and send it; what comes back is to be iterated over, or closed.

        Whoever has several prompts with the same parameters may process them once, through
        `process_prompts` and `ProcessedParams`.

        Raises:
            PromptError, SamplingParamsError, ConfigError: before anything is sent.
            EngineDeadError: the core has died.
        """
        await self.start()
        arrival_ns = time.monotonic_ns() if arrival_ns is None else arrival_ns
        request_id = str(next(self._ids)) if request_id is None else request_id
        engine = self.llm_engine
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        self._raise_if_dead()
        with engine.counting_rejections(
            request_id=request_id,
            params=params.params if isinstance(params, ProcessedParams) else params,
            arrival_ns=arrival_ns,
            traceparent=traceparent,
            operation=operation,
        ):
            own, priority = engine.check_request(
                request_id,
                params,
                arrival_ns=arrival_ns,
                priority=priority,
                traceparent=traceparent,
            )
            self._refuse_used(request_id)
            if isinstance(prompt, ProcessedPrompt):
                processed = prompt
            else:
                (processed,) = await self.process_prompts([prompt], own)
                self._refuse_used(request_id)
        self._raise_if_dead()
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

    async def process_prompts(
        self, prompts: Sequence[Prompt], params: SamplingParams
    ) -> list[ProcessedPrompt]:
        """Tokenize and check prompts; off the event loop where they are long in sum.

        Raises:
            PromptError: one of them is no good.
            EngineDeadError: the core has died.
        """
        process = self.llm_engine.input_processor.process_prompt
        if is_long(*prompts):
            return await self._off_loop(lambda: [process(prompt, params) for prompt in prompts])
        with self.llm_engine.obs.process_inputs:
            return [process(prompt, params) for prompt in prompts]

    async def with_texts(self, function: Callable[[], Result], *texts: Prompt) -> Result:
        """Call what reads texts, or token ids; off the event loop where they are long in sum.

        Raises:
            EngineDeadError: the engine has died, or has been shut down.
        """
        return await self._off_loop(function) if is_long(*texts) else function()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            TokenizerError: the engine was made with skip_tokenizer_init=True.
        """
        return self.llm_engine.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none: the model's own, see `generation_config`."""
        return self.llm_engine.default_sampling_params()

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

    # -- inside ------------------------------------------------------------------------------------

    async def _start(self) -> None:
        wanted = self._config.observability
        attachment = self.attachment
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
            model_name=self.labelled_name or self._config.model.model,
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
                    open_tracer=tracer_opener(wanted, observer),
                    make_client=functools.partial(self._make_client, make_client),
                    first_request_num=0 if attachment is None else attachment.first_request_num,
                )
            )
        except BaseException:
            self._close_metrics()
            obs.close()
            raise
        self._begin_views(
            self.llm_engine,
            run_dir=run_dir,
            observer=observer,
            metrics_server=self._metrics_server,
        )
        client = self.llm_engine.engine_core
        assert isinstance(client, AsyncMPClient)
        self._client = client
        client.attach()
        self._handler = asyncio.create_task(self._handle_outputs(), name="output handler")
        for line in without_effect(audit(wanted, has_server=bool(self.metric_sources))):
            logger.warning("%s is without effect: %s", line.option, line.detail)

    def _make_client(
        self, make: Callable[..., EngineCoreClient], *args: Any, **kwargs: Any
    ) -> EngineCoreClient:
        """Make the client, and remember it before its core is up, so that `kill` can end it."""
        with children_outlive_sigterm():
            client = make(*args, **kwargs)
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
            with contextlib.suppress(EngineDeadError):  # the core would go on for nobody
                engine.abort_request(engine.output_processor.unfinished_ids())
            engine.bury(death)
            self._end(death)

    def _refuse_used(self, request_id: str) -> None:
        if self.has_request(request_id):
            raise id_in_use(request_id)

    def _raise_if_dead(self) -> None:
        if self._dead_error is not None:
            raise self._dead_error

    async def _off_loop(self, function: Callable[[], Result]) -> Result:
        self._raise_if_dead()
        return await self._text_threads.call(function)

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
