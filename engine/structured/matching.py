"""How far one request's output has got in its grammar, and which tokens may come next.

Knows tokens and bits. Knows no step, no batch and not how grammars are made.
"""

import time
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine.structured.constraint import message_of

WORD_BITS: Final = 32
_MAX_MEAN_S: Final = 0.004
_NUM_BEFORE_MEAN: Final = 16
_MAX_WORST_S: Final = 0.100
TOO_SLOW: Final = (
    "its structured output can be matched in too many ways to be followed; remove nested or "
    "ambiguous repetitions from the grammar"
)

_DEAD_END: Final = (
    "nothing may follow what its structured output has led to: a part of the constraint is "
    "unsatisfiable"
)


def num_words(vocab_size: int) -> int:
    """Length of a bitmask over the vocabulary in words of 32 bits."""
    return -(-vocab_size // WORD_BITS)


def bits_of(token_ids: list[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """A bitmask in which these tokens' bits are set; int32 [num_words]."""
    bits = np.zeros(num_words(vocab_size) * WORD_BITS, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def end_mask_of(end_token_ids: list[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """The bits of end tokens, and those of no token behind the vocabulary; int32 [num_words]."""
    padding = list(range(vocab_size, num_words(vocab_size) * WORD_BITS))
    return bits_of([*end_token_ids, *padding], vocab_size)


class MatchTime:
    """Processor time that a grammar takes for single tokens, and whether that is too much."""

    __slots__ = ("_begin_s", "_num", "_total_s", "_worst_s")

    def __init__(self) -> None:
        self._num = 0
        self._begin_s = self._total_s = self._worst_s = 0.0

    @property
    def is_too_long(self) -> bool:
        """Whether following this grammar would hold everybody's steps up.

        What is bad grows with the text, token by token, so that it is noticed before it is long.
        """
        mean_s = self._total_s / max(1, self._num)
        return self._worst_s > _MAX_WORST_S or (
            self._num >= _NUM_BEFORE_MEAN and mean_s > _MAX_MEAN_S
        )

    def __enter__(self) -> None:
        self._begin_s = time.thread_time()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        taken_s = time.thread_time() - self._begin_s
        self._num += 1
        self._total_s += taken_s
        self._worst_s = max(self._worst_s, taken_s)


class Grammar:
    """One request's way through its compiled grammar.

    An end token is allowed wherever the text may end. Where nothing but an end may come, the
    request is over without one. With `ignore_eos` end tokens are never allowed, so that the text is
    as long as the grammar lets it be.

    Args:
        matcher: an `LLMatcher` of llguidance of its own, or something with its methods.
        end_mask: the model's end tokens, from `end_mask_of`.
        ignore_eos: see above.
    """

    __slots__ = (
        "_end_mask",
        "_error",
        "_ignore_eos",
        "_is_filled",
        "_is_last",
        "_mask",
        "_matcher",
        "_time",
    )

    def __init__(
        self, matcher: Any, end_mask: npt.NDArray[np.int32], *, ignore_eos: bool = False
    ) -> None:
        self._matcher = matcher
        self._end_mask = end_mask
        self._ignore_eos = ignore_eos
        self._mask = np.empty(len(end_mask), dtype=np.int32)
        self._is_filled = False
        self._is_last = False
        self._error: str | None = None
        self._time = MatchTime()

    def accept(self, token_ids: list[int]) -> str | None:
        """Advance past sampled tokens; returns why the request cannot go on, if it cannot."""
        self._is_filled = False
        for token_id in token_ids:
            try:
                with self._time:
                    is_accepted = self._error is None and self._matcher.consume_token(token_id)
            except RuntimeError as error:  # the library's, about this grammar alone
                self._error = f"following the structured output failed: {error}"
                break
            if not is_accepted:
                return self._error or (
                    f"token {token_id} was sampled, which the structured output does not allow: "
                    "nothing that it allows was left by the other parameters (allowed_token_ids, "
                    "bad_words, min_tokens, stop_token_ids) or by a logits processor"
                )
        return self._error or (TOO_SLOW if self._time.is_too_long else None)

    def num_accepted(self, token_ids: list[int]) -> int:
        """How many of these tokens might follow, the first ones; changes nothing."""
        return int(self._matcher.validate_tokens(token_ids))

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens; never more than have been accepted."""
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise ValueError(f"cannot take back {num_tokens} tokens: {self._matcher.get_error()}")
        self._is_filled = False

    def fork(self) -> "Grammar":
        """Another way on from here, which this one does not see."""
        return Grammar(self._matcher.deep_copy(), self._end_mask, ignore_eos=self._ignore_eos)

    def forced_tokens(self) -> list[int]:
        """The tokens that have to come next, as the tokenizer writes their text; may be none."""
        return list(self._matcher.compute_ff_tokens())

    @property
    def is_forced(self) -> bool:
        """Whether what comes next is known already, at least its first byte."""
        return self._error is None and bool(self._matcher.compute_ff_bytes())

    @property
    def is_over(self) -> bool:
        """Whether the text is complete and nothing may follow it."""
        # Only a text that may end here can be over; so the mask, which the next step will need,
        # is made now for few tokens and off the step's path for the others.
        if self._matcher.is_stopped():
            return True
        if not self._matcher.is_accepting():
            return False
        self._fill()
        return self._is_last

    def write_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next, and clear the others; [num_words]."""
        self._fill()
        row[:] = self._mask
        if self._ignore_eos and not self._is_last:
            row &= ~self._end_mask

    def _fill(self) -> None:
        if self._is_filled:
            return
        self._is_filled = True
        reason = ""
        try:
            with self._time:
                self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            if self._matcher.is_error():
                reason = message_of(self._matcher.get_error())
        except RuntimeError as error:
            reason = str(error) or type(error).__name__
        if reason:  # told with the next token, which is none that is allowed
            self._mask.fill(0)
            self._error = f"following the structured output failed: {reason}"
        elif not self._mask.any():
            self._error = _DEAD_END
        self._is_last = self._error is None and not (self._mask & ~self._end_mask).any()
