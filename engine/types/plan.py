"""The contract between scheduler and worker: what to run, and what came back.

New requests travel in full, known ones as deltas. A preempted request is forgotten by the
worker and comes back, when it is resumed, as a new one that brings its output tokens along.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.types.logprobs import LogprobsLists
from engine.types.sampling import SamplingParams
from instrumentation import StepLabel, WorkerStepRecord


@dataclass(slots=True)
class NewRequestData:
    """A request that the worker does not know (new, or resumed after preemption)."""

    req_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """Empty, unless the request was preempted after its first token."""
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class CachedRequestData:
    """Changes of one request that the worker knows."""

    req_id: str
    new_block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    """One step: for every request in it the number of tokens to compute."""

    step: int
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: list[str]
    """Requests that the worker may forget: finished, aborted or preempted."""
    label: StepLabel
    structured_output_request_ids: list[str] = field(default_factory=list)
    """Requests with a grammar that this step samples for."""


@dataclass(slots=True)
class GrammarOutput:
    """Which tokens grammars allow in one step; made while the step's forward pass runs."""

    req_ids: list[str]
    bitmask: npt.NDArray[np.int32]  # [len(req_ids), ceil(vocab_size / 32)]
    """Bit i % 32 of word i // 32 is set where token i is allowed."""


@dataclass(slots=True)
class ModelRunnerOutput:
    """Result of one step, rows in the order of `req_ids`."""

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    """Per request the new tokens; empty while its prompt is not complete."""
    logprobs: list[LogprobsLists | None] | None = None
    prompt_logprobs: dict[str, LogprobsLists] = field(default_factory=dict)
    record: WorkerStepRecord | None = None
    failures: dict[str, str] = field(default_factory=dict)
    """Requests that cannot go on, each with the reason; their tokens of this step are void."""
