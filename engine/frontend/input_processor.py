"""From what the caller gave to what the core takes: validated, tokenized, numbered.

Everything that can be wrong with a request is found here, before anything reaches the core.
"""

import copy
import numbers
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import force_setattr

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.errors import PromptError, RequestError, SamplingParamsError
from engine.text.tokenizer import Tokenizer
from engine.types.messages import EngineCoreRequest
from engine.types.sampling import SamplingParams
from engine.types.sampling_checks import encodable, is_plain_integers, short

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dictionary with `prompt` or `prompt_token_ids`, maybe `cache_salt`, and for
a text that has its special tokens already `add_special_tokens` (False)."""

_PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt", "add_special_tokens"})
_CHARACTERS_PER_TOKEN = 8
"""Texts with more of them for each token of the context are looked at before they are tokenized."""
_MASK = (1 << 64) - 1


class ProcessedPrompt(NamedTuple):
    """A prompt as the engine uses it."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None


class ProcessedParams(NamedTuple):
    """Parameters as `InputProcessor.process_params` has made them."""

    params: SamplingParams


class InputProcessor:
    """Checks prompts and parameters against the model, and makes requests of them."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        *,
        first_request_num: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = config.model.max_model_len or model.max_position_embeddings
        self._model = model
        self._max_logprobs = config.model.max_logprobs
        self._seed = config.model.seed
        self._next_num = first_request_num
        self._processors: list[type] = []
        if config.model.logits_processors:
            # Brings torch into this process, which who brings processors has accepted.
            from engine.worker.logits_processor import load_logits_processors

            self._processors = load_logits_processors(list(config.model.logits_processors))

    def process_prompt(self, prompt: Prompt, params: SamplingParams) -> ProcessedPrompt:
        """Tokenize and check one prompt.

        Raises:
            PromptError: it is empty, too long, of a wrong type, or holds an invalid token id.
        """
        text, ids, salt = self._unpack(prompt)
        most = params.truncate_prompt_tokens
        if ids is None:
            assert text is not None
            adds = not isinstance(prompt, Mapping) or prompt.get("add_special_tokens", True)
            ids = self._encode(text, most, add_special_tokens=bool(adds))
        elif most is not None:
            ids = ids[-most:]
        if not ids:
            raise PromptError("the prompt is empty; give at least one token.")
        if len(ids) >= self.max_model_len:
            raise too_long(str(len(ids)), self.max_model_len, most)
        return ProcessedPrompt(text, ids, salt)

    def process_params(self, params: SamplingParams) -> SamplingParams:
        """The engine's own copy of the parameters, checked against model and tokenizer.

        Raises:
            SamplingParamsError: a parameter that this model or engine cannot honour.
        """
        if not isinstance(params, SamplingParams):
            raise SamplingParamsError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}"
            )
        if self.tokenizer is None and (params.stop_strings or params.bad_words):
            raise SamplingParamsError(
                "stop strings and bad_words need a tokenizer, and the engine has none "
                "(skip_tokenizer_init=True); use stop_token_ids.",
                param="stop" if params.stop_strings else "bad_words",
            )
        if self.tokenizer is None and params.structured_outputs is not None:
            raise SamplingParamsError(
                "structured_outputs needs to know the text of each token, and the engine has no "
                "tokenizer (skip_tokenizer_init=True); use allowed_token_ids, or load a tokenizer.",
                param="structured_outputs",
            )
        own = params.clone().update_from_model(self._model.eos_token_ids)
        if self.tokenizer is not None:
            encode = self.tokenizer.encode
            own.update_from_tokenizer(lambda text: encode(text, add_special_tokens=False))
        own.verify(self._model.vocab_size, self._max_logprobs)
        for processor in self._processors:
            _validate_with(processor, own)
        return own

    @staticmethod
    def check_priority(priority: Any) -> int:
        """The priority as the wire carries it.

        Raises:
            PromptError: it is not an integer of 64 bits.
        """
        integral = isinstance(priority, numbers.Integral) and not isinstance(priority, bool)
        if not integral or not -(2**63) <= priority < 2**63:
            raise PromptError(
                f"priority must be an integer of 64 bits, got {short(priority)}", param="priority"
            )
        return int(priority)

    @staticmethod
    def check_request(request_id: Any, arrival_ns: Any, traceparent: Any) -> None:
        """Check what else of a request goes to the core as it is.

        Raises:
            RequestError: a wrong type, or a text that no message can carry.
        """
        if not isinstance(request_id, str) or not request_id or not encodable(request_id):
            raise RequestError(
                "request_id must be a string that is neither empty nor has lone surrogates, got "
                f"{short(request_id)}",
                param="request_id",
            )
        integral = isinstance(arrival_ns, int) and not isinstance(arrival_ns, bool)
        if not integral or not 0 <= arrival_ns < 2**63:
            raise RequestError(
                "arrival_ns must be an integer from time.monotonic_ns(), or None for now; got "
                f"{short(arrival_ns)}",
                param="arrival_ns",
            )
        if traceparent is not None and not (
            isinstance(traceparent, str) and encodable(traceparent)
        ):
            raise RequestError(
                "traceparent must be the text of a W3C traceparent header, or None; got "
                f"{short(traceparent)}",
                param="traceparent",
            )

    def make_request(
        self,
        request_id: str,
        prompt: ProcessedPrompt,
        params: SamplingParams,
        *,
        arrival_ns: int | None = None,
        priority: int = 0,
        traceparent: str | None = None,
    ) -> EngineCoreRequest:
        """Number a request. `params` must come from `process_params`.

        The id on the wire carries the number too, so that an id may be used again at once after
        an abort.
        """
        num = self._next_num
        self._next_num += 1
        if params.seed is None and not params.is_greedy:
            params = copy.copy(params)  # they have been checked, which may take long
            force_setattr(params, "seed", _mix(self._seed, num))
        return EngineCoreRequest(
            request_id=f"{request_id}-{num}",
            request_num=num,
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            arrival_ns=time.monotonic_ns() if arrival_ns is None else arrival_ns,
            priority=priority,
            cache_salt=prompt.cache_salt,
            traceparent=traceparent,
        )

    def _encode(self, text: str, most: int | None, *, add_special_tokens: bool) -> list[int]:
        """A text's ids, the last `most` of them; one that is far too long is not tokenized."""
        tokenizer, limit = self.tokenizer, self.max_model_len
        if tokenizer is None:
            raise PromptError(
                "the prompt is text, but the engine has no tokenizer "
                "(skip_tokenizer_init=True); give token ids."
            )
        if most is not None and most < limit:
            return tokenizer.encode_end(text, most, add_special_tokens=add_special_tokens)
        if len(text) > _CHARACTERS_PER_TOKEN * limit:
            num_tokens = tokenizer.num_tokens_at_least(text, enough=limit)
            if num_tokens >= limit:
                raise too_long(f"at least {num_tokens}", limit, most)
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids if most is None else ids[-most:]

    def _unpack(self, prompt: Prompt) -> tuple[str | None, list[int] | None, str | None]:
        """Text or ids (one of them None) and the cache salt."""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - _PROMPT_KEYS
            if unknown or not {"prompt", "prompt_token_ids"} & set(prompt):
                raise PromptError(
                    "a prompt dictionary needs prompt or prompt_token_ids, and may have "
                    f"cache_salt and add_special_tokens; got {sorted(map(str, prompt))}"
                )
            salt = prompt.get("cache_salt")
            if salt is not None and (not isinstance(salt, str) or not salt):
                raise PromptError(
                    f"cache_salt must be a string that is not empty, got {short(salt)}",
                    param="cache_salt",
                )
            if salt is not None and not encodable(salt):
                raise PromptError(
                    f"cache_salt must have no lone surrogates, got {short(salt)}",
                    param="cache_salt",
                )
            adds = prompt.get("add_special_tokens", True)
            if not isinstance(adds, bool):
                raise PromptError(
                    f"add_special_tokens must be True or False, got {short(adds)}",
                    param="add_special_tokens",
                )
            text = prompt.get("prompt")
            ids = prompt.get("prompt_token_ids")
            if text is not None and not isinstance(text, str):
                raise PromptError(f"prompt must be a string, got {type(text).__name__}")
            if ids is None:
                if text is None:
                    raise PromptError("prompt and prompt_token_ids are both None; give one.")
                return text, None, salt
            return text, self._check_ids(ids), salt
        if isinstance(prompt, str):
            return prompt, None, None
        return None, self._check_ids(prompt), None

    def _check_ids(self, ids: Any) -> list[int]:
        if isinstance(ids, bytes | bytearray) or not isinstance(ids, Sequence):
            to_list = getattr(ids, "tolist", None)
            if to_list is None:
                raise PromptError(
                    "a prompt must be a string, a list of token ids, or a dictionary with "
                    f"prompt or prompt_token_ids; got {type(ids).__name__}"
                )
            ids = to_list()
            if not isinstance(ids, list):
                raise PromptError(f"a prompt must be a list of token ids, got the scalar {ids!r}")
        vocab_size = self._model.vocab_size
        if is_plain_integers(ids) and min(ids) >= 0 and max(ids) < vocab_size:
            return ids.copy()
        for position, token_id in enumerate(ids):
            integral = isinstance(token_id, numbers.Integral) and not isinstance(token_id, bool)
            if not integral or not 0 <= token_id < vocab_size:
                raise PromptError(
                    f"token id {short(token_id)} at position {position} is not an integer from "
                    f"0 to {vocab_size - 1}"
                )
        return [int(token_id) for token_id in ids]


