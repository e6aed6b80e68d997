"""Decides what each step computes. There is no prefill mode and no decode mode.

Every request has tokens that exist (or are being sampled) and tokens that are computed; a step
closes the gap, greedily, under a token budget and a sequence budget: running requests first,
then waiting ones. The answer is `num_scheduled_tokens` per request. Planned state advances here,
when the step is scheduled; `update_from_output` brings in what the step sampled.

Knows counts, queues and blocks; no tensor, no text, no clock but the one handed in.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.core.kv_cache_manager import KVCacheManager, PrefixHit
from engine.core.request import Request, RequestStatus
from engine.core.request_queue import make_request_queue
from engine.core.stop import check_stop, output_limit
from engine.types.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from engine.types.plan import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from instrumentation import (
    NULL,
    AdmissionStop,
    Event,
    Instrument,
    Preemption,
    StepLabel,
    StepRecord,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The resolved numbers that bound a step."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"


@dataclass(slots=True)
class _StepState:
    """One step while it is being put together."""

    token_budget: int
    now_ns: int
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new: list[NewRequestData] = field(default_factory=list)
    cached: list[CachedRequestData] = field(default_factory=list)
    scheduled: list[Request] = field(default_factory=list)
    preempted_any: bool = False
    admission_stop: AdmissionStop = AdmissionStop.NONE
    stopped_at: int = -1


@dataclass(slots=True)
class _Tally:
    """What has happened since the last recorded step.

    Prefix look-ups are in tokens, those of requests that had been preempted apart.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    preempted_prefix_queries: int = 0
    preempted_prefix_hits: int = 0
    preempted: list[Preemption] = field(default_factory=list)


