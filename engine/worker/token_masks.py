"""Tokens that a request may not generate: outside `allowed_token_ids`, or ending a bad word.

Knows rows, token ids and the output so far. Does not know text: words arrive as token sequences.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from engine.worker.builtin_processors import row_token_pairs
from engine.worker.transfer import to_device


class AllowedTokens:
    """The rows that are limited to a list of tokens; built once for each change of the batch."""

    def __init__(self, allowed_by_row: Mapping[int, Sequence[int]], device: torch.device) -> None:
        self._rows = to_device(np.array(list(allowed_by_row), dtype=np.int64), device)
        self._pairs = row_token_pairs(allowed_by_row.items(), device)

    def apply(self, logits: torch.Tensor) -> None:
        """Set all other tokens of these rows to minus infinity, in place.

        Args:
            logits: float32 [num_reqs, vocab_size].
        """
        kept = logits[self._pairs]
        logits[self._rows] = -torch.inf
        logits[self._pairs] = kept


class BadWords:
    """The token sequences that one request may not complete.

    Only a sequence's last token is ever forbidden, and only while the output ends with the others.
    """

    __slots__ = ("_always", "_by_prefix", "_output_token_ids")

    def __init__(self, sequences: Iterable[Sequence[int]], *, output_token_ids: list[int]) -> None:
        self._output_token_ids = output_token_ids
        self._always: set[int] = set()
        self._by_prefix: dict[tuple[int, ...], set[int]] = {}
        for *prefix, last in sequences:
            if prefix:
                self._by_prefix.setdefault(tuple(prefix), set()).add(last)
            else:
                self._always.add(last)

    def forbidden(self) -> set[int]:
        """Tokens that would complete a bad word now."""
        output = self._output_token_ids
        tokens = set(self._always)
        for prefix, last_tokens in self._by_prefix.items():
            if tuple(output[-len(prefix) :]) == prefix:
                tokens |= last_tokens
        return tokens


def apply_bad_words(logits: torch.Tensor, bad_words_by_row: Mapping[int, BadWords]) -> None:
    """Set tokens that would complete a bad word to minus infinity, in place.

    Args:
        logits: float32 [num_reqs, vocab_size].
        bad_words_by_row: the rows that have bad words.
    """

    def entries() -> Iterator[tuple[int, set[int]]]:
        for row, bad_words in bad_words_by_row.items():
            yield row, bad_words.forbidden()

    logits[row_token_pairs(entries(), logits.device)] = -torch.inf
