"""What a step leaves behind: the scheduler's record of it, and each worker's.

Knows the fields and their units. Does not know how records travel or who reads them. All times are
integer nanoseconds of CLOCK_MONOTONIC, which the processes of one host share. Fields are only ever
added at the end, with a default, so that older journals stay readable.
"""

from typing import NamedTuple

import msgspec

from instrumentation.labels import StepLabel
from instrumentation.names import AdmissionStop, GraphMode, PrefixMiss


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
    num_forced: int = 0
    """Tokens that were sampled where their text, or its beginning, was known before."""


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
    """Since the step before: planning may preempt and then find nothing to run."""
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
