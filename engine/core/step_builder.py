"""One step while it is put together: its budget, its requests, and why admission stopped.

Knows requests and token counts; knows no queue, no block pool and no clock.
"""

from dataclasses import dataclass, field

from engine.core.request import Request
from engine.types.plan import CachedRequestData, NewRequestData, SchedulerOutput
from instrumentation import AdmissionStop, StepLabel


@dataclass(slots=True)
class StepBuilder:
    """Gathers the requests of one step under its token budget."""

    token_budget: int
    """What is left of it."""
    begin_ns: int
    block_size: int
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    """By request id, in the order in which they were scheduled."""
    scheduled: list[Request] = field(default_factory=list)
    """The same requests in the same order."""
    new: list[NewRequestData] = field(default_factory=list)
    cached: list[CachedRequestData] = field(default_factory=list)
    preempted_any: bool = False
    admission_stop: AdmissionStop = AdmissionStop.NONE
    admission_stop_request_num: int = -1
    admission_stop_num_tokens: int = 0
    structured: list[str] = field(default_factory=list)
    """Ids of requests with a grammar that the step samples for, once `advance` has run."""
    num_unfilled_slots: int = 0
    """In the last blocks of the scheduled requests, once `advance` has run."""

    def add_new(self, request: Request, num_tokens: int, block_ids: list[int]) -> None:
        """Schedule a request that the worker does not know."""
        self.new.append(
            NewRequestData(
                request.request_id,
                request.prompt_token_ids,
                request.output_token_ids,
                request.sampling_params,
                block_ids,
                request.num_computed_tokens,
            )
        )
        self._schedule(request, num_tokens)

    def add_cached(self, request: Request, num_tokens: int, new_block_ids: list[int]) -> None:
        """Schedule a request that the worker knows."""
        self.cached.append(
            CachedRequestData(request.request_id, new_block_ids, request.num_computed_tokens)
        )
        self._schedule(request, num_tokens)

    def advance(self) -> StepLabel:
        """Move every request's planned state past this step; returns what the step consists of."""
        num_requests, num_tokens = [0, 0], [0, 0]  # of the context phase, of the generation phase
        for request, num_scheduled in self.scheduled_tokens():
            is_generation = not request.in_context_phase()
            num_requests[is_generation] += 1
            num_tokens[is_generation] += num_scheduled
            request.num_computed_tokens += num_scheduled
            self.num_unfilled_slots += -request.num_computed_tokens % self.block_size
            if request.num_computed_tokens >= request.num_planned_tokens:
                request.num_output_placeholders += 1
                if request.grammar is not None:
                    self.structured.append(request.request_id)
        return StepLabel(num_requests[0], num_tokens[0], num_requests[1], num_tokens[1])

    def scheduled_tokens(self) -> "zip[tuple[Request, int]]":
        """Pairs of a request and its number of tokens."""
        return zip(self.scheduled, self.num_scheduled_tokens.values(), strict=True)

    def plan(self, step: int, label: StepLabel, *, forget: list[str]) -> SchedulerOutput:
        """The step as the worker gets it; `forget` are ids that it need not know any longer."""
        return SchedulerOutput(
            step=step,
            scheduled_new_reqs=self.new,
            scheduled_cached_reqs=self.cached,
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(self.num_scheduled_tokens.values()),
            finished_req_ids=forget,
            label=label,
            structured_output_request_ids=self.structured,
        )

    def _schedule(self, request: Request, num_tokens: int) -> None:
        assert request.request_id not in self.num_scheduled_tokens, "scheduled twice in one step"
        assert 0 < num_tokens <= self.token_budget, "a step over its budget"
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.scheduled.append(request)
        self.token_budget -= num_tokens
