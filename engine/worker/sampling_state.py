"""The sampling side of the persistent batch: one row for each request.

Knows each row's parameters and the live list of its output tokens, and condenses them once a step
into an immutable `SamplingMetadata`. Does not know the logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from engine.types.sampling import WHOLE_VOCABULARY, SamplingParams
from engine.worker.batch_update import RowState, batch_update_between
from engine.worker.builtin_processors import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from engine.worker.logits_processor import LogitsProcessor
from engine.worker.penalties import TokenCounts, needs_penalties
from engine.worker.processor_guard import ProcessorGuard
from engine.worker.random import wrap_seed
from engine.worker.token_masks import AllowedTokens, BadWords


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """All that the sampler needs for one step; row i belongs to row i of the logits.

    Arrays live on the host, float32 [num_reqs] unless said otherwise.
    """

    num_reqs: int
    all_greedy: bool
    """No row draws; an empty batch counts as greedy."""
    all_random: bool
    """Every row draws."""
    greedy_rows: npt.NDArray[np.int64]
    random_rows: npt.NDArray[np.int64]
    temperature: npt.NDArray[np.float32]
    """1 for greedy rows, so that dividing by it is harmless."""
    top_k: npt.NDArray[np.int64]
    """int64; the vocabulary's size where it is off."""
    top_p: npt.NDArray[np.float64]
    """float64; 1 where it is off."""
    min_p: npt.NDArray[np.float64]
    """float64; 0 where it is off."""
    truncates: npt.NDArray[np.bool_]
    """bool; whether top_k, top_p or min_p is on."""
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]
    """int64; number of output tokens so far."""
    logprobs_rows: npt.NDArray[np.int64]
    """Rows that asked for log-probabilities."""
    max_num_logprobs: int | None
    """Most that any row asked for (the vocabulary's size for -1); None if none did."""
    fallback_token_ids: npt.NDArray[np.int64]
    """int64; selected where every token is forbidden: the first allowed token, or 0."""
    allowed_tokens: AllowedTokens | None
    bad_words: Mapping[int, BadWords]
    penalties: Mapping[int, TokenCounts]
    """Rows that have penalties."""
    processors: tuple[LogitsProcessor, ...]
    """Run for all rows, before the penalties."""
    argmax_invariant_processors: tuple[LogitsProcessor, ...]
    """Run when any row draws, after the division by temperature."""


class _Row(RowState):
    __slots__ = ("bad_words", "counts")

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.integer],
        output_token_ids: list[int],
        keeps_prompt: bool,
    ) -> None:
        # A copy: the caller's array may be a view of a batch whose rows move.
        prompt = [int(token_id) for token_id in prompt_token_ids] if keeps_prompt else None
        super().__init__(params, prompt_token_ids=prompt, output_token_ids=output_token_ids)
        self.counts = (
            TokenCounts(
                params, prompt_token_ids=prompt_token_ids, output_token_ids=output_token_ids
            )
            if needs_penalties(params)
            else None
        )
        self.bad_words = (
            BadWords(params.bad_words_token_ids, output_token_ids=output_token_ids)
            if params.bad_words_token_ids
            else None
        )


