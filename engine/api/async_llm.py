"""`AsyncLLM`: one engine for any number of tasks of an event loop, each with its own stream.

async with AsyncLLM() as llm:
    async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
        print(output.outputs[0].text)
"""

import contextlib
import itertools
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from engine.api.async_engine import AsyncEngine
from engine.api.chat import Messages, chat_prompt, template_variables
from engine.api.text_threads import Result, is_long
from engine.config import EngineConfig
from engine.frontend.input_processor import ProcessedParams, ProcessedPrompt, Prompt
from engine.frontend.output_stream import RequestStream
from engine.frontend.request_intake import id_in_use
from engine.frontend.request_tracer import CHAT, TEXT_COMPLETION
from engine.text.tokenizer import LONG_TEXT, Tokenizer
from engine.types.attachment import CoreAttachment
from engine.types.outputs import RequestOutput
from engine.types.sampling import SamplingParams


class AsyncLLM(AsyncEngine):
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

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        attachment: CoreAttachment | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(EngineConfig.from_kwargs(model=model, **kwargs), attachment=attachment)
        self._ids = itertools.count()

    # -- requests ----------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output has not been read yet, and whose reader has not left."""
        return 0 if self._handler is None else self._handler.num_open

    def has_request(self, request_id: str) -> bool:
        """Whether an id is in use: until the last output has been made, and read or left."""
        return self._handler is not None and request_id in self._handler

    def fail_unfinished(self, error: Exception) -> None:
        """Abort every request; its reader gets what it has not read yet and then this error."""
        if self._handler is not None:
            self._handler.fail_all(error)

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

        With n > 1 an output has only the choices in which something is new, as with vLLM; a choice
        that has ended is not repeated, and `finished` is about all of them.

        The request is sent when the first output is asked for. Leaving the loop aborts it (close
        the generator, or use `contextlib.aclosing`, to have that happen at once).

        Raises:
            PromptError, SamplingParamsError: before anything is sent.
            EngineDeadError: the core has died, or the engine has been shut down.
            EventLoopError: the engine was started on another event loop.
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
        stream = await self.submit(
            await self.render_chat(messages, **template_options),
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

        A stream that is dropped instead ends its request all the same.

        Whoever has several prompts with the same parameters may process them once, through
        `process_prompts` and `ProcessedParams`.

        Raises:
            PromptError, SamplingParamsError, ConfigError: before anything is sent.
            EngineDeadError: the core has died, or the engine has been shut down.
            EventLoopError: the engine was started on another event loop.
        """
        await self.start()
        arrival_ns = time.monotonic_ns() if arrival_ns is None else arrival_ns
        request_id = str(next(self._ids)) if request_id is None else request_id
        engine = self.llm_engine
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        with engine.counting_rejections(
            request_id=request_id,
            params=params.params if isinstance(params, ProcessedParams) else params,
            arrival_ns=arrival_ns,
            traceparent=traceparent,
            operation=operation,
        ):
            own, priority = engine.intake.check_request(
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
        assert self._handler is not None
        stream = self._handler.open(request_id, own.output_kind)
        try:
            engine.intake.add_processed(
                request_id,
                processed,
                own,
                arrival_ns=arrival_ns,
                priority=priority,
                traceparent=traceparent,
                operation=operation,
            )
        except BaseException:
            stream.close()  # some of its samples may have been sent
            raise
        return stream

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with one last output that says abort."""
        if self.is_running:
            self._check_loop()
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
        engine = self._engine
        process = engine.input_processor.process_prompt
        if is_long(*prompts):
            return await self._off_loop(lambda: [process(prompt, params) for prompt in prompts])
        with engine.obs.process_inputs:
            return [process(prompt, params) for prompt in prompts]

    async def with_texts(
        self, function: Callable[[], Result], *texts: Prompt, num_characters: int = 0
    ) -> Result:
        """Call what reads texts, or token ids; off the event loop where they are long in sum.

        Args:
            num_characters: what else is read.

        Raises:
            EngineDeadError: the engine has died, or has been shut down.
        """
        is_quick = num_characters <= LONG_TEXT and not is_long(*texts)
        return function() if is_quick else await self._off_loop(function)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            TokenizerError: the engine was made with skip_tokenizer_init=True.
        """
        return self._engine.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none: the model's own, see `generation_config`."""
        return self._engine.default_sampling_params()

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

    def _refuse_used(self, request_id: str) -> None:
        if self.has_request(request_id):
            raise id_in_use(request_id)

    async def _off_loop(self, function: Callable[[], Result]) -> Result:
        self._raise_if_dead()
        return await self._text_threads.call(function)
