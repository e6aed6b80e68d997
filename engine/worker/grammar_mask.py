"""Forbids the tokens that a request's structured output does not allow.

Knows bits, rows and logits. Does not know what the bits come from.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from engine.types.plan import GrammarOutput
from engine.worker.transfer import to_device

_WORD_BITS = 32
_ALL = np.int32(-1)
_FEW = 64
"""Up to so many words it is cheaper to list tokens than to go through the vocabulary."""


class GrammarMask:
    """Which tokens some rows of a step may take.

    Args:
        output: a bitmask by request.
        row_of: the row of each request of the step.
    """

    def __init__(self, output: GrammarOutput, row_of: Mapping[str, int]) -> None:
        self._rows = [row_of[req_id] for req_id in output.req_ids]
        self._bitmask = output.bitmask

    def apply(self, logits: torch.Tensor) -> None:
        """Set all other tokens of these rows to minus infinity, in place.

        Args:
            logits: float32 [num_reqs, vocab_size].
        """
        if logits.device.type == "cpu":
            values = logits.numpy()
            for row, words in zip(self._rows, self._bitmask, strict=True):
                _keep_allowed(values[row], words)
        else:
            self.apply_on_device(logits)

    def apply_on_device(self, logits: torch.Tensor) -> None:
        """`apply` for a device: a few kernels over whole rows."""
        vocab_size = logits.shape[1]
        words = to_device(self._bitmask, logits.device)  # [num_rows, num_words]
        shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
        bits = (words[:, :, None] >> shifts) & 1  # [num_rows, num_words, 32]
        forbidden = bits.flatten(1)[:, :vocab_size] == 0  # [num_rows, vocab_size]
        rows = to_device(np.array(self._rows, dtype=np.int64), logits.device)
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


def _keep_allowed(values: npt.NDArray[np.float32], words: npt.NDArray[np.int32]) -> None:
    """Set what is not allowed to minus infinity; float32 [vocab_size], int32 [num_words].

    Most masks allow next to nothing (the middle of a key) or next to everything (free text).
    """
    if len(words_with_any := np.flatnonzero(words)) <= _FEW:
        allowed = _tokens(words, words_with_any, len(values))
        kept = values[allowed]
        values.fill(-np.inf)
        values[allowed] = kept
    elif len(words_with_gaps := np.flatnonzero(words != _ALL)) <= _FEW:
        values[_tokens(~words, words_with_gaps, len(values))] = -np.inf
    else:
        # Without a branch for each token, which processors guess wrong: 1 becomes inf, 0 -inf.
        allows = np.unpackbits(words.view(np.uint8), count=len(values), bitorder="little")
        highest = allows.astype(np.float32)
        highest -= 0.5
        highest *= np.inf
        np.minimum(values, highest, out=values)


def _tokens(
    words: npt.NDArray[np.int32], where: npt.NDArray[np.int64], vocab_size: int
) -> npt.NDArray[np.int64]:
    """The tokens whose bits are set, looking only at these words."""
    bits = np.unpackbits(words[where].view(np.uint8), bitorder="little").reshape(-1, _WORD_BITS)
    index, bit = np.nonzero(bits)
    token_ids = where[index] * _WORD_BITS + bit
    return token_ids[token_ids < vocab_size]
