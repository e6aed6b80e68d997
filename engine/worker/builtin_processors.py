"""The logits processors that every worker runs: minimum length and logit bias.

Knows how sparse changes (a few tokens of a few rows) become one indexed write. Does not know the
order in which processors run: that is `engine.worker.sampler`.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from engine.types.sampling import SamplingParams
from engine.worker.logits_processor import BatchUpdate, LogitsProcessor, apply_update
from engine.worker.transfer import to_device


def row_token_pairs(
    entries: Iterable[tuple[int, Iterable[int]]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index tensors that address the given tokens of the given rows.

    Args:
        entries: (row, token ids) pairs.
        device: where the logits live.

    Returns:
        Rows and columns, int64 [num_pairs] each.
    """
    rows: list[int] = []
    columns: list[int] = []
    for row, token_ids in entries:
        columns.extend(token_ids)
        rows.extend([row] * (len(columns) - len(rows)))
    pairs = to_device(np.array((rows, columns), dtype=np.int64), device)  # [2, num_pairs]
    return pairs[0], pairs[1]


class MinTokensLogitsProcessor(LogitsProcessor):
    """Forbids stop tokens until a request has `min_tokens` output tokens."""

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Start without requests."""
        self._device = device
        self._state: dict[int, tuple[int, list[int], frozenset[int]]] = {}
        self._pairs: tuple[torch.Tensor, torch.Tensor] | None = None

    def is_argmax_invariant(self) -> bool:
        """False: a forbidden stop token may be the most likely one."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows, and let go of requests that have become long enough."""
        changed = apply_update(self._state, batch_update, _min_tokens_state)
        for row in [
            row for row, (num_tokens, output, _) in self._state.items() if len(output) >= num_tokens
        ]:
            del self._state[row]
            changed = True
        if changed:
            entries = ((row, stop_ids) for row, (_, _, stop_ids) in self._state.items())
            self._pairs = row_token_pairs(entries, self._device) if self._state else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Set the forbidden tokens to minus infinity, in place; [batch_size, vocab_size]."""
        if self._pairs is not None:
            logits[self._pairs] = -torch.inf
        return logits


class LogitBiasLogitsProcessor(LogitsProcessor):
    """Adds `logit_bias` to the logits."""

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Start without requests."""
        self._device = device
        self._state: dict[int, dict[int, float]] = {}
        self._pairs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._biases = torch.empty(0)

    def is_argmax_invariant(self) -> bool:
        """False: a bias may change which token is the most likely one."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows."""
        if not apply_update(self._state, batch_update, _logit_bias_state):
            return
        self._pairs = row_token_pairs(self._state.items(), self._device) if self._state else None
        biases = [bias for by_token in self._state.values() for bias in by_token.values()]
        self._biases = to_device(np.array(biases, dtype=np.float32), self._device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Add the biases, in place; [batch_size, vocab_size]."""
        if self._pairs is not None:
            logits[self._pairs] += self._biases
        return logits


def _min_tokens_state(
    params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
) -> tuple[int, list[int], frozenset[int]] | None:
    if len(output_token_ids) >= params.min_tokens or not params.all_stop_token_ids:
        return None
    return params.min_tokens, output_token_ids, params.all_stop_token_ids


def _logit_bias_state(
    params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
) -> dict[int, float] | None:
    return params.logit_bias or None