def too_long(num_tokens: str, context: int, most: int | None = None) -> PromptError:
    """The error of a prompt that the context cannot hold.

    Args:
        num_tokens: how many tokens it has, in words.
        most: `truncate_prompt_tokens`, where it is set.
    """
    fault = f"the prompt has {num_tokens}"
    remedy = "Shorten the prompt, or keep only its end with truncate_prompt_tokens."
    if most is not None:
        fault = f"truncate_prompt_tokens={most} keeps too many of the prompt's"
        remedy = f"Keep at most {context - 1} of them."
    return PromptError(
        f"This model's maximum context length is {context} tokens (max_model_len), which must also "
        f"hold an output token, and {fault}. {remedy}",
        param=None if most is None else "truncate_prompt_tokens",
        code="context_length_exceeded",
    )


def _validate_with(processor: Any, params: SamplingParams) -> None:
    """Let a custom logits processor judge the parameters."""
    try:
        processor.validate_params(params)
    except SamplingParamsError:
        raise
    except Exception as error:
        raise SamplingParamsError(f"{processor.__qualname__}: {error}") from error


def _mix(seed: int, num: int) -> int:
    """A 63-bit seed for request `num` (splitmix64's finaliser, Steele et al. 2014)."""
    value = (seed * 0x9E3779B97F4A7C15 + num + 1) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) >> 1
