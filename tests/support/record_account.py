"""A naive account of what step records say of the queue and the pool, to hold them against.

Watches the calls of a scheduler's KV cache and keeps everything in unbounded dictionaries; walks
over all requests and all blocks whenever it is asked.
"""

from collections.abc import Callable, Iterable
from typing import Any

from engine.core.kv_cache_manager import PrefixHit
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.types.plan import SchedulerOutput
from instrumentation import Admission, Preemption, PrefixMiss, StepRecord


class RecordAccount:
    """Everything since the last record, and stamps of requests, blocks and hashes since ever."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.pool = scheduler.kv_cache.pool
        self.now_ns = 0
        self.waiting_since: dict[str, int] = {}
        self.running_since: dict[str, int] = {}
        self.num_lost: dict[str, int] = {}
        self.evicted_at: dict[bytes, int] = {}
        self.allocated_at: dict[int, int] = {}
        self.used_at: dict[int, int] = {}
        self.expected_misses: dict[str, tuple[PrefixMiss, int]] = {}
        self.refused: Request | None = None
        self.num_records = 0
        self._begin_record()
        self._watch(scheduler.kv_cache, "get_computed_blocks", self._look_up)
        self._watch(scheduler.kv_cache, "allocate_slots", self._allocate_slots)
        self._watch(scheduler.kv_cache, "free", self._free)
        self._watch(self.pool, "allocate", self._allocate)
        self._watch(self.pool, "touch", self._touch)
        self._watch(self.pool, "release", self._release)
        self._watch(self.pool, "reset_cache", self._reset)

    def begin_move(self) -> None:
        """The scheduler is about to be called: the next reading of its clock is the time of all."""
        self.now_ns = self.scheduler._clock.now_ns  # type: ignore[attr-defined]

    def arrived(self, request: Request) -> None:
        """A request was queued in this move."""
        self.waiting_since[request.request_id] = self.now_ns

    def check(self, plan: SchedulerOutput, record: StepRecord, live: Iterable[Request]) -> None:
        """Hold the record of a step that has just been scheduled against the account."""
        requests = {request.request_id: request for request in live}
        admissions = []
        for new in plan.scheduled_new_reqs:
            request_id = new.req_id
            is_resumed = request_id in self.num_lost
            num_hit = new.num_computed_tokens
            num_known = len(new.prompt_token_ids) + len(new.output_token_ids)
            miss, age_ns = self.expected_misses[request_id]
            num = requests[request_id].num
            admissions.append(Admission(num, num_known, num_hit, is_resumed, miss, age_ns))
            if is_resumed:
                self.num_recompute += max(0, self.num_lost[request_id] - num_hit)
            self.running_since[request_id] = self.now_ns
            del self.waiting_since[request_id]
        assert record.admissions == tuple(admissions)
        looked_up = [a for a in admissions if a.miss is not PrefixMiss.DISABLED]
        first = [a for a in looked_up if not a.is_resumed]
        resumed = [a for a in looked_up if a.is_resumed]
        assert record.prefix_query_tokens == sum(a.num_query_tokens for a in first)
        assert record.prefix_hit_tokens == sum(a.num_hit_tokens for a in first)
        assert record.preempted_prefix_query_tokens == sum(a.num_query_tokens for a in resumed)
        assert record.preempted_prefix_hit_tokens == sum(a.num_hit_tokens for a in resumed)
        assert record.num_recompute_tokens == self.num_recompute
        assert record.preempted == tuple(self.preempted)
        self._check_queues(record, requests)
        self._check_blocks(plan, record, requests)
        self.num_records += 1
        self._begin_record()

    def _check_queues(self, record: StepRecord, live: dict[str, Request]) -> None:
        running = [r for r in live.values() if r.status is RequestStatus.RUNNING]
        waiting = {i: r for i, r in live.items() if r.status is not RequestStatus.RUNNING}
        assert record.num_waiting_tokens == sum(len(r.all_token_ids) for r in waiting.values())
        assert record.num_waiting_preempted == sum(i in self.num_lost for i in waiting)
        longest_wait = min((self.waiting_since[i] for i in waiting), default=0)
        assert record.oldest_waiting_since_ns == longest_wait
        longest_run = min((self.running_since[r.request_id] for r in running), default=0)
        assert record.oldest_running_since_ns == longest_run
        stopped_at = [r for r in waiting.values() if r.num == record.admission_stop_request_num]
        num_tokens = sum(len(r.all_token_ids) for r in stopped_at)
        assert record.admission_stop_num_tokens == num_tokens

    def _check_blocks(
        self, plan: SchedulerOutput, record: StepRecord, live: dict[str, Request]
    ) -> None:
        cache, unfilled = self.scheduler.kv_cache, 0
        for request_id in plan.num_scheduled_tokens:
            request = live[request_id]
            num_slots = len(cache.block_ids(request)) * cache.block_size
            unfilled += num_slots - request.num_computed_tokens
        assert record.num_unfilled_slots == unfilled
        assert record.evicted_lifetimes_ns == tuple(self.lifetimes)
        assert record.evicted_idle_ns == tuple(self.idles)
        assert record.reuse_gaps_ns == tuple(self.gaps)

    # -- what is watched -------------------------------------------------------------------------

    def _begin_record(self) -> None:
        self.preempted: list[Preemption] = []
        self.lifetimes: list[int] = []
        self.idles: list[int] = []
        self.gaps: list[int] = []
        self.num_recompute = 0

    @staticmethod
    def _watch(target: Any, name: str, watcher: Callable[..., Any]) -> None:
        original = getattr(target, name)
        setattr(target, name, lambda *args, **kwargs: watcher(original, *args, **kwargs))

    def _look_up(self, original: Callable[..., PrefixHit], request: Request) -> PrefixHit:
        cached = {h for h in self.pool._hashes if h is not None}
        wants_prompt = request.sampling_params.prompt_logprobs is not None
        age_ns = -1
        if not self.scheduler.kv_cache.enable_caching or (
            wants_prompt and request.num_output_tokens == 0
        ):
            miss = PrefixMiss.DISABLED
        else:
            size = self.scheduler.kv_cache.block_size
            servable = request.block_hashes[: (len(request.all_token_ids) - 1) // size]
            missing = [block_hash for block_hash in servable if block_hash not in cached]
            if not servable:
                miss = PrefixMiss.PARTIAL_BLOCK
            elif not missing:
                miss = PrefixMiss.NONE
            elif missing[0] in self.evicted_at:
                miss, age_ns = PrefixMiss.EVICTED, self.now_ns - self.evicted_at[missing[0]]
            else:
                miss = PrefixMiss.NEVER_CACHED
        self.expected_misses[request.request_id] = miss, age_ns
        return original(request)

    def _allocate_slots(
        self, original: Callable[..., list[int] | None], request: Request, *args: Any, **kwargs: Any
    ) -> list[int] | None:
        added = original(request, *args, **kwargs)
        self.refused = request if added is None else None
        return added

    def _free(self, original: Callable[..., int], request: Request) -> int:
        num_computed, num_blocks = request.num_computed_tokens, original(request)
        if not request.is_finished:  # the scheduler frees those that ended after saying so
            assert self.refused is not None
            self.preempted.append(
                Preemption(request.num, num_blocks, num_computed, self.refused.num)
            )
            self.num_lost[request.request_id] = num_computed
            self.waiting_since[request.request_id] = self.now_ns
        return num_blocks

    def _allocate(self, original: Callable[..., list[int]], num_blocks: int) -> list[int]:
        before = list(self.pool._hashes)
        taken = original(num_blocks)
        for block_id in taken:
            block_hash = before[block_id]
            if block_hash is not None:
                self.evicted_at[block_hash] = self.now_ns
                self.lifetimes.append(self.now_ns - self.allocated_at[block_id])
                self.idles.append(self.now_ns - self.used_at[block_id])
            self.allocated_at[block_id] = self.now_ns
        return taken

    def _touch(self, original: Callable[..., None], block_ids: list[int]) -> None:
        free = [block_id for block_id in block_ids if self.pool.is_free(block_id)]
        self.gaps += [self.now_ns - self.used_at[block_id] for block_id in free]
        original(block_ids)

    def _release(self, original: Callable[..., None], block_ids: Iterable[int]) -> None:
        released = list(block_ids)
        original(released)
        for block_id in released:
            if self.pool.is_free(block_id):
                self.used_at[block_id] = self.now_ns

    def _reset(self, original: Callable[[], bool]) -> bool:
        done = original()
        if done:
            self.evicted_at.clear()
        return done
