"""Logprobs of prompt tokens, collected chunk by chunk while the prompt is computed."""

import numpy as np
import torch

from engine.models.base import CausalLM
from engine.types.logprobs import LogprobsLists
from engine.worker.input_batch import CachedRequestState, StepInputs
from engine.worker.token_logprobs import compute_prompt_logprobs

_ROWS_AT_ONCE = 256
"""Positions projected to the vocabulary at once: bounds the memory that long prompts need."""


class PromptLogprobsBuilder:
    """Turns hidden states of prompt positions into logprobs of the tokens that follow them."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    def collect(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden]
        inputs: StepInputs,
        req_ids: list[str],
        requests: dict[str, CachedRequestState],
    ) -> dict[str, LogprobsLists]:
        """Add this step's share to each request; returns those whose prompt is now complete."""
        complete: dict[str, LogprobsLists] = {}
        for row, req_id in enumerate(req_ids):
            state = requests[req_id]
            wanted = state.sampling_params.prompt_logprobs
            # Output tokens mean that the request was preempted after its prompt was reported.
            if wanted is None or state.output_token_ids:
                continue
            start = state.num_computed_tokens
            end = start + int(inputs.num_scheduled[row])
            offset = int(inputs.layout.query_start_loc[row]) - start
            last = min(end, state.num_prompt_tokens - 1)
            for begin in range(start, last, _ROWS_AT_ONCE):
                stop = min(begin + _ROWS_AT_ONCE, last)
                logits = self.model.compute_logits(hidden[offset + begin : offset + stop])
                targets = torch.tensor(
                    state.prompt_token_ids[begin + 1 : stop + 1], device=logits.device
                )
                state.prompt_logprobs.append(compute_prompt_logprobs(logits, targets, wanted))
            if end >= state.num_prompt_tokens:
                complete[req_id] = _concatenate(state.prompt_logprobs)
                state.prompt_logprobs = []
        return complete


def _concatenate(parts: list[LogprobsLists]) -> LogprobsLists:
    if not parts:  # a prompt of one token: nothing precedes it
        empty = np.empty((0, 1), dtype=np.int32)
        return LogprobsLists(empty, empty.astype(np.float32), np.empty(0, dtype=np.int32))
    return LogprobsLists.concatenate(parts)
