"""What a request leaves behind: its arrival, and its whole life, with every interval defined once.

Knows the stamps and what lies between them. Does not know how records travel or who reads them. All
times are integer nanoseconds of CLOCK_MONOTONIC; a stamp of 0 means that it never happened. Fields
are only ever added at the end, with a default, so that older journals stay readable.
"""

import msgspec

UNFINISHED_REASONS = frozenset({"abort", "error"})
"""Finish reasons of requests that were given up before their end."""


class RequestArrived(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The core took a request in; names it for readers of a run that was killed."""

    request_num: int
    request_id: str
    arrival_ns: int
    num_prompt_tokens: int
    traceparent: str | None = None


class RequestTimeline(msgspec.Struct, array_like=True, tag=4, gc=False, kw_only=True):
    """The life of one request; the frontend writes it when the request ends.

    The derived properties are the only definition of each interval. They partition the request's
    life: `queue_ns + prefill_ns + decode_ns + preempted_ns == e2e_ns`, whatever became of it.
    """

    request_id: str
    request_num: int = -1
    parent_id: str | None = None
    """Id of the request that this one is a sample of (n > 1), and which sample."""
    index: int = 0
    arrival_ns: int = 0
    """The frontend was handed the request."""
    queued_ns: int = 0
    """The core put it into the waiting queue."""
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    """Token stamps are the core's time, taken once a step, when it applies the step's output."""
    delivered_ns: int = 0
    """The frontend handed the last output over, or gave the request up."""
    preemptions: list[tuple[int, int]] = []
    """(preempted_ns, resumed_ns) in time order; resumed_ns is 0 while it lasts."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    traceparent: str | None = None
    grammar_ready_ns: int = 0
    """Its structured output's grammar was compiled or given up; 0 where it did not wait for one.
    The end where the core has told nothing of the request yet and it may be waiting for one."""

    @property
    def is_complete(self) -> bool:
        """Whether the request ran to its end, rather than being given up on the way."""
        return self.last_token_ns > 0 and self.finish_reason not in UNFINISHED_REASONS

    @property
    def end_ns(self) -> int:
        """The last token's time; of a request that was given up, the time of that."""
        if self.is_complete:
            return self.last_token_ns
        return self.delivered_ns or self.last_token_ns or self.arrival_ns

    @property
    def _scheduled_ns(self) -> int:
        return self.first_scheduled_ns or self.end_ns

    @property
    def _prefilled_ns(self) -> int:
        return self.first_token_ns or self.end_ns

    def preempted_between_ns(self, begin_ns: int, end_ns: int) -> int:
        """Time thrown out of the running list within an interval."""
        return sum(
            max(0, min(resumed_ns or self.end_ns, end_ns) - max(preempted_ns, begin_ns))
            for preempted_ns, resumed_ns in self.preemptions
        )

    @property
    def e2e_ns(self) -> int:
        """Arrival to last token (or giving up). Delivery comes after it: see `delivery_ns`."""
        return self.end_ns - self.arrival_ns

    @property
    def intake_ns(self) -> int:
        """Arrival to the waiting queue: checking, tokenising, transport. Part of `queue_ns`."""
        return (self.queued_ns or self._scheduled_ns) - self.arrival_ns

    @property
    def queue_ns(self) -> int:
        """Arrival to first scheduled."""
        return self._scheduled_ns - self.arrival_ns

    @property
    def prefill_ns(self) -> int:
        """First scheduled to first token, without preemptions in between."""
        begin_ns, end_ns = self._scheduled_ns, self._prefilled_ns
        return end_ns - begin_ns - self.preempted_between_ns(begin_ns, end_ns)

    @property
    def decode_ns(self) -> int:
        """First token to the end, without preemptions in between."""
        begin_ns, end_ns = self._prefilled_ns, self.end_ns
        return end_ns - begin_ns - self.preempted_between_ns(begin_ns, end_ns)

    @property
    def preempted_ns(self) -> int:
        """Time thrown out of the running list, until scheduled again or ended."""
        return self.preempted_between_ns(self._scheduled_ns, self.end_ns)

    @property
    def ttft_ns(self) -> int | None:
        """Arrival to first token, None where there is none."""
        return self.first_token_ns - self.arrival_ns if self.first_token_ns else None

    @property
    def mean_inter_token_ns(self) -> float | None:
        """First to last token over the gaps between tokens, None with fewer than two tokens."""
        if self.num_generation_tokens < 2 or not self.first_token_ns:
            return None
        return (self.last_token_ns - self.first_token_ns) / (self.num_generation_tokens - 1)

    @property
    def delivery_ns(self) -> int:
        """Last token to its delivery: transport, detokenising. Not part of `e2e_ns`."""
        return max(0, self.delivered_ns - self.end_ns) if self.delivered_ns else 0
