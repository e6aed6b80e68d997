"""The records: what one step, one request, one event and one process leave behind.

Knows the fields, their units and the one definition of every interval. Does not know how records
travel or who reads them. All times are integer nanoseconds of CLOCK_MONOTONIC, which the processes
of one host share; a stamp of 0 means that it never happened. Fields are only ever added at the
end, with a default, so that older journals stay readable.
"""

from typing import NamedTuple

import msgspec

from instrumentation.labels import StepLabel
from instrumentation.names import (
    AdmissionStop,
    Event,
    FlightReason,
    GraphMode,
    PrefixMiss,
    StartupPhase,
)

UNFINISHED_REASONS = frozenset({"abort", "error"})
"""Finish reasons of requests that were given up before their end."""


class Preemption(NamedTuple):
    """One request that a step threw out, and what that will cost."""

    request_num: int
    blocks_lost: int
    tokens_lost: int
    by_request_num: int = -1
    """The request that it made room for."""


class Admission(NamedTuple):
    """One request that a step took from the waiting queue, and what the prefix cache had for it."""

    request_num: int
    num_query_tokens: int
    num_hit_tokens: int
    is_resumed: bool
    """Whether it had been preempted before."""
    miss: PrefixMiss
    """Why the cache had no more; about the first block that it did not have."""
    evicted_age_ns: int = -1
    """How long ago that block was evicted, where it was."""


class GrammarTotals(NamedTuple):
    """What structured outputs have come to since start-up."""

    num_hits: int
    """Requests whose constraint had been compiled (or refused) before."""
    num_misses: int
    """Requests that had to wait for it."""
    compile_ns: int
    """Time spent compiling, for nothing too."""
    outcomes: tuple[int, ...]
    """Constraints compiled or given up, indexed by `names.GrammarOutcome`."""
    num_cached: int
    """Grammars kept now."""
    num_bytes_cached: int


class StepRecord(msgspec.Struct, array_like=True, tag=1, gc=False, kw_only=True):
    """What the scheduler decided in one step and what became of it.

    The scheduler fills it; `Instrument.step` sets `phases`, `num_telemetry_drops` and
    `io_phase_totals_ns`. The same object goes into the journal and, inside the outputs message, to
    the frontend, so call `Instrument.step` before handing it to the output thread and leave it
    alone afterwards.
    """

    step: int
    begin_ns: int
    """Start of scheduling."""
    end_ns: int
    """End of updating from the step's output. Under async scheduling steps overlap, so this is no
    duration of a step; that is `WorkerStepRecord.duration_ns`."""
    num_context_requests: int = 0
    num_context_tokens: int = 0
    num_generation_requests: int = 0
    num_generation_tokens: int = 0
    token_budget_left: int = 0
    num_running: int = 0
    """Requests in the running list after scheduling."""
    num_waiting: int = 0
    """Requests in the waiting queue after scheduling."""
    waiting_by_reason: tuple[int, ...] = (0, 0)
    """Indexed by `WaitingReason`; adds up to `num_waiting`."""
    admission_stop: AdmissionStop = AdmissionStop.NONE
    admission_stop_request_num: int = -1
    """The waiting request at which admission stopped, -1 for none."""
    preempted: tuple[Preemption, ...] = ()
    num_blocks_used: int = 0
    num_blocks_cached_free: int = 0
    """Blocks that nobody holds but whose contents can still be hit."""
    num_blocks_free: int = 0
    """Blocks that nobody holds and that hold nothing; the three add up to the pool."""
    prefix_query_tokens: int = 0
    """Tokens looked up in the prefix cache by requests admitted for the first time."""
    prefix_hit_tokens: int = 0
    preempted_prefix_query_tokens: int = 0
    """The same for requests that come back from a preemption."""
    preempted_prefix_hit_tokens: int = 0
    num_evicted_blocks: int = 0
    """Cached blocks whose contents were given up in this step."""
    scheduled: tuple[int, ...] = ()
    """Flat pairs: request_num, num_tokens, request_num, num_tokens, ..."""
    first_tokens: tuple[int, ...] = ()
    """Request numbers whose first output token came out of this step."""
    finished: tuple[int, ...] = ()
    """Request numbers that this step finished."""
    num_sampled_tokens: int = 0
    """Output tokens that this step made."""
    phases: tuple[int, ...] = ()
    """Flat triples: phase, begin_ns, end_ns, ... of the core loop since the step record before."""
    num_telemetry_drops: int = 0
    """Entries lost since start-up: by the rings of all threads of the core, and by sinks that
    failed."""
    io_phase_totals_ns: tuple[int, ...] = ()
    """Flat pairs: phase, time since start-up, ... of the core's input and output threads."""
    num_blocks_used_at_end: int = -1
    """The pool after updating, once finished requests have given their blocks back; the numbers
    without `_at_end` are those after scheduling. -1 where it is not known."""
    num_blocks_cached_free_at_end: int = -1
    num_waiting_tokens: int = 0
    """Tokens that the waiting requests have still to compute, as far as is known without asking
    the prefix cache."""
    admission_stop_num_tokens: int = 0
    """Those of the request at which admission stopped."""
    num_waiting_preempted: int = 0
    """Waiting requests that were running before."""
    oldest_waiting_since_ns: int = 0
    """Since when the request waits that has waited longest, 0 with an empty queue."""
    oldest_running_since_ns: int = 0
    """When the request was admitted that has been running longest, 0 with none."""
    admissions: tuple[Admission, ...] = ()
    num_recompute_tokens: int = 0
    """Tokens that requests resumed in this step have to compute a second time."""
    num_unfilled_slots: int = 0
    """Token slots of the scheduled requests' last blocks that hold nothing."""
    evicted_lifetimes_ns: tuple[int, ...] = ()
    """From allocation to eviction, of the blocks evicted in this step (a sample if many)."""
    evicted_idle_ns: tuple[int, ...] = ()
    """From the last use to eviction, of the same blocks."""
    reuse_gaps_ns: tuple[int, ...] = ()
    """From the last use to being hit again, of the cached free blocks hit in this step (a sample
    if many)."""
    telemetry_errors: tuple[int, ...] = ()
    """Flat pairs: sink (`names.SinkName`), errors since start-up, ... of the core's process."""
    telemetry_ns: int = 0
    """Processor time of the core's drain thread since start-up."""
    telemetry_drops: tuple[int, ...] = ()
    """Flat pairs: sink, records that it did not get, ... of the core's process; what is missing
    from `num_telemetry_drops` was dropped before any sink, for want of room."""
    num_waiting_deferred_tokens: int = 0
    """Tokens of the waiting requests that were passed over."""
    num_structured: int = 0
    """Requests with a structured output that this step sampled for."""
    grammars: GrammarTotals | None = None
    """As of this step's scheduling; None before the first request with a structured output."""

    @property
    def label(self) -> StepLabel:
        """The step's four counts."""
        return StepLabel(
            self.num_context_requests,
            self.num_context_tokens,
            self.num_generation_requests,
            self.num_generation_tokens,
        )

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that the step computed."""
        return self.num_context_tokens + self.num_generation_tokens

    @property
    def num_scheduled_requests(self) -> int:
        """Requests that the step served."""
        return self.num_context_requests + self.num_generation_requests

    @property
    def num_running_at_end(self) -> int:
        """Requests in the running list once those that the step finished have left it."""
        return max(0, self.num_running - len(self.finished))

    @property
    def blocks_at_end(self) -> tuple[int, int, int]:
        """The pool's used, cached free and free blocks after updating, as far as is known."""
        used, cached_free = self.num_blocks_used, self.num_blocks_cached_free
        num_blocks = used + cached_free + self.num_blocks_free
        if self.num_blocks_used_at_end >= 0 and self.num_blocks_cached_free_at_end >= 0:
            used, cached_free = self.num_blocks_used_at_end, self.num_blocks_cached_free_at_end
        return used, cached_free, num_blocks - used - cached_free

    @property
    def num_preempted(self) -> int:
        """Requests that the step threw out."""
        return len(self.preempted)