class SamplingState:
    """Persistent sampling parameters of the batch.

    The owner keeps rows 0 to num_reqs - 1 occupied when it calls `refresh`; between two refreshes
    it may add, remove and move in any order.

    Args:
        max_num_reqs: number of rows.
        vocab_size: width of the logits.
        device: where the logits live.
        logits_processors: the user's processors, run after the built-in ones.
    """

    def __init__(
        self,
        *,
        max_num_reqs: int,
        vocab_size: int,
        device: torch.device | str,
        logits_processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._keeps_prompt = bool(logits_processors)
        processors: tuple[LogitsProcessor, ...] = (
            MinTokensLogitsProcessor(None, self.device, False),
            LogitBiasLogitsProcessor(None, self.device, False),
            *map(ProcessorGuard, logits_processors),
        )
        self._all_processors = processors
        self._processors = tuple(p for p in processors if not p.is_argmax_invariant())
        self._argmax_invariant = tuple(p for p in processors if p.is_argmax_invariant())
        self._rows: list[_Row | None] = [None] * max_num_reqs
        self._rows_at_refresh: list[RowState] = []
        self._changed = True
        self._metadata: SamplingMetadata | None = None
        # One array for each parameter, so that a step slices instead of looping over requests.
        self._temperature = np.ones(max_num_reqs, dtype=np.float32)
        self._greedy = np.zeros(max_num_reqs, dtype=np.bool_)
        self._top_k = np.full(max_num_reqs, vocab_size, dtype=np.int64)
        self._top_p = np.ones(max_num_reqs, dtype=np.float64)
        self._min_p = np.zeros(max_num_reqs, dtype=np.float64)
        self._seeds = np.zeros(max_num_reqs, dtype=np.uint64)
        self._num_logprobs = np.full(max_num_reqs, -1, dtype=np.int64)
        self._arrays = (
            self._temperature,
            self._greedy,
            self._top_k,
            self._top_p,
            self._min_p,
            self._seeds,
            self._num_logprobs,
        )

    def add_request(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.integer],
        output_token_ids: list[int],
    ) -> None:
        """Put a request at an empty row.

        Args:
            row: where.
            params: its parameters, with a seed unless greedy.
            prompt_token_ids: the whole prompt; copied where it is needed.
            output_token_ids: the runner's own list, to which it appends; kept, not copied.
        """
        assert self._rows[row] is None, f"row {row} is occupied"
        assert params.is_greedy or params.seed is not None, "the frontend gives a seed"
        self._rows[row] = _Row(
            params,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=output_token_ids,
            keeps_prompt=self._keeps_prompt,
        )
        vocab_size = self.vocab_size
        self._greedy[row] = params.is_greedy
        self._temperature[row] = 1.0 if params.is_greedy else params.temperature
        self._top_k[row] = min(params.top_k or vocab_size, vocab_size)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seeds[row] = wrap_seed(params.seed or 0)
        wanted = params.logprobs
        if wanted is None:
            self._num_logprobs[row] = -1
        else:
            self._num_logprobs[row] = vocab_size if wanted == WHOLE_VOCABULARY else wanted
        self._changed = True

    def remove_request(self, row: int) -> None:
        """Empty an occupied row."""
        assert self._rows[row] is not None, f"row {row} is empty"
        self._rows[row] = None
        self._changed = True

    def move_request(self, src: int, dst: int) -> None:
        """Move the request at `src` to the empty row `dst`; `src` becomes empty."""
        if src == dst:
            return
        assert self._rows[src] is not None, f"row {src} is empty"
        assert self._rows[dst] is None, f"row {dst} is occupied"
        self._rows[dst], self._rows[src] = self._rows[src], None
        for array in self._arrays:
            array[dst] = array[src]
        self._changed = True

    def refresh(self, num_reqs: int) -> SamplingMetadata:
        """Tell the processors about a new step and return what the sampler needs.

        Args:
            num_reqs: requests in the batch; rows 0 to num_reqs - 1 are occupied, no others.
        """
        metadata = self._metadata
        update = None
        if self._changed or metadata is None:
            rows = self._occupied_rows(num_reqs)
            update = batch_update_between(self._rows_at_refresh, list(rows))
            self._rows_at_refresh = list(rows)
            metadata = self._build(rows)
            self._changed = False
        assert metadata.num_reqs == num_reqs, "num_reqs changed without a change of rows"
        for processor in self._all_processors:
            processor.update_state(update)
        for counts in metadata.penalties.values():
            counts.catch_up()
        positions = np.fromiter(
            (len(row.output_token_ids) for row in self._rows_at_refresh),
            dtype=np.int64,
            count=num_reqs,
        )
        self._metadata = replace(metadata, positions=positions)
        return self._metadata

    def take_failures(self) -> dict[int, str]:
        """Rows whose requests a processor has failed in this step, each with the reason."""
        failures: dict[int, str] = {}
        for processor in self._all_processors:
            failures = processor.take_failures() | failures  # the first reason counts
        return failures

    def _occupied_rows(self, num_reqs: int) -> list[_Row]:
        rows = [row for row in self._rows[:num_reqs] if row is not None]
        assert len(rows) == num_reqs, "the batch has holes"
        assert not any(self._rows[num_reqs:]), "requests behind the end of the batch"
        return rows

    def _build(self, rows: list[_Row]) -> SamplingMetadata:
        num_reqs = len(rows)
        greedy = self._greedy[:num_reqs]
        # Copies: an earlier step's metadata may still be in use while rows change.
        top_k = self._top_k[:num_reqs].copy()
        top_p = self._top_p[:num_reqs].copy()
        min_p = self._min_p[:num_reqs].copy()
        num_logprobs = self._num_logprobs[:num_reqs]
        logprobs_rows = np.flatnonzero(num_logprobs >= 0)
        allowed = {
            index: row.params.allowed_token_ids
            for index, row in enumerate(rows)
            if row.params.allowed_token_ids
        }
        return SamplingMetadata(
            num_reqs=num_reqs,
            all_greedy=bool(greedy.all()),
            all_random=not greedy.any(),
            greedy_rows=np.flatnonzero(greedy),
            random_rows=np.flatnonzero(~greedy),
            temperature=self._temperature[:num_reqs].copy(),
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            truncates=(top_k < self.vocab_size) | (top_p < 1.0) | (min_p > 0.0),
            seeds=self._seeds[:num_reqs].copy(),
            positions=np.zeros(num_reqs, dtype=np.int64),
            logprobs_rows=logprobs_rows,
            max_num_logprobs=int(num_logprobs.max()) if len(logprobs_rows) else None,
            fallback_token_ids=np.array(
                [min(allowed.get(index, (0,))) for index in range(num_reqs)], dtype=np.int64
            ),
            allowed_tokens=AllowedTokens(allowed, self.device) if allowed else None,
            bad_words={
                index: row.bad_words for index, row in enumerate(rows) if row.bad_words is not None
            },
            penalties={
                index: row.counts for index, row in enumerate(rows) if row.counts is not None
            },
            processors=self._processors,
            argmax_invariant_processors=self._argmax_invariant,
        )
