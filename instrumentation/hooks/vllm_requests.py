"""vLLM's requests: their numbers, and the time line of each.

Knows vLLM's requests and outputs. Does not know steps as a whole, nor blocks. An engine core of
vLLM hears from its frontend when a request arrived, but not when its last token was delivered.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from instrumentation.labels import StepLabel
from instrumentation.record.instrument import Instrument
from instrumentation.record.request_records import RequestTimeline


class Admitted(NamedTuple):
    """What the prefix cache had for the requests that a step took in, in tokens."""

    query_tokens: int
    hit_tokens: int
    preempted_query_tokens: int
    preempted_hit_tokens: int


@dataclass(slots=True)
class Outcome:
    """What a step's output did to the requests."""

    first_tokens: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    ended: list[RequestTimeline] = field(default_factory=list)
    num_tokens: int = 0


class RequestBook:
    """Keeps a time line for each request that lives."""

    def __init__(self, obs: Instrument) -> None:
        self._obs = obs
        self._timelines: dict[str, RequestTimeline] = {}
        self._num_requests = 0

    def add(self, request: Any) -> None:
        """A request reaches the waiting queue; a further input of a session is the same request."""
        request_id = request.request_id
        if request_id in self._timelines:
            return
        now_ns = time.monotonic_ns()
        age_ns = time.time_ns() - round(request.arrival_time * 1e9)
        trace_headers = request.trace_headers or {}
        timeline = RequestTimeline(
            request_id=request_id,
            request_num=self._num_requests,
            # Wall-clock time of the frontend; a clock that was set in between must not reverse it.
            arrival_ns=now_ns - max(0, age_ns),
            queued_ns=now_ns,
            num_prompt_tokens=request.num_prompt_tokens,
            preemptions=[],
            traceparent=trace_headers.get("traceparent"),
        )
        self._num_requests += 1
        self._timelines[request_id] = timeline
        self._obs.request_arrived(
            timeline.request_num,
            request_id,
            arrival_ns=timeline.arrival_ns,
            num_prompt_tokens=timeline.num_prompt_tokens,
            traceparent=timeline.traceparent,
        )

    def num_of(self, request: Any) -> int:
        """A request's number, -1 where it is not known."""
        timeline = self._timelines.get(request.request_id) if request is not None else None
        return timeline.request_num if timeline is not None else -1

    def waiting_since_ns(self, head: Any) -> int:
        """Since when the request at the queue's head waits, 0 with an empty queue."""
        timeline = self._timelines.get(head.request_id) if head is not None else None
        if timeline is None:
            return 0
        return timeline.preemptions[-1][0] if timeline.preemptions else timeline.queued_ns

    def running_since_ns(self, running: list[Any]) -> int:
        """When the request was admitted that leads the running list, 0 with none."""
        timeline = self._timelines.get(running[0].request_id) if running else None
        return timeline.first_scheduled_ns if timeline is not None else 0

    def plan(
        self, requests: Mapping[str, Any], num_scheduled: Mapping[str, int], *, begin_ns: int
    ) -> tuple[StepLabel, tuple[int, ...]]:
        """A step's label, and its flat (request_num, num_tokens) pairs.

        vLLM has already counted the step's tokens as computed. A request whose first output token
        is still on its way, under async scheduling, is past it as far as planning goes.
        """
        counts = [0, 0, 0, 0]
        scheduled: list[int] = []
        for request_id, num_tokens in num_scheduled.items():
            request = requests[request_id]
            num_before = request.num_computed_tokens - num_tokens
            is_context = not request.num_output_tokens and num_before < request.num_prompt_tokens
            kind = 0 if is_context else 2
            counts[kind] += 1
            counts[kind + 1] += num_tokens
            timeline = self._timelines.get(request_id)
            if timeline is not None:
                timeline.first_scheduled_ns = timeline.first_scheduled_ns or begin_ns
                if timeline.preemptions and not timeline.preemptions[-1][1]:
                    timeline.preemptions[-1] = (timeline.preemptions[-1][0], begin_ns)
                scheduled += (timeline.request_num, num_tokens)
        return StepLabel(*counts), tuple(scheduled)

    def admit(self, requests: Mapping[str, Any], output: Any) -> Admitted:
        """Take down what the cache had for the requests that a plan admits."""
        hits = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for request_id, num_tokens in zip(
                cached.req_ids, cached.num_computed_tokens, strict=True
            ):
                if request_id in cached.resumed_req_ids:
                    hits[request_id] = num_tokens
        totals = [0, 0, 0, 0]
        for request_id, num_hit_tokens in hits.items():
            request = requests[request_id]
            kind = 2 if request.num_preemptions else 0
            totals[kind] += request.num_tokens
            totals[kind + 1] += num_hit_tokens
            timeline = self._timelines.get(request_id)
            if timeline is not None and not request.num_preemptions:
                timeline.num_cached_tokens = num_hit_tokens
        return Admitted(*totals)

    def preempt(self, request_id: str) -> int:
        """A request loses its blocks; its number."""
        timeline = self._timelines.get(request_id)
        if timeline is None:
            return -1
        timeline.preemptions.append((time.monotonic_ns(), 0))
        return timeline.request_num

    def apply(self, outputs: Mapping[int, Any] | None, *, end_ns: int) -> Outcome:
        """Take the tokens of a step's outputs down; those that end leave the book."""
        outcome = Outcome()
        for of_client in (outputs or {}).values():
            for output in of_client.outputs:
                timeline = self._timelines.get(output.request_id)
                if timeline is not None:
                    self._apply_one(timeline, output, outcome, end_ns=end_ns)
        return outcome

    def _apply_one(
        self, timeline: RequestTimeline, output: Any, outcome: Outcome, *, end_ns: int
    ) -> None:
        num_tokens = len(output.new_token_ids)
        if num_tokens:
            if not timeline.first_token_ns:
                timeline.first_token_ns = end_ns
                outcome.first_tokens.append(timeline.request_num)
            timeline.last_token_ns = end_ns
            timeline.num_generation_tokens += num_tokens
            outcome.num_tokens += num_tokens
        if output.finish_reason is not None:
            timeline.finish_reason = str(output.finish_reason)
            timeline.stop_reason = output.stop_reason
            timeline.delivered_ns = end_ns
            outcome.finished.append(timeline.request_num)
            outcome.ended.append(timeline)
            del self._timelines[timeline.request_id]

    def give_up(self, request_id: str, reason: str) -> RequestTimeline | None:
        """A request ends from outside of a step; None where it has ended already."""
        timeline = self._timelines.pop(request_id, None)
        if timeline is not None:
            timeline.finish_reason = reason
            timeline.delivered_ns = time.monotonic_ns()
        return timeline