class WorkerStepRecord(msgspec.Struct, array_like=True, tag=2, gc=False, kw_only=True):
    """How one worker ran one step; `Instrument.worker_step` adds `phases`."""

    step: int
    begin_ns: int
    end_ns: int
    num_context_requests: int = 0
    num_context_tokens: int = 0
    num_generation_requests: int = 0
    num_generation_tokens: int = 0
    graph_mode: GraphMode = GraphMode.NONE
    bucket: int = 0
    """Batch size of the graph that ran, 0 where there is none."""
    padded_tokens: int = 0
    """Tokens computed only to fill the bucket."""
    device_time_ns: int = -1
    """Time on the device, -1 where it was not measured."""
    phases: tuple[int, ...] = ()
    """Flat triples: phase, begin_ns, end_ns, ... of the worker since the record before."""

    @property
    def duration_ns(self) -> int:
        """What the worker took for the step; a worker runs one step after the other."""
        return self.end_ns - self.begin_ns

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that the step computed."""
        return self.num_context_tokens + self.num_generation_tokens

    @property
    def label(self) -> StepLabel:
        """The step's four counts."""
        return StepLabel(
            self.num_context_requests,
            self.num_context_tokens,
            self.num_generation_requests,
            self.num_generation_tokens,
        )


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


class EventRecord(msgspec.Struct, array_like=True, tag=5, gc=False):
    """A surprise; `names.EVENTS` says what `value` and `detail` mean."""

    kind: Event
    time_ns: int
    request_id: str = ""
    value: int = 0
    detail: str = ""


class StartupRecord(msgspec.Struct, array_like=True, tag=6, gc=False):
    """One phase of start-up."""

    phase: StartupPhase
    begin_ns: int
    end_ns: int


class Spans(msgspec.Struct, array_like=True, tag=7, gc=False):
    """Phases that belong to no step record. Flat triples: phase, begin_ns, end_ns, ..."""

    phases: tuple[int, ...]


class ThreadStarted(msgspec.Struct, array_like=True, tag=8, gc=False):
    """Names a thread; the frames of its records carry its number."""

    name: str
    native_id: int


class ClockAnchor(msgspec.Struct, array_like=True, tag=9, gc=False):
    """The host's clocks at one instant, for views that show the time of day."""

    monotonic_ns: int
    wall_ns: int
    boottime_ns: int


class ProcessHeader(msgspec.Struct, array_like=True, tag=10, gc=False, kw_only=True):
    """Who wrote a journal; its first record."""

    role: str
    rank: int
    pid: int
    host: str
    version: str
    python_version: str
    argv: tuple[str, ...]
    started_ns: int


class Drops(msgspec.Struct, array_like=True, tag=11, gc=False):
    """Entries of a thread that were lost since start-up."""

    num_dropped: int


class FlightDump(msgspec.Struct, array_like=True, tag=12, gc=False):
    """Why a flight record was written; the last record of its file."""

    reason: FlightReason
    time_ns: int
    detail: str = ""
    step: int = -1
    """The step that was the reason, -1 for none."""


Record = (
    StepRecord
    | WorkerStepRecord
    | RequestArrived
    | RequestTimeline
    | EventRecord
    | StartupRecord
    | Spans
    | ThreadStarted
    | ClockAnchor
    | ProcessHeader
    | Drops
    | FlightDump
)
"""Any record; the tag tells them apart."""
