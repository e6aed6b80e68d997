"""The core's view of one request: its tokens, and how many of them are computed.

Few facts are stored, the rest is derived. A request knows no block and no queue.
"""

import enum

from engine.core.block_hash import BlockHasher
from engine.structured.matching import Grammar
from engine.types.messages import CoreTimes, EngineCoreRequest, FinishReason


class RequestStatus(enum.IntEnum):
    """Where a request stands; everything from FINISHED on has left the scheduler."""

    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED = 4


class Request:
    """One sequence being served.

    `num_computed_tokens` is *planned* state: it advances when a step is scheduled, before the
    worker has run it. `num_output_placeholders` counts output tokens that are being sampled in
    steps still in flight, so that the next step can be scheduled without knowing them.
    `num_lost_tokens` is what was computed when the request was last preempted. `grammar` is where
    the output stands in the form that it must have; it knows all known tokens, and none in flight.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_ns",
        "block_hasher",
        "block_hashes",
        "cache_salt",
        "client_index",
        "finish_reason",
        "grammar",
        "num",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "sampling_params",
        "status",
        "stop_reason",
        "times",
        "traceparent",
    )

    def __init__(self, message: EngineCoreRequest, block_hasher: BlockHasher | None) -> None:
        self.request_id = message.request_id
        self.num = message.request_num
        self.client_index = message.client_index
        self.sampling_params = message.sampling_params
        self.priority = message.priority
        self.arrival_ns = message.arrival_ns
        self.cache_salt = message.cache_salt
        self.traceparent = message.traceparent
        self.all_token_ids = list(message.prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.times = CoreTimes()
        self.grammar: Grammar | None = None
        self.block_hasher = block_hasher
        self.block_hashes: list[bytes] = []
        if block_hasher is not None:
            block_hasher.extend(self.block_hashes, self.all_token_ids, self.cache_salt)

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def num_planned_tokens(self) -> int:
        """Known tokens and those being sampled by steps in flight."""
        return len(self.all_token_ids) + self.num_output_placeholders

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that no step up to now computes."""
        return len(self.all_token_ids) - self.num_computed_tokens

    @property
    def since_ns(self) -> int:
        """Since when the request has been waiting without a break, or running without one."""
        times = self.times
        if times.preemptions:
            preempted_ns, resumed_ns = times.preemptions[-1]
            return resumed_ns or preempted_ns
        return times.first_scheduled_ns or times.queued_ns

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt."""
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output so far."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether the request has left the scheduler."""
        return self.status >= RequestStatus.FINISHED

    def in_context_phase(self) -> bool:
        """Whether no step up to now, in flight or done, samples this request's first token."""
        return self.num_planned_tokens == self.num_prompt_tokens

    def append_output(self, token_ids: list[int]) -> None:
        """Add sampled tokens and hash the blocks that they complete."""
        self.all_token_ids.extend(token_ids)
        self.num_output_placeholders = max(0, self.num_output_placeholders - len(token_ids))
        if self.block_hasher is not None:
            self.block_hasher.extend(self.block_hashes, self.all_token_ids, self.cache_salt)
