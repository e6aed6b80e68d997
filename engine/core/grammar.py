"""How far one request's output has got in its grammar, and which tokens may come next.

Knows tokens and bits. Knows no step, no batch and not how grammars are made.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine.types.grammar_messages import MatchTime

WORD_BITS: Final = 32

_TOO_SLOW: Final = (
    "its structured output can be matched in too many ways to be followed; remove nested or "
    "ambiguous repetitions from the grammar"
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


class Grammar:
    """One request's way through its compiled grammar.

    An end token is allowed wherever the text may end. Where nothing but an end may come, the
    request is over without one. With `ignore_eos` end tokens are never allowed, so that the text is
    as long as the grammar lets it be.

    Args:
        matcher: a fresh `GrammarMatcher` of xgrammar, or something with its methods.
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
        self._mask = np.empty((1, len(end_mask)), dtype=np.int32)
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
                    is_accepted = self._matcher.accept_token(token_id)
            except RuntimeError as error:  # the library's, about this grammar alone
                self._error = f"following the structured output failed: {error}"
                break
            if not is_accepted:
                return self._error or (
                    f"token {token_id} was sampled, which the structured output does not allow: "
                    "nothing that it allows was left by the other parameters (allowed_token_ids, "
                    "bad_words, min_tokens, stop_token_ids) or by a logits processor"
                )
        return self._error or (_TOO_SLOW if self._time.is_too_long else None)

    @property
    def is_over(self) -> bool:
        """Whether the text is complete and nothing may follow it."""
        # Only a text that may end here can be over; so the mask, which the next step will need,
        # is made now for few tokens and off the step's path for the others.
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        self._fill()
        return self._is_last

    def write_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next, and clear the others; [num_words]."""
        self._fill()
        row[:] = self._mask[0]
        if self._ignore_eos and not self._is_last:
            row &= ~self._end_mask

    def _fill(self) -> None:
        if self._is_filled:
            return
        self._is_filled = True
        try:
            with self._time:
                self._matcher.fill_next_token_bitmask(self._mask)
        except RuntimeError as error:  # told with the next token, which is none that is allowed
            self._mask.fill(0)
            self._error = f"following the structured output failed: {error}"
        self._is_last = self._error is None and not (self._mask[0] & ~self._end_mask).any()
