"""`LLM`: generate for a list of prompts, from a script or a notebook.

with LLM() as llm:
    outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0))
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from engine.api.progress import ProgressBar
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError, IsinglassError, PromptError, TokenizerError
from engine.frontend.input_processor import ProcessedPrompt, Prompt
from engine.frontend.llm_engine import LLMEngine
from engine.frontend.observer import EngineObserver
from engine.frontend.tokenizer import Tokenizer
from engine.types.outputs import RequestOutput
from engine.types.sampling import RequestOutputKind, SamplingParams
from instrumentation import ConsoleStatus, Metric, Metrics, Role
from instrumentation.setup import setup

Messages = Sequence[Mapping[str, Any]]


class _Item(NamedTuple):
    """One validated request of a `generate` call."""

    prompt: ProcessedPrompt
    params: SamplingParams
    priority: int


class LLM:
    """An engine for offline use. Thread-safe: calls from several threads wait for each other.

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

    def __init__(self, model: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        config = EngineConfig.from_kwargs(
            model=None if model is None else os.fspath(model),
            **{k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in kwargs.items()},
        )
        wanted = config.observability
        self.run_dir = None if wanted.trace_dir is None else _make_run_dir(wanted.trace_dir)
        obs = setup(wanted, role=Role.CALLER, run_dir=self.run_dir)
        self._observer: EngineObserver | None = None
        if not wanted.disable_log_stats:
            self._observer = EngineObserver(
                Metrics(instrument=obs), ConsoleStatus(interval_s=wanted.log_stats_interval_s)
            )
        self._lock = threading.RLock()
        self._next_id = 0
        try:
            self.llm_engine = LLMEngine(
                config, obs=obs, run_dir=self.run_dir, observer=self._observer
            )
        except BaseException:
            obs.close()
            raise

    @property
    def config(self) -> EngineConfig:
        """The settings in force."""
        return self.llm_engine.config

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
        with self._lock:
            items = self._validate(_as_list(prompts), sampling_params, priority)
            return self._run(items, use_tqdm)

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
            PromptError: the messages do not fit the template, or the model has no template.
        """
        conversations = [messages] if _is_conversation(messages) else list(messages)
        tokenizer = self.get_tokenizer()
        prompts = [
            chat_prompt(
                tokenizer,
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def encode(self, prompts: str | Sequence[str]) -> list[list[int]]:
        """Token ids of each text, as `generate` would use them."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return self.get_tokenizer().encode_batch(texts)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self.get_tokenizer().decode(token_ids, skip_special_tokens=skip_special_tokens)

    # -- around it -------------------------------------------------------------------------------

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
        if self.config.model.generation_config == "vllm":
            return SamplingParams()
        return SamplingParams.from_generation_defaults(
            self.llm_engine.model_config.generation_defaults
        )

    def get_metrics(self) -> list[Metric]:
        """Every metric of the catalogue as it stands.

        Raises:
            IsinglassError: the engine was made with disable_log_stats=True.
        """
        if self._observer is None:
            raise IsinglassError("there are no metrics: disable_log_stats=True. Leave it out.")
        return self._observer.metrics.snapshot()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests are running."""
        with self._lock:
            return self.llm_engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Stop the engine core and leave nothing behind; harmless when called twice."""
        self.llm_engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        # Missing when the constructor failed.
        engine = getattr(self, "llm_engine", None)
        if engine is not None:
            engine.shutdown()

    # -- inside ------------------------------------------------------------------------------------

    def _validate(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[_Item]:
        """Check everything before anything is sent."""
        if priority is not None:
            self.llm_engine.require_priority_scheduling()
        if params is None:
            params = self.get_default_sampling_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        check = self.llm_engine.input_processor.check_priority
        ranks = [0] * len(prompts) if priority is None else [check(one) for one in priority]
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

    def _run(self, items: list[_Item], use_tqdm: bool) -> list[RequestOutput]:
        engine = self.llm_engine
        finished: dict[str, RequestOutput] = {}
        request_ids: list[str] = []
        try:
            with ProgressBar(len(items), enabled=use_tqdm) as bar:
                for item in items:
                    request_ids.append(str(self._next_id))
                    self._next_id += 1
                    engine.add_processed(
                        request_ids[-1],
                        item.prompt,
                        item.params,
                        arrival_ns=time.monotonic_ns(),
                        priority=item.priority,
                    )
                while engine.has_unfinished_requests():
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


def chat_prompt(tokenizer: Tokenizer, messages: Messages, /, **options: Any) -> Prompt:
    """A conversation as a prompt of the engine; `options` as in `Tokenizer.apply_chat_template`.

    Raises:
        PromptError: the messages do not fit the template, or there is none.
    """
    text = tokenizer.apply_chat_template(messages, **options)
    # The template has written the special tokens already.
    ids = tokenizer.encode(text, add_special_tokens=False)
    return {"prompt": text, "prompt_token_ids": ids}


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _is_conversation(messages: Messages | Sequence[Messages]) -> bool:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise PromptError("messages must be a list of {'role': …, 'content': …} with entries")
    return isinstance(messages[0], Mapping)


def _make_run_dir(trace_dir: str) -> str:
    """A new folder for this run.

    Raises:
        ConfigError: it cannot be made.
    """
    name = time.strftime("run-%Y%m%d-%H%M%S")
    for attempt in range(1000):
        folder = Path(trace_dir).expanduser() / (name if attempt == 0 else f"{name}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.is_dir():
                raise ConfigError(f"trace_dir {trace_dir!r} is not a folder") from None
            continue
        except OSError as error:
            raise ConfigError(f"trace_dir {trace_dir!r} cannot be used: {error}") from error
        return str(folder.resolve())
    raise ConfigError(f"trace_dir {trace_dir!r} holds a thousand runs of this second")