class Scheduler:
    """Owns the waiting queue, the running list and the KV blocks."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv_cache: KVCacheManager,
        *,
        clock: Callable[[], int],
        obs: Instrument = NULL,
    ) -> None:
        self.limits = limits
        self.kv_cache = kv_cache
        self.obs = obs
        self.requests: dict[str, Request] = {}
        self.waiting = make_request_queue(limits.scheduling_policy)
        self.running: list[Request] = []
        self._clock = clock
        self._step = 0
        self._forgettable: list[str] = []
        self._tally = _Tally()
        self._evictions_seen = 0

    # -- requests in ---------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. Its id must not be in use."""
        assert request.request_id not in self.requests, f"{request.request_id} is already queued"
        request.times.queued_ns = self._clock()
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def finish_requests(self, request_ids: Iterable[str], reason: FinishReason) -> list[Request]:
        """End requests from outside, in whatever state they are; unknown ids are ignored."""
        ended = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        for request in ended:
            self._dequeue(request)
            self._finish(request, reason)
        return ended

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    # -- the step ------------------------------------------------------------------------------

    def schedule(self) -> tuple[SchedulerOutput, StepRecord] | None:
        """Plan one step: running requests first, then admissions into what is left.

        Returns None when there is nothing to compute until a step in flight is done.
        """
        step = _StepState(self.limits.max_num_batched_tokens, self._clock())
        self._schedule_running(step)
        if not step.preempted_any:
            self._schedule_waiting(step)
        else:
            step.admission_stop = AdmissionStop.AFTER_PREEMPTION
        return self._conclude(step)

    def update_from_output(
        self, plan: SchedulerOutput, result: ModelRunnerOutput, record: StepRecord
    ) -> dict[int, EngineCoreOutputs]:
        """Bring in what a step sampled and complete its record; returns outputs by client index.

        Requests that ended while the step was in flight are skipped: what it computed for
        them is void.
        """
        assert len(result.req_ids) == len(plan.num_scheduled_tokens)
        now_ns = self._clock()
        packages: dict[int, EngineCoreOutputs] = {}
        first_tokens: list[int] = []
        finished: list[int] = []
        for row, request_id in enumerate(result.req_ids):
            request = self.requests.get(request_id)
            token_ids = result.sampled_token_ids[row]
            if request is None or not token_ids:
                continue
            record.num_sampled_tokens += len(token_ids)
            output = EngineCoreOutput(
                request_id,
                token_ids,
                result.logprobs[row] if result.logprobs else None,
                result.prompt_logprobs.get(request_id),
                num_cached_tokens=request.num_cached_tokens,
            )
            package = packages.get(request.client_index)
            if package is None:
                package = packages[request.client_index] = EngineCoreOutputs(timestamp_ns=now_ns)
            package.outputs.append(output)
            reason = self._append(request, token_ids, now_ns)
            if request.num_output_tokens == len(token_ids):
                first_tokens.append(request.num)
                output.times = request.times
            elif request.num_preemptions:
                output.times = request.times  # any output may turn out to hold a stop string
            if reason is not None:
                finished.append(request.num)
                self._dequeue(request)
                self._finish(request, reason)
                output.finish_reason = reason
                output.stop_reason = request.stop_reason
                output.times = request.times
        record.first_tokens, record.finished = tuple(first_tokens), tuple(finished)
        pool = self.kv_cache.pool
        record.num_blocks_used_at_end = pool.num_used_blocks
        record.num_blocks_cached_free_at_end = pool.num_cached_free_blocks
        record.end_ns = self._clock()
        return packages

    def check_integrity(self) -> None:
        """Assert what holds between steps; when idle, that everything has been given back."""
        assert len(self.requests) == len(self.running) + len(self.waiting)
        if self.requests:
            self.kv_cache.check_integrity()
        else:
            self.kv_cache.check_idle()

    # -- running requests ------------------------------------------------------------------------

    def _schedule_running(self, step: _StepState) -> None:
        for request in self.waiting.in_order(self.running):
            if step.token_budget == 0:
                return
            if request.status != RequestStatus.RUNNING:
                continue  # preempted a moment ago, for one before it
            num_tokens = min(self._cap_prefill(self._deficit(request)), step.token_budget)
            if num_tokens == 0:
                continue
            added = self._allocate_or_preempt(request, num_tokens, step)
            if added is None:
                continue
            step.cached.append(
                CachedRequestData(request.request_id, added, request.num_computed_tokens)
            )
            self._take(request, num_tokens, step)

    def _deficit(self, request: Request) -> int:
        """Tokens that exist or are being sampled, less those computed; 0 at the output's end."""
        if request.num_planned_tokens >= self.limits.max_model_len:
            return 0
        num_planned_output = request.num_planned_tokens - request.num_prompt_tokens
        if num_planned_output >= output_limit(request):
            return 0
        return request.num_planned_tokens - request.num_computed_tokens

    def _cap_prefill(self, num_tokens: int) -> int:
        threshold = self.limits.long_prefill_token_threshold
        return min(num_tokens, threshold) if threshold else num_tokens

    def _allocate_or_preempt(
        self, request: Request, num_tokens: int, step: _StepState
    ) -> list[int] | None:
        """Blocks for the request, preempting others until there are; None: it went itself."""
        while (added := self.kv_cache.allocate_slots(request, num_tokens)) is None:
            victim = self.waiting.victim(self.running)
            self._preempt(victim, step)
            if victim is request:
                return None
        return added

    def _preempt(self, request: Request, step: _StepState) -> None:
        """Take the request's blocks and send it back to the queue, to be recomputed."""
        # Running requests are planned in the order of the policy and preempted from its end. One
        # that this step computes must not go: its full blocks are registered already.
        assert request.request_id not in step.num_scheduled_tokens
        self.running.remove(request)
        num_tokens = request.num_computed_tokens
        num_blocks = self.kv_cache.free(request)
        step.preempted_any = True
        self._tally.preempted.append(Preemption(request.num, num_blocks, num_tokens))
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        request.times.preemptions.append((step.now_ns, 0))
        self._forgettable.append(request.request_id)
        self.waiting.put_back(request)
        self.obs.event(Event.PREEMPT, request.request_id, value=num_tokens)

    # -- waiting requests ------------------------------------------------------------------------

    def _schedule_waiting(self, step: _StepState) -> None:
        while self.waiting:
            request = self.waiting.peek()
            step.admission_stop = self._try_to_admit(request, step)
            if step.admission_stop is not AdmissionStop.NONE:
                step.stopped_at = request.num
                return

    def _try_to_admit(self, request: Request, step: _StepState) -> AdmissionStop:
        """Admit the next waiting request, or say what is in its way."""
        if len(self.running) == self.limits.max_num_seqs:
            return AdmissionStop.MAX_NUM_SEQS
        if step.token_budget == 0:
            return AdmissionStop.TOKEN_BUDGET
        hit = self.kv_cache.get_computed_blocks(request)
        num_tokens = self._cap_prefill(request.num_tokens - hit.num_tokens)
        if num_tokens > step.token_budget and not self.limits.enable_chunked_prefill:
            return AdmissionStop.CHUNKED_PREFILL_OFF
        num_tokens = min(num_tokens, step.token_budget)
        block_ids = self.kv_cache.allocate_slots(request, num_tokens, hit=hit)
        if block_ids is None:
            return AdmissionStop.KV_BLOCKS
        self._admit(self.waiting.pop(), hit, block_ids, num_tokens, step)
        return AdmissionStop.NONE

    def _admit(
        self,
        request: Request,
        hit: PrefixHit,
        block_ids: list[int],
        num_tokens: int,
        step: _StepState,
    ) -> None:
        self._count_prefix(request, hit)
        if request.status == RequestStatus.PREEMPTED:
            preempted_ns, _ = request.times.preemptions[-1]
            request.times.preemptions[-1] = (preempted_ns, step.now_ns)
            self.obs.event(Event.RESUME, request.request_id, value=hit.num_tokens)
        else:
            request.times.first_scheduled_ns = step.now_ns
            request.num_cached_tokens = hit.num_tokens
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit.num_tokens
        self.running.append(request)
        step.new.append(
            NewRequestData(
                request.request_id,
                request.prompt_token_ids,
                request.output_token_ids,
                request.sampling_params,
                list(block_ids),
                hit.num_tokens,
            )
        )
        self._take(request, num_tokens, step)

    def _count_prefix(self, request: Request, hit: PrefixHit) -> None:
        if not self.kv_cache.enable_caching:
            return
        if request.status == RequestStatus.PREEMPTED:
            self._tally.preempted_prefix_queries += request.num_tokens
            self._tally.preempted_prefix_hits += hit.num_tokens
        else:
            self._tally.prefix_queries += request.num_tokens
            self._tally.prefix_hits += hit.num_tokens

    # -- closing the step ------------------------------------------------------------------------

    def _take(self, request: Request, num_tokens: int, step: _StepState) -> None:
        step.num_scheduled_tokens[request.request_id] = num_tokens
        step.token_budget -= num_tokens
        step.scheduled.append(request)

    def _conclude(self, step: _StepState) -> tuple[SchedulerOutput, StepRecord] | None:
        """Verify the budgets, advance planned state, and write the step down."""
        budget = self.limits.max_num_batched_tokens
        total = budget - step.token_budget
        assert total == sum(step.num_scheduled_tokens.values()) <= budget
        assert len(self.running) <= self.limits.max_num_seqs
        if total == 0:
            return None
        self._step += 1
        label, scheduled = self._advance(step)
        forgettable, self._forgettable = self._forgettable, []
        plan = SchedulerOutput(
            step=self._step,
            scheduled_new_reqs=step.new,
            scheduled_cached_reqs=step.cached,
            num_scheduled_tokens=step.num_scheduled_tokens,
            total_num_scheduled_tokens=total,
            finished_req_ids=forgettable,
            label=label,
        )
        return plan, self._record(step, label, scheduled)

    def _advance(self, step: _StepState) -> tuple[StepLabel, list[int]]:
        context = context_tokens = 0
        scheduled: list[int] = []
        for request in step.scheduled:
            num_tokens = step.num_scheduled_tokens[request.request_id]
            scheduled += (request.num, num_tokens)
            if request.in_context_phase():
                context += 1
                context_tokens += num_tokens
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens >= request.num_planned_tokens:
                request.num_output_placeholders += 1
        generation = len(step.scheduled) - context
        generation_tokens = sum(scheduled[1::2]) - context_tokens
        return StepLabel(context, context_tokens, generation, generation_tokens), scheduled

    def _record(self, step: _StepState, label: StepLabel, scheduled: list[int]) -> StepRecord:
        pool, tally = self.kv_cache.pool, self._tally
        evictions = pool.num_evictions - self._evictions_seen
        self._evictions_seen, self._tally = pool.num_evictions, _Tally()
        cached_free = pool.num_cached_free_blocks
        return StepRecord(
            step=self._step,
            begin_ns=step.now_ns,
            end_ns=0,
            num_context_requests=label.num_context_requests,
            num_context_tokens=label.num_context_tokens,
            num_generation_requests=label.num_generation_requests,
            num_generation_tokens=label.num_generation_tokens,
            token_budget_left=step.token_budget,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            waiting_by_reason=(len(self.waiting), 0),
            admission_stop=step.admission_stop,
            admission_stop_request_num=step.stopped_at,
            preempted=tuple(tally.preempted),
            num_blocks_used=pool.num_used_blocks,
            num_blocks_cached_free=cached_free,
            num_blocks_free=pool.num_free_blocks - cached_free,
            prefix_query_tokens=tally.prefix_queries,
            prefix_hit_tokens=tally.prefix_hits,
            preempted_prefix_query_tokens=tally.preempted_prefix_queries,
            preempted_prefix_hit_tokens=tally.preempted_prefix_hits,
            num_evicted_blocks=evictions,
            scheduled=tuple(scheduled),
        )

    # -- results -----------------------------------------------------------------------------------

    def _append(self, request: Request, token_ids: list[int], now_ns: int) -> FinishReason | None:
        request.append_output(token_ids)
        request.times.first_token_ns = request.times.first_token_ns or now_ns
        request.times.last_token_ns = now_ns
        return check_stop(request, self.limits.max_model_len)

    def _dequeue(self, request: Request) -> None:
        """Take a request off the list or queue that holds it.

        One that is being ended by a step's result may have been preempted by the next step.
        """
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self.kv_cache.free(request)
        self._forgettable.append(request.request_id)
        del self.requests[request.request_id]
