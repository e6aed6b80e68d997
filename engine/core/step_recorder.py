"""Writes steps down: what the scheduler decided, and what became of it.

Knows the block pool's counts and what was told since the step before. Decides nothing.
"""

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, RequestStatus
from engine.core.step_builder import StepBuilder
from instrumentation import Preemption, StepLabel, StepRecord


class StepRecorder:
    """Makes each step's record.

    A round of scheduling that comes to no step leaves no record: what happened in it is in the
    record of the next step.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._num_evictions_recorded = 0
        self._forget()

    def count_prefix_lookup(self, request: Request, num_hit_tokens: int) -> None:
        """Note what the prefix cache had for a request; those resumed are counted apart."""
        if not self._kv_cache.enable_caching:
            return
        if request.status is RequestStatus.PREEMPTED:
            self._preempted_prefix_queries += request.num_tokens
            self._preempted_prefix_hits += num_hit_tokens
        else:
            self._prefix_queries += request.num_tokens
            self._prefix_hits += num_hit_tokens

    def count_preemption(self, preemption: Preemption) -> None:
        """Note who lost its blocks."""
        self._preempted.append(preemption)

    def record(
        self,
        step: int,
        builder: StepBuilder,
        label: StepLabel,
        *,
        num_running: int,
        num_waiting: int,
    ) -> StepRecord:
        """The record of a step that has been scheduled."""
        pool = self._kv_cache.pool
        num_cached_free = pool.num_cached_free_blocks
        record = StepRecord(
            step=step,
            begin_ns=builder.begin_ns,
            end_ns=0,
            num_context_requests=label.num_context_requests,
            num_context_tokens=label.num_context_tokens,
            num_generation_requests=label.num_generation_requests,
            num_generation_tokens=label.num_generation_tokens,
            token_budget_left=builder.token_budget,
            num_running=num_running,
            num_waiting=num_waiting,
            waiting_by_reason=(num_waiting, 0),
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
