"""What a caller may ask of token selection: `SamplingParams`, its defaults and its checks.

Knows the meaning of every field and how the struct travels between processes (MessagePack through
msgspec, where every check runs again). Knows nothing of tensors, batches or of how a token is
drawn: that is `engine.worker.sampler`.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import msgspec
from msgspec.structs import force_setattr

from engine.errors import SamplingParamsError
from engine.log import get_logger
from engine.structured.forms.params import StructuredOutputsParams
from engine.types.sampling_checks import (
    NamedArguments,
    check_extra_args,
    check_in_vocabulary,
    checked_integer,
    checked_logit_bias,
    checked_real,
    checked_strings,
    checked_token_ids,
    checked_token_sequences,
    copied,
    reject,
    short,
)
from engine.types.sampling_ranges import FLAGS, INTEGER_RANGES, OPTIONAL_INTEGERS, REAL_RANGES

logger = get_logger(__name__)

GREEDY_TEMPERATURE: Final = 1e-5
"""Temperatures below this one select the most likely token instead of drawing one."""
MIN_TEMPERATURE: Final = 1e-2
"""Random sampling is never colder than this: smaller quotients overflow float32."""
WHOLE_VOCABULARY: Final = -1
"""As a number of log-probabilities: one for every token of the vocabulary."""


class RequestOutputKind(enum.Enum):
    """Which part of the generated text each `RequestOutput` of a stream carries.

    With n > 1 an output of a stream has only the choices that have something new, the last output
    too: keep the newest of each `CompletionOutput.index`. FINAL_ONLY has all n at once.
    """

    CUMULATIVE = 0
    """Everything generated so far, of each choice in it."""
    DELTA = 1
    """Only what is new since the previous output."""
    FINAL_ONLY = 2
    """One output, when the request has finished."""


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=NamedArguments
):
    """How the tokens of one request are selected, and when it stops.

    Field names, defaults and meanings are vLLM's. Construction checks every field and raises
    `SamplingParamsError`; what depends on the model is checked by `verify`. Instances cannot be
    assigned to: `clone(field=value)` makes a changed copy.
    """

    NOUN: ClassVar[str] = "sampling parameter"
    EXAMPLE: ClassVar[str] = "temperature=0.8"
    PARAM: ClassVar[None] = None

    n: int = 1
    """Completions to generate for the prompt."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the output holds; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time the output holds it; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; above 0."""
    temperature: float = 1.0
    """Divides the logits; 0 selects the most likely token."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach this sum; in (0, 1]."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one; in [0, 1]."""
    seed: int | None = None
    """Makes the output repeatable; None or -1 lets the engine choose."""
    stop: str | list[str] | None = None
    """Text that ends the output; a list after construction."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output; a list after construction."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    max_tokens: int | None = 16
    """Most tokens to generate; None leaves the model's context as the only bound."""
    min_tokens: int = 0
    """Tokens to generate before a stop token may be chosen."""
    logprobs: int | None = None
    """Most likely tokens to report for each output position; -1 is the whole vocabulary."""
    prompt_logprobs: int | None = None
    """Most likely tokens to report for each prompt position; -1 is the whole vocabulary."""
    detokenize: bool = True
    """Turn the output tokens into text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens in the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop text at the end of the output."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of the given token ids; clamped to [-100, 100]."""
    allowed_token_ids: list[int] | None = None
    """Only these tokens may be generated."""
    bad_words: list[str] | None = None
    """Words that may not be completed; a list after construction."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Which part of the text each streamed output carries."""
    extra_args: dict[str, Any] | None = None
    """Arguments for custom logits processors; values that MessagePack can carry."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many last tokens of the prompt."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output must have; a dictionary of its fields will do."""

    all_stop_token_ids: frozenset[int] = frozenset()
    """Filled by the engine: `stop_token_ids` and, unless ignored, the model's end tokens."""
    bad_words_token_ids: list[list[int]] | None = None
    """Filled by the engine: the token sequences of `bad_words`."""

    def __post_init__(self) -> None:
        """Normalise and check every field.

        Raises:
            SamplingParamsError: a field has the wrong type or is out of range.
        """
        self._check_numbers()
        self._check_flags()
        self._check_stops()
        self._check_token_choices()
        self._check_contradictions()
        if self.is_greedy:
            self._check_greedy()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is selected rather than one drawn."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings, always as a list."""
        assert isinstance(self.stop, list)
        return self.stop

    def clone(self, **changes: Any) -> "SamplingParams":
        """Return an independent copy with `changes` applied and checked.

        Lists and dictionaries are copied, so that neither side sees the other's later changes.
        """
        values = {name: copied(getattr(self, name)) for name in self.__struct_fields__}
        return SamplingParams(**(values | changes))

    def verify(self, vocab_size: int, max_logprobs: int) -> None:
        """Check what depends on the model.

        Args:
            vocab_size: width of the model's logits; token ids must be below it.
            max_logprobs: most log-probabilities that a request may ask for; -1 is no limit.

        Raises:
            SamplingParamsError: a token id outside the vocabulary, or too many log-probabilities.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            check_in_vocabulary(name, getattr(self, name) or (), vocab_size)
        for bad_word in self.bad_words_token_ids or ():
            check_in_vocabulary("bad_words", bad_word, vocab_size)
        limit = vocab_size if max_logprobs == WHOLE_VOCABULARY else max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            wanted = vocab_size if value == WHOLE_VOCABULARY else value or 0
            if wanted > limit:
                raise SamplingParamsError(
                    f"{name} must be at most {limit}, got {value}"
                    f"{f' (the vocabulary of {vocab_size})' if value == WHOLE_VOCABULARY else ''}; "
                    "raise max_logprobs of the engine or ask for fewer.",
                    param=name,
                )

    def update_from_model(self, eos_token_ids: Sequence[int] = ()) -> "SamplingParams":
        """Fill `all_stop_token_ids`, in place, on the engine's own copy; return self.

        Raises:
            SamplingParamsError: until `min_tokens` nothing that may be generated would be left.
        """
        assert isinstance(self.stop_token_ids, list)
        eos = () if self.ignore_eos else eos_token_ids
        stop_token_ids = frozenset((*self.stop_token_ids, *eos))
        allowed = self.allowed_token_ids
        if self.min_tokens and allowed and stop_token_ids.issuperset(allowed):
            raise SamplingParamsError(
                f"allowed_token_ids {short(allowed)} holds only stop tokens, which "
                f"min_tokens={self.min_tokens} forbids at first; allow another token or set "
                "min_tokens=0.",
                param="allowed_token_ids",
            )
        force_setattr(self, "all_stop_token_ids", stop_token_ids)
        return self

    def update_from_tokenizer(self, encode: Callable[[str], Sequence[int]]) -> "SamplingParams":
        """Fill `bad_words_token_ids`, in place, on the engine's own copy; return self.

        Each word is encoded as at the start of a text and as after a space. The second form
        counts only where the space melts into the first token (same length, other first token).

        Args:
            encode: text to token ids, without special tokens.

        Raises:
            SamplingParamsError: a word without tokens, or every allowed token is a bad word.
        """
        if not self.bad_words:
            return self
        sequences: list[list[int]] = []
        for word in self.bad_words:
            at_start = list(encode(word.lstrip()))
            if not at_start:
                reject("bad_words", word, "words of at least one token each", "remove it")
            sequences.append(at_start)
            after_space = list(encode(" " + word.lstrip()))
            if len(after_space) == len(at_start) and after_space[0] != at_start[0]:
                sequences.append(after_space)
        banned = {sequence[0] for sequence in sequences if len(sequence) == 1}
        if self.allowed_token_ids and banned.issuperset(self.allowed_token_ids):
            raise SamplingParamsError(
                f"allowed_token_ids {short(self.allowed_token_ids)} are all forbidden by "
                "bad_words; allow another token or remove a word.",
                param="allowed_token_ids",
            )
        force_setattr(self, "bad_words_token_ids", sequences)
        return self

    @classmethod
    def from_generation_defaults(cls, defaults: Mapping[str, Any]) -> "SamplingParams":
        """Build parameters from a checkpoint's `generation_config.json`.

        Keys that say nothing about sampling, and keys whose value is null, are left out.

        Raises:
            SamplingParamsError: the file's value is out of range.
        """
        values = {
            field: defaults[key]
            for key, field in _GENERATION_CONFIG_FIELDS.items()
            if defaults.get(key) is not None
        }
        return cls(**values)

    def _check_numbers(self) -> None:
        for name, low, high, allowed in INTEGER_RANGES:
            value = getattr(self, name)
            if value is None and name in OPTIONAL_INTEGERS:
                continue
            self._set(name, checked_integer(name, value, low, high, allowed))
        for name, lowest, highest, allowed in REAL_RANGES:
            self._set(name, checked_real(name, getattr(self, name), lowest, highest, allowed))
        if self.repetition_penalty == 0.0:
            reject("repetition_penalty", self.repetition_penalty, "a number above 0")
        if self.top_p == 0.0:
            reject("top_p", self.top_p, "a number in (0, 1]", "for greedy use temperature=0")
        if self.top_k == -1:
            self._set("top_k", 0)
        if self.seed == -1:
            self._set("seed", None)
        if GREEDY_TEMPERATURE <= self.temperature < MIN_TEMPERATURE:
            logger.warning(
                "temperature %g is below %g, where float32 logits overflow; using %g. "
                "Use temperature=0 for greedy sampling.",
                self.temperature,
                MIN_TEMPERATURE,
                MIN_TEMPERATURE,
            )
            self._set("temperature", MIN_TEMPERATURE)

    def _check_flags(self) -> None:
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                reject(name, getattr(self, name), "True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            reject("output_kind", self.output_kind, "a RequestOutputKind")

    def _check_stops(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self._set("stop", checked_strings("stop", stop))
        stop_token_ids = () if self.stop_token_ids is None else self.stop_token_ids
        self._set("stop_token_ids", checked_token_ids("stop_token_ids", stop_token_ids))
        self._set(
            "all_stop_token_ids",
            frozenset(checked_token_ids("all_stop_token_ids", self.all_stop_token_ids))
            | frozenset(self.stop_token_ids or ()),
        )

    def _check_token_choices(self) -> None:
        self._set("bad_words", checked_strings("bad_words", self.bad_words))
        if self.bad_words_token_ids is not None:
            sequences = checked_token_sequences("bad_words_token_ids", self.bad_words_token_ids)
            self._set("bad_words_token_ids", sequences)
        if self.allowed_token_ids is not None:
            allowed = checked_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                reject("allowed_token_ids", [], "None or at least one token id")
            self._set("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._set("logit_bias", checked_logit_bias(self.logit_bias))
        if self.extra_args is not None:
            check_extra_args(self.extra_args)
        if self.structured_outputs is not None:
            self._set(
                "structured_outputs", StructuredOutputsParams.from_any(self.structured_outputs)
            )

    def _check_contradictions(self) -> None:
        if self.stop and not self.detokenize:
            raise SamplingParamsError(
                f"stop strings need detokenize=True, got stop={self.stop!r} with "
                "detokenize=False; use stop_token_ids or set detokenize=True.",
                param="stop",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            reject("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")

    def _check_greedy(self) -> None:
        if self.n > 1:
            remedy = "all would be the same: set temperature above 0 for different completions"
            reject("n", self.n, "1 when using greedy sampling", remedy)
        # Truncation cannot change the most likely token: greedy rows skip it altogether.
        for name, value in (("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            self._set(name, value)

    def _set(self, name: str, value: object) -> None:
        force_setattr(self, name, value)


_GENERATION_CONFIG_FIELDS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
