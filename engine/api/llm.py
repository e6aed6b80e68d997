"""`LLM`: generate for a list of prompts, from a script or a notebook.

with LLM() as llm:
    outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0))
"""

import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from engine.api.between_steps import BetweenSteps
from engine.api.chat import Messages, chat_prompt, conversations_of, template_variables
from engine.api.engine_host import EngineHost
from engine.api.engine_views import EngineViews
from engine.api.progress import ProgressBar
from engine.config import EngineConfig
from engine.errors import (
    EngineDeadError,
    PromptError,
    RequestError,
)
from engine.frontend.input_processor import ProcessedPrompt, Prompt
from engine.frontend.request_tracer import CHAT, TEXT_COMPLETION
from engine.text.tokenizer import Tokenizer, checked_ids
from engine.types.outputs import RequestOutput
from engine.types.sampling import RequestOutputKind, SamplingParams
from engine.types.sampling_checks import short


class _Item(NamedTuple):
    """One validated request of a `generate` call."""

    prompt: ProcessedPrompt
    params: SamplingParams
    priority: int


class LLM(EngineViews):
    """An engine for offline use. Thread-safe: calls from several threads wait for each other.

    A signal's handler cannot call an engine that its own thread is calling: that is an
    IsinglassError. With enable_multiprocessing=False it should let no error out, which would be
    taken for one of the step that it interrupts.

    Requests arrive when the call is made: checking, tokenising and waiting for other threads' calls
    are part of their time in the queue.

    Args:
        model: folder of a Transformers checkpoint, .gguf file or hub name; without it the embedded
            SmolLM2-135M-Instruct.
        **kwargs: every setting of `engine.config`, under vLLM's name where vLLM has it.

    Raises:
        ConfigError: an unknown or wrong setting.
        ModelError: the model cannot be found, read or run.
        EngineStartError: the engine core did not come up.

    Attributes:
        config: the settings in force; `config.model.max_model_len` is what the core settled on.
        run_dir: folder with this run's journals, None without `trace_dir`.
    """

    _between_steps: BetweenSteps

    def __init__(self, model: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        self._next_id = 0
        self._host = EngineHost(EngineConfig.from_kwargs(model=model, **kwargs))
        self._finalizer = weakref.finalize(self, self._host.shutdown)
        self._host.start()
        self.begin(self._host, between_steps=BetweenSteps())

    # -- generating ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts; outputs come in their order.

        Args:
            prompts: text, token ids, a dictionary (`prompt` or `prompt_token_ids`, `cache_salt`),
                or a list that mixes them.
            sampling_params: one for all, or one per prompt; `get_default_sampling_params()` if
                None. `output_kind` is ignored: an offline call returns finished requests.
            use_tqdm: show a progress bar.
            priority: one number per prompt (lower goes first); needs scheduling_policy="priority".

        Raises:
            PromptError, SamplingParamsError: before any request is sent.
            EngineDeadError: the core died; the outputs are lost.
        """
        return self._generate(prompts, sampling_params, use_tqdm, priority, TEXT_COMPLETION)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each of several.

        Args:
            messages: a list of {"role": …, "content": …}, or a list of such lists.
            chat_template: another template than the model's (Jinja text or its name).

        Raises:
            PromptError: the messages do not fit the template, the model has no template, or
                chat_template_kwargs names what is an argument of this method.
        """
        variables = template_variables(chat_template_kwargs)
        conversations = conversations_of(messages)
        tokenizer = self.get_tokenizer()
        # Metrics are counted by one thread at a time.
        with (
            self._between_steps.generating(),
            self.llm_engine.counting_rejections(params=sampling_params, operation=CHAT),
        ):
            prompts = [
                chat_prompt(
                    tokenizer,
                    conversation,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    **variables,
                )
                for conversation in conversations
            ]
        return self._generate(prompts, sampling_params, use_tqdm, None, CHAT)

    def encode(self, prompts: str | Sequence[str]) -> list[list[int]]:
        """Token ids of each text, as `generate` would use them.

        Raises:
            PromptError: not a text, or a list of texts.
        """
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise PromptError(
                f"encode takes a text or a list of texts, got {type(prompts).__name__}"
            )
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return self.get_tokenizer().encode_batch(texts)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids.

        Raises:
            PromptError: not a list of token ids of the model.
        """
        tokenizer = self.get_tokenizer()
        ids = checked_ids(token_ids)
        num_ids = max(self.llm_engine.model_config.vocab_size, tokenizer.max_token_id + 1)
        if ids and max(ids) >= num_ids:
            raise PromptError(
                f"token id {max(ids)} is outside the vocabulary, whose ids are 0 to {num_ids - 1}"
            )
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    # -- around it -------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            TokenizerError: the engine was made with skip_tokenizer_init=True.
        """
        return self.llm_engine.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none: the model's own, see `generation_config`."""
        return self.llm_engine.default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests are running."""
        return self._between_steps.call(self.llm_engine.reset_prefix_cache)

    def shutdown(self) -> None:
        """Stop the engine core and leave nothing behind; harmless when called twice."""
        self._host.shutdown()  # interrupted, the finaliser still has its turn
        self._finalizer.detach()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    # -- inside ------------------------------------------------------------------------------------

    def _generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        operation: str,
    ) -> list[RequestOutput]:
        # Before the lock: a caller that waits for another thread's call waits, and that shows.
        arrival_ns = time.monotonic_ns()
        with self._between_steps.generating():
            with self.llm_engine.counting_rejections(
                params=params, operation=operation, arrival_ns=arrival_ns
            ):
                items = self._validate(_as_list(prompts), params, priority)
            return self._run(items, use_tqdm, operation, arrival_ns)

    def _validate(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[_Item]:
        """Check everything before anything is sent."""
        if priority is not None:
            self.llm_engine.intake.require_priority_scheduling()
        if params is None:
            params = self.get_default_sampling_params()
        each = (
            [params] * len(prompts)
            if isinstance(params, SamplingParams)
            else _items("sampling_params", params, "SamplingParams, or a list of them")
        )
        check = self.llm_engine.input_processor.check_priority
        ranks = [0] * len(prompts)
        if priority is not None:
            ranks = [check(one) for one in _items("priority", priority, "a list of integers")]
        if not len(prompts) == len(each) == len(ranks):
            raise PromptError(
                f"there are {len(prompts)} prompts, {len(each)} sampling_params and "
                f"{len(ranks)} priorities; give one for all, or one for each prompt."
            )
        processor, obs = self.llm_engine.input_processor, self.llm_engine.obs
        own: dict[int, SamplingParams] = {}
        items = []
        with obs.process_inputs:
            for prompt, one, rank in zip(prompts, each, ranks, strict=True):
                if id(one) not in own:
                    processed = processor.process_params(one)
                    own[id(one)] = processed.clone(output_kind=RequestOutputKind.FINAL_ONLY)
                mine = own[id(one)]
                items.append(_Item(processor.process_prompt(prompt, mine), mine, rank))
        return items

    def _run(
        self, items: list[_Item], use_tqdm: bool, operation: str, arrival_ns: int
    ) -> list[RequestOutput]:
        engine = self.llm_engine
        finished: dict[str, RequestOutput] = {}
        request_ids: list[str] = []
        try:
            with ProgressBar(len(items), enabled=use_tqdm) as bar:
                for item in items:
                    request_ids.append(str(self._next_id))
                    self._next_id += 1
                    engine.intake.add_processed(
                        request_ids[-1],
                        item.prompt,
                        item.params,
                        arrival_ns=arrival_ns,
                        priority=item.priority,
                        operation=operation,
                    )
                while engine.has_unfinished_requests():
                    self._between_steps.run_pending()
                    for output in engine.step():
                        finished[output.request_id] = output
                        bar.advance(output)
        except EngineDeadError:
            raise
        except BaseException:
            # Ctrl-C, say: end what this call began, and keep the engine for the next one.
            engine.discard_request(request_ids)
            raise
        return [finished[request_id] for request_id in request_ids]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _items(name: str, value: Any, allowed: str) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be {allowed}, got {short(value)}")
    return list(value)
