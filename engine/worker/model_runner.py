"""Runs one step on one device: update the batch, forward, sample, read back.

`execute_model` launches the forward pass and keeps the logits; `sample_tokens` turns them into
tokens. They are two calls so that the next step can be prepared while the device works. Knows
rows and tensors; no queue, no budget, no text.
"""

import time
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.base import AttentionBackend, BatchLayout
from engine.attention.forward_context import forward_context
from engine.models.base import CausalLM
from engine.types.logprobs import LogprobsLists
from engine.types.plan import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from engine.worker.grammar_mask import GrammarMask
from engine.worker.input_batch import CachedRequestState, InputBatch, StepInputs
from engine.worker.prompt_logprobs import PromptLogprobsBuilder
from engine.worker.sampler import Sampler
from engine.worker.token_logprobs import slice_logprobs
from engine.worker.transfer import to_device
from instrumentation import GraphMode, Instrument, WorkerStepRecord


class _Launched(NamedTuple):
    """What `execute_model` leaves for `sample_tokens`."""

    plan: SchedulerOutput
    inputs: StepInputs
    logits: torch.Tensor  # float32 [num_reqs, vocab]
    prompt_logprobs: dict[str, LogprobsLists]
    begin_ns: int


class ModelRunner:
    """One model on one device, with its KV cache and its batch."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        sampler: Sampler,
        batch: InputBatch,
        *,
        device: torch.device,
        obs: Instrument,
    ) -> None:
        self.model = model
        self.attention = attention
        self.sampler = sampler
        self.batch = batch
        self.device = device
        self.obs = obs
        self.kv_caches: list[torch.Tensor] = []
        self.requests: dict[str, CachedRequestState] = {}
        self._prompt_logprobs = PromptLogprobsBuilder(model)
        self._launched: _Launched | None = None

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Run the forward pass of a step and keep one row of logits per request."""
        assert self._launched is None, "execute_model() twice without sample_tokens()"
        obs, begin_ns = self.obs, time.monotonic_ns()
        obs.step_begin(plan.label)
        with obs.prepare:
            self._update_states(plan)
            inputs = self.batch.build_inputs(plan.num_scheduled_tokens)
            metadata = self.attention.build_metadata(inputs.layout, self.device)
            token_ids = self._to_device(inputs.token_ids)
            positions = self._to_device(inputs.positions)
            last_rows = self._to_device(inputs.layout.query_start_loc[1:].astype(np.int64) - 1)
        with obs.forward, forward_context(metadata, self.kv_caches):
            hidden = self.model(token_ids, positions)  # [num_tokens, hidden]
        with obs.logits:
            logits = self.model.compute_logits(hidden[last_rows])
            prompt_logprobs = self._prompt_logprobs.collect(
                hidden, inputs, self.batch.req_ids, self.requests
            )
        self._launched = _Launched(plan, inputs, logits, prompt_logprobs, begin_ns)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Sample from the logits that `execute_model` left, and bring the tokens to the host."""
        launched, self._launched = self._launched, None
        assert launched is not None, "sample_tokens() without execute_model()"
        obs, batch = self.obs, self.batch
        with obs.sample:
            metadata = batch.sampling.refresh(batch.num_reqs)
            mask = None if grammar_output is None else GrammarMask(grammar_output, batch.row_of)
            sampled = self.sampler(launched.logits, metadata, mask)
            failures = batch.sampling.take_failures()
        with obs.readback:
            token_ids = self._record_tokens(sampled.sampled_token_ids, launched.inputs)
            logprobs = self._split_logprobs(sampled.logprobs, launched.inputs)
        label = launched.plan.label
        record = WorkerStepRecord(
            step=launched.plan.step,
            begin_ns=launched.begin_ns,
            end_ns=time.monotonic_ns(),
            num_context_requests=label.num_context_requests,
            num_context_tokens=label.num_context_tokens,
            num_generation_requests=label.num_generation_requests,
            num_generation_tokens=label.num_generation_tokens,
            graph_mode=GraphMode.NONE,
        )
        obs.worker_step(record)
        return ModelRunnerOutput(
            list(batch.req_ids),
            token_ids,
            logprobs,
            launched.prompt_logprobs,
            record,
            {batch.req_ids[row]: reason for row, reason in failures.items()},
        )

    @torch.inference_mode()
    def dummy_run(self, layout: BatchLayout) -> None:
        """Forward pass and greedy sampling over a made-up batch (profiling, warm-up)."""
        num_tokens = len(layout.slot_mapping)
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        lengths = np.diff(layout.query_start_loc)
        ends = np.repeat(layout.seq_lens, lengths)
        within = np.arange(num_tokens) - np.repeat(layout.query_start_loc[:-1], lengths)
        positions = self._to_device((ends - np.repeat(lengths, lengths) + within).astype(np.int64))
        metadata = self.attention.build_metadata(layout, self.device)
        with forward_context(metadata, self.kv_caches):
            hidden = self.model(token_ids, positions)
        last_rows = self._to_device(layout.query_start_loc[1:].astype(np.int64) - 1)
        self.model.compute_logits(hidden[last_rows]).argmax(dim=-1)

    def _update_states(self, plan: SchedulerOutput) -> None:
        """Make the batch's rows exactly the plan's requests."""
        batch, scheduled = self.batch, plan.num_scheduled_tokens
        for req_id in plan.finished_req_ids:
            if self.requests.pop(req_id, None) is not None and req_id in batch.row_of:
                batch.remove(req_id)
        for req_id in [r for r in batch.req_ids if r not in scheduled]:
            batch.remove(req_id)
        for data in plan.scheduled_cached_reqs:
            state = self.requests[data.req_id]
            state.block_ids += data.new_block_ids
            state.num_computed_tokens = data.num_computed_tokens
            if data.req_id in batch.row_of:
                batch.advance(data)
            else:
                batch.add(state)
        for new in plan.scheduled_new_reqs:
            state = CachedRequestState.from_new(new)
            self.requests[new.req_id] = state
            batch.add(state)

    def _record_tokens(self, sampled: torch.Tensor, inputs: StepInputs) -> list[list[int]]:
        """Append each sampled token to its request; rows with prompt left to compute have none."""
        tokens: list[list[int]] = []
        for row, token_id in enumerate(sampled.tolist()):
            if not inputs.samples[row]:
                tokens.append([])
                continue
            self.batch.append_token(row, token_id)
            self.requests[self.batch.req_ids[row]].output_token_ids.append(token_id)
            tokens.append([token_id])
        return tokens

    def _split_logprobs(
        self, logprobs: LogprobsLists | None, inputs: StepInputs
    ) -> list[LogprobsLists | None] | None:
        """Each row's own number of logprobs, None where the request wants none."""
        if logprobs is None:
            return None
        rows: list[LogprobsLists | None] = []
        for row, req_id in enumerate(self.batch.req_ids):
            wanted = self.requests[req_id].sampling_params.logprobs
            if wanted is None or not inputs.samples[row]:
                rows.append(None)
            else:
                rows.append(slice_logprobs(logprobs, row, wanted))
        return rows

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device)
