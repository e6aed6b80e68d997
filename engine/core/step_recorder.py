"""Writes steps down: what the scheduler decided, and what became of it.

Knows the block pool's counts and what was told since the step before. Decides nothing, and walks
through no queue.
"""

from engine.core.kv_cache_manager import KVCacheManager, PrefixHit
from engine.core.request import Request, RequestStatus
from engine.core.request_queue import RequestQueue
from engine.core.step_builder import StepBuilder
from instrumentation import Admission, Preemption, PrefixMiss, StepLabel, StepRecord


class StepRecorder:
    """Makes each step's record.

    A round of scheduling that comes to no step leaves no record: what happened in it is in the
    record of the next step.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._num_evictions_recorded = 0
        self._forget()

    def count_admission(self, request: Request, hit: PrefixHit) -> None:
        """Note what the prefix cache had for a request; call it while its status is the old one.

        Those resumed are counted apart. One that may not use the cache counts as no query.
        """
        num_tokens, num_hit_tokens = request.num_tokens, hit.num_tokens
        is_resumed = request.status is RequestStatus.PREEMPTED
        num_query_tokens = 0 if hit.miss is PrefixMiss.DISABLED else num_tokens
        if is_resumed:
            self._preempted_prefix_queries += num_query_tokens
            self._preempted_prefix_hits += num_hit_tokens
            self._num_recompute_tokens += max(0, request.num_lost_tokens - num_hit_tokens)
        else:
            self._prefix_queries += num_query_tokens
            self._prefix_hits += num_hit_tokens
        self._admissions.append(
            Admission(
                request.num, num_tokens, num_hit_tokens, is_resumed, hit.miss, hit.evicted_age_ns
            )
        )

    def count_preemption(self, preemption: Preemption) -> None:
        """Note who lost its blocks."""
        self._preempted.append(preemption)

    def record(
        self,
        step: int,
        builder: StepBuilder,
        label: StepLabel,
        *,
        running: list[Request],
        waiting: RequestQueue,
    ) -> StepRecord:
        """The record of a step that has been scheduled; `running` is in the order of admission."""
        pool, totals, num_waiting = self._kv_cache.pool, waiting.totals, len(waiting)
        num_cached_free = pool.num_cached_free_blocks
        times = pool.history.take()
        record = StepRecord(
            step=step,
            begin_ns=builder.begin_ns,
            end_ns=0,
            num_context_requests=label.num_context_requests,
            num_context_tokens=label.num_context_tokens,
            num_generation_requests=label.num_generation_requests,
            num_generation_tokens=label.num_generation_tokens,
            token_budget_left=builder.token_budget,
            num_running=len(running),
            num_waiting=num_waiting,
            waiting_by_reason=(num_waiting - waiting.num_deferred, 0, waiting.num_deferred),
            admission_stop=builder.admission_stop,
            admission_stop_request_num=builder.admission_stop_request_num,
            preempted=tuple(self._preempted),
            num_blocks_used=pool.num_used_blocks,
            num_blocks_cached_free=num_cached_free,
            num_blocks_free=pool.num_free_blocks - num_cached_free,
            prefix_query_tokens=self._prefix_queries,
            prefix_hit_tokens=self._prefix_hits,
            preempted_prefix_query_tokens=self._preempted_prefix_queries,
            preempted_prefix_hit_tokens=self._preempted_prefix_hits,
            num_evicted_blocks=pool.num_evictions - self._num_evictions_recorded,
            scheduled=tuple(
                number
                for request, num_tokens in builder.scheduled_tokens()
                for number in (request.num, num_tokens)
            ),
            num_waiting_tokens=totals.num_tokens,
            num_waiting_deferred_tokens=waiting.num_deferred_tokens,
            admission_stop_num_tokens=builder.admission_stop_num_tokens,
            num_waiting_preempted=totals.num_preempted,
            oldest_waiting_since_ns=totals.oldest_since_ns,
            oldest_running_since_ns=running[0].since_ns if running else 0,
            admissions=tuple(self._admissions),
            num_recompute_tokens=self._num_recompute_tokens,
            num_unfilled_slots=builder.num_unfilled_slots,
            evicted_lifetimes_ns=times.evicted_lifetimes_ns,
            evicted_idle_ns=times.evicted_idle_ns,
            reuse_gaps_ns=times.reuse_gaps_ns,
        )
        self._num_evictions_recorded = pool.num_evictions
        self._forget()
        return record

    def complete(
        self, record: StepRecord, *, first_tokens: list[int], finished: list[int], end_ns: int
    ) -> None:
        """Add what only the step's result could tell."""
        pool = self._kv_cache.pool
        record.first_tokens, record.finished = tuple(first_tokens), tuple(finished)
        record.num_blocks_used_at_end = pool.num_used_blocks
        record.num_blocks_cached_free_at_end = pool.num_cached_free_blocks
        record.end_ns = end_ns

    def _forget(self) -> None:
        self._prefix_queries = self._prefix_hits = 0
        self._preempted_prefix_queries = self._preempted_prefix_hits = 0
        self._preempted: list[Preemption] = []
        self._admissions: list[Admission] = []
        self._num_recompute_tokens = 0
