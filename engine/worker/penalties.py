"""Repetition, frequency and presence penalties.

Knows which tokens each penalised request has seen and how often it generated them. The
bookkeeping is sparse: a step costs as much as there are distinct tokens in the penalised requests,
not as much as there are logits. Does not know rows' other parameters.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.types.sampling import SamplingParams
from engine.worker.transfer import to_device

_INITIAL_ROOM = 64


class TokenCounts:
    """Distinct tokens of one request's prompt and output, and how often the output holds each.

    `catch_up` follows the live output list, so that each generated token is looked at once.
    """

    __slots__ = ("_counts", "_num_read", "_output_token_ids", "_slots", "_token_ids", "params")

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.integer],
        output_token_ids: list[int],
    ) -> None:
        # Only the repetition penalty looks at the prompt.
        prompt = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        if params.repetition_penalty == 1.0:
            prompt = prompt[:0]
        self.params = params
        self._output_token_ids = output_token_ids
        self._num_read = 0
        self._slots = {token_id: slot for slot, token_id in enumerate(prompt.tolist())}
        self._token_ids = np.zeros(len(prompt) + _INITIAL_ROOM, dtype=np.int64)
        self._token_ids[: len(prompt)] = prompt
        self._counts = np.zeros(len(self._token_ids), dtype=np.float32)

    def __len__(self) -> int:
        """Number of distinct tokens."""
        return len(self._slots)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens, int64 [len(self)]."""
        return self._token_ids[: len(self._slots)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often the output holds each of them, float32 [len(self)]."""
        return self._counts[: len(self._slots)]

    def catch_up(self) -> None:
        """Count the output tokens that have come since the previous call."""
        for token_id in self._output_token_ids[self._num_read :]:
            assert token_id >= 0, "the output list holds a placeholder instead of a token"
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._token_ids):
                self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._token_ids[slot] = token_id
            self._counts[slot] += 1
        self._num_read = len(self._output_token_ids)


def needs_penalties(params: SamplingParams) -> bool:
    """Whether any of the three penalties is on."""
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def apply_penalties(logits: torch.Tensor, counts_by_row: Mapping[int, TokenCounts]) -> None:
    """Penalise seen tokens, in place.

    The repetition penalty divides positive logits and multiplies negative ones (Keskar et al.,
    2019) for tokens of prompt and output; then `frequency_penalty` times the count and
    `presence_penalty` once are subtracted for tokens of the output.

    Args:
        logits: float32 [num_reqs, vocab_size].
        counts_by_row: the penalised rows, caught up with their output.
    """
    if not counts_by_row:
        return
    all_counts = list(counts_by_row.values())
    lengths = [len(counts) for counts in all_counts]
    rows = np.repeat(np.fromiter(counts_by_row, dtype=np.int64, count=len(lengths)), lengths)
    token_ids = np.concatenate([counts.token_ids for counts in all_counts])
    seen = np.concatenate([counts.counts for counts in all_counts])
    per_row = np.array(
        [
            (
                counts.params.repetition_penalty,
                counts.params.frequency_penalty,
                counts.params.presence_penalty,
            )
            for counts in all_counts
        ],
        dtype=np.float32,
    )  # [num_penalised_rows, 3]
    repetition, frequency, presence = np.repeat(per_row, lengths, axis=0).T
    subtracted = frequency * seen + presence * (seen > 0)

    device = logits.device
    index = (to_device(rows, device), to_device(token_ids, device))
    factor = to_device(repetition, device)
    values = logits[index]  # [num_pairs]
    values = torch.where(values > 0, values / factor, values * factor)
    logits[index] = values - to_device(subtracted, device)
