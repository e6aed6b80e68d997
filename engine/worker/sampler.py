"""From the logits of one step to one token for each request.

Knows the order in which everything is applied. Knows neither how rows are kept
(`engine.worker.sampling_state`) nor how each change is made (the modules imported below).

For each row, in this order: log-probabilities of the untouched logits; tokens that its structured
output allows; allowed tokens; bad words;
logits processors that may change the most likely token (minimum length, logit bias, the user's);
repetition, frequency and presence penalty. Greedy rows then take the most likely token. The others
are divided by the temperature, pass the remaining processors, lose tokens to min-p, top-k and
top-p, and draw.
"""

from dataclasses import dataclass

import numpy as np
import torch

from engine.config import LOGPROBS_MODES
from engine.errors import ConfigError
from engine.types.logprobs import LogprobsLists
from engine.worker.grammar_mask import GrammarMask
from engine.worker.penalties import apply_penalties
from engine.worker.random import draw_keys
from engine.worker.sampling_state import SamplingMetadata
from engine.worker.token_logprobs import gather_logprobs, scatter_rows
from engine.worker.token_masks import apply_bad_words
from engine.worker.transfer import to_device
from engine.worker.truncation import NO_TOKEN, Truncation, draw


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What one step selected; row i belongs to row i of the logits."""

    sampled_token_ids: torch.Tensor
    """int64 [num_reqs], on the device of the logits."""
    logprobs: LogprobsLists | None
    """As wide as the widest request; None if no row asked. See `slice_logprobs`."""


class Sampler:
    """Selects tokens; holds no state between steps.

    Args:
        logprobs_mode: `raw_logprobs` reports what the model said, `processed_logprobs` what was
            drawn from; the `_logits` forms report the same values before normalisation.

    Raises:
        ConfigError: an unknown mode.
    """

    def __init__(self, logprobs_mode: str = "raw_logprobs") -> None:
        if logprobs_mode not in LOGPROBS_MODES:
            raise ConfigError(
                f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {logprobs_mode!r}."
            )
        self.logprobs_mode = logprobs_mode
        self._reports_raw = logprobs_mode.startswith("raw_")
        self._normalises = logprobs_mode.endswith("_logprobs")

    def __call__(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        grammar_mask: GrammarMask | None = None,
    ) -> SamplerOutput:
        """Select one token for each row.

        A row in which every token has become forbidden gets its `fallback_token_ids` entry.

        Args:
            logits: float32 [num_reqs, vocab_size]; overwritten.
            metadata: the step's parameters.
            grammar_mask: which tokens structured outputs allow.
        """
        assert logits.shape[0] == metadata.num_reqs
        assert logits.dtype == torch.float32
        wants_logprobs = metadata.max_num_logprobs is not None
        reported = None
        if wants_logprobs and self._reports_raw:
            reported = _copy_of_rows(logits, metadata.logprobs_rows)
        if grammar_mask is not None:
            grammar_mask.apply(logits)
        logits = self.apply_logits_processors(logits, metadata)
        mask_logits = wants_logprobs and not self._reports_raw
        sampled, logits = self.sample(logits, metadata, mask_logits=mask_logits)
        logprobs = None
        if metadata.max_num_logprobs is not None:
            if reported is None:
                reported = logits[metadata.logprobs_rows]
            lists = gather_logprobs(
                reported,
                sampled[metadata.logprobs_rows],
                metadata.max_num_logprobs,
                normalise=self._normalises,
            )
            logprobs = scatter_rows(lists, metadata.logprobs_rows, metadata.num_reqs)
        return SamplerOutput(sampled_token_ids=sampled, logprobs=logprobs)

    @staticmethod
    def apply_logits_processors(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Apply everything that may change the most likely token; [num_reqs, vocab_size]."""
        if metadata.allowed_tokens is not None:
            metadata.allowed_tokens.apply(logits)
        if metadata.bad_words:
            apply_bad_words(logits, metadata.bad_words)
        for processor in metadata.processors:
            logits = processor.apply(logits)
        apply_penalties(logits, metadata.penalties)
        return logits

    @staticmethod
    def sample(
        logits: torch.Tensor, metadata: SamplingMetadata, *, mask_logits: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Select tokens from processed logits.

        Args:
            logits: float32 [num_reqs, vocab_size]; overwritten unless all rows are greedy.
            metadata: the step's parameters.
            mask_logits: the caller wants the returned logits to show what truncation dropped.

        Returns:
            Token ids, int64 [num_reqs], and the logits that they were selected from.
        """
        if metadata.all_greedy:
            return _greedy(logits, metadata.greedy_rows, metadata), logits
        sampled = torch.empty(metadata.num_reqs, dtype=torch.int64, device=logits.device)
        if not metadata.all_random:
            sampled[metadata.greedy_rows] = _greedy(logits, metadata.greedy_rows, metadata)
        temperature = to_device(metadata.temperature, logits.device)
        logits = logits.div_(temperature[:, None])
        for processor in metadata.argmax_invariant_processors:
            logits = processor.apply(logits)
        rows = metadata.random_rows
        drawing = logits if metadata.all_random else logits[rows]
        tokens = draw(
            drawing,
            draw_keys(metadata.seeds[rows], metadata.positions[rows]),
            Truncation(
                top_k=metadata.top_k[rows],
                top_p=metadata.top_p[rows],
                min_p=metadata.min_p[rows],
                truncates=metadata.truncates[rows],
            ),
            mask_logits=mask_logits,
        )
        fallback = to_device(metadata.fallback_token_ids[rows], tokens.device)
        tokens = torch.where(tokens == NO_TOKEN, fallback, tokens)
        if metadata.all_random:
            return tokens, logits
        sampled[rows] = tokens
        if mask_logits:
            logits[rows] = drawing
        return sampled, logits


def _copy_of_rows(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    return logits.clone() if len(rows) == len(logits) else logits[rows]


def _greedy(logits: torch.Tensor, rows: np.ndarray, metadata: SamplingMetadata) -> torch.Tensor:
    """The first of the largest logits of each given row, int64 [len(rows)]."""
    fallback = metadata.fallback_token_ids[rows]
    if logits.device.type == "cpu":
        # NumPy's row-wise search is several times faster than torch.argmax on a CPU.
        values = logits.numpy()
        tokens = np.fromiter((values[row].argmax() for row in rows), np.int64, count=len(rows))
        forbidden = values[rows, tokens] == -np.inf
        return torch.from_numpy(np.where(forbidden, fallback, tokens))
    selected = logits if len(rows) == len(logits) else logits[rows]
    maximum, token_ids = selected.max(-1)
    return torch.where(maximum == -torch.inf, to_device(fallback, logits.device), token_ids)
