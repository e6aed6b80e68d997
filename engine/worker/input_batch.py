"""The persistent batch: one dense row per request of the step, kept from step to step.

Rows 0..num_reqs-1 are exactly the requests that this step computes. When a row leaves, the last
row moves into its place, so that arrays stay dense without copying. Token ids and block tables
are NumPy arrays on the host, since building the flat inputs is index arithmetic over them.

Knows rows, tokens, blocks; no model and no tensor of the device.
"""

from dataclasses import dataclass, field

import numpy as np

from engine.attention.base import BatchLayout
from engine.types.logprobs import LogprobsLists
from engine.types.plan import CachedRequestData, NewRequestData
from engine.types.sampling import SamplingParams
from engine.worker.sampling_state import SamplingState


@dataclass(slots=True)
class CachedRequestState:
    """All that the worker knows of a request, in a row of the batch or not."""

    req_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """Live: grows with each sampled token; logits processors hold this very list."""
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int
    prompt_logprobs: list[LogprobsLists] = field(default_factory=list)
    """Parts of the prompt's logprobs, one per chunk, until the prompt is complete."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @classmethod
    def from_new(cls, data: NewRequestData) -> "CachedRequestState":
        """State of a request that has just been admitted or resumed."""
        return cls(
            data.req_id,
            data.prompt_token_ids,
            data.output_token_ids,
            data.sampling_params,
            data.block_ids,
            data.num_computed_tokens,
        )


@dataclass(slots=True)
class StepInputs:
    """The flat batch of one step: tokens of all rows end to end."""

    token_ids: np.ndarray  # int64 [num_tokens]
    positions: np.ndarray  # int64 [num_tokens]
    layout: BatchLayout
    num_scheduled: np.ndarray  # int64 [num_reqs]
    samples: np.ndarray  # bool [num_reqs]: the row's known tokens are complete after this step


class InputBatch:
    """Row-wise arrays of the running batch, and the sampling state beside them."""

    def __init__(
        self, *, max_num_reqs: int, max_model_len: int, block_size: int, sampling: SamplingState
    ) -> None:
        self.block_size = block_size
        self.sampling = sampling
        self.req_ids: list[str] = []
        self.row_of: dict[str, int] = {}
        # Pages of these arrays are committed by the OS only when they are written.
        self._token_ids = np.zeros((max_num_reqs, max_model_len + 1), dtype=np.int32)
        max_num_blocks = -(-max_model_len // block_size)
        self._block_table = np.zeros((max_num_reqs, max_num_blocks), dtype=np.int32)
        self._num_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_reqs, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_reqs, dtype=np.int64)

    @property
    def num_reqs(self) -> int:
        """Rows in use."""
        return len(self.req_ids)

    def add(self, state: CachedRequestState) -> None:
        """Give the request a row."""
        row = len(self.req_ids)
        self.req_ids.append(state.req_id)
        self.row_of[state.req_id] = row
        num_prompt, num_tokens = state.num_prompt_tokens, state.num_tokens
        self._token_ids[row, :num_prompt] = state.prompt_token_ids
        self._token_ids[row, num_prompt:num_tokens] = state.output_token_ids
        self._num_tokens[row] = num_tokens
        self._num_computed[row] = state.num_computed_tokens
        self._num_blocks[row] = 0
        self._append_blocks(row, state.block_ids)
        self.sampling.add_request(
            row, state.sampling_params, state.prompt_token_ids, state.output_token_ids
        )

    def remove(self, req_id: str) -> None:
        """Free the request's row and move the last row into it."""
        row = self.row_of.pop(req_id)
        last = len(self.req_ids) - 1
        self.sampling.remove_request(row)
        last_id = self.req_ids.pop()
        if row == last:
            return
        self.req_ids[row] = last_id
        self.row_of[last_id] = row
        num_tokens, num_blocks = self._num_tokens[last], self._num_blocks[last]
        self._token_ids[row, :num_tokens] = self._token_ids[last, :num_tokens]
        self._block_table[row, :num_blocks] = self._block_table[last, :num_blocks]
        for array in (self._num_tokens, self._num_computed, self._num_blocks):
            array[row] = array[last]
        self.sampling.move_request(last, row)

    def advance(self, data: CachedRequestData) -> None:
        """Take over what the scheduler changed for a request that has a row."""
        row = self.row_of[data.req_id]
        self._num_computed[row] = data.num_computed_tokens
        self._append_blocks(row, data.new_block_ids)

    def append_token(self, row: int, token_id: int) -> None:
        """Write down the token that was sampled for a row."""
        self._token_ids[row, self._num_tokens[row]] = token_id
        self._num_tokens[row] += 1

    def build_inputs(self, num_scheduled_tokens: dict[str, int]) -> StepInputs:
        """Lay all rows' next tokens end to end, with the index arrays that attention needs."""
        num_reqs = self.num_reqs
        num_scheduled = np.fromiter(
            (num_scheduled_tokens[req_id] for req_id in self.req_ids), np.int64, num_reqs
        )
        computed = self._num_computed[:num_reqs]
        query_start_loc = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(num_scheduled, out=query_start_loc[1:])
        rows = np.repeat(np.arange(num_reqs), num_scheduled)  # [num_tokens]
        within = np.arange(query_start_loc[-1]) - query_start_loc[rows]
        positions = computed[rows] + within
        seq_lens = computed + num_scheduled
        blocks = self._block_table[rows, positions // self.block_size].astype(np.int64)
        max_num_blocks = -(-int(seq_lens.max()) // self.block_size)
        layout = BatchLayout(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens.astype(np.int32),
            block_table=self._block_table[:num_reqs, :max_num_blocks],
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            block_size=self.block_size,
        )
        return StepInputs(
            token_ids=self._token_ids[rows, positions].astype(np.int64),
            positions=positions,
            layout=layout,
            num_scheduled=num_scheduled,
            samples=seq_lens >= self._num_tokens[:num_reqs],
        )

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        begin = self._num_blocks[row]
        self._block_table[row, begin : begin + len(block_ids)] = block_ids
        self._num_blocks[row] = begin + len(block_ids)
