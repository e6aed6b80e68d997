"""Decides what each step computes. There is no prefill mode and no decode mode.

Every request has tokens that exist (or are being sampled) and tokens that are computed; a step
closes the gap, greedily, under a token budget and a sequence budget: running requests first,
then waiting ones. The answer is `num_scheduled_tokens` per request. Planned state advances here,
when the step is scheduled; `update_from_output` brings in what the step sampled.

Knows counts, queues and blocks; no tensor, no text, no clock but the one handed in.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.core.kv_cache_manager import KVCacheManager, PrefixHit
from engine.core.request import Request, RequestStatus
from engine.core.request_queue import make_request_queue
from engine.core.step_builder import StepBuilder
from engine.core.step_recorder import StepRecorder
from engine.core.stop import check_stop, output_limit
from engine.types.messages import EngineCoreOutput, EngineCoreOutputs, ErrorKind, FinishReason
from engine.types.plan import ModelRunnerOutput, SchedulerOutput
from instrumentation import NULL, AdmissionStop, Event, Instrument, Preemption, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The resolved numbers that bound a step."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"


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
        self._recorder = StepRecorder(kv_cache)

    # -- requests in ---------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. Its id must not be in use."""
        assert request.request_id not in self.requests, f"{request.request_id} is already queued"
        request.times.queued_ns = self._clock()
        self.requests[request.request_id] = request
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self.waiting.defer(request)
        else:
            self.waiting.add(request)

    def release_request(self, request: Request) -> None:
        """Let a request that has got its grammar take its place in the queue."""
        request.status = RequestStatus.WAITING
        request.times.grammar_ready_ns = self._clock()
        self.waiting.release(request)

    def fail_request(self, request: Request, error: str, kind: ErrorKind) -> EngineCoreOutput:
        """End a request that cannot go on; returns its last output."""
        self.kv_cache.set_time(self._clock())
        return self._fail(request, error, kind)

    def finish_requests(self, request_ids: Iterable[str], reason: FinishReason) -> list[Request]:
        """End requests from outside, in whatever state they are; unknown ids are ignored."""
        self.kv_cache.set_time(self._clock())
        ended = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        for request in ended:
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
        now_ns = self._clock()
        self.kv_cache.set_time(now_ns)
        step = StepBuilder(self.limits.max_num_batched_tokens, now_ns, self.kv_cache.block_size)
        self._schedule_running(step)
        if step.preempted_any:
            step.admission_stop = AdmissionStop.AFTER_PREEMPTION
        else:
            self._schedule_waiting(step)
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
        self.kv_cache.set_time(now_ns)
        packages: dict[int, EngineCoreOutputs] = {}
        first_tokens: list[int] = []
        finished: list[int] = []
        for row, request_id in enumerate(result.req_ids):
            request = self.requests.get(request_id)
            token_ids = result.sampled_token_ids[row]
            if request is None:
                continue
            if request_id in result.failures:
                output = self._fail(request, result.failures[request_id], ErrorKind.ENGINE)
            elif token_ids and (error := _advance_grammar(request, token_ids)) is not None:
                output = self._fail(request, error, ErrorKind.INPUT)
            elif token_ids:
                record.num_sampled_tokens += len(token_ids)
                output = self._append(request, token_ids, now_ns)
                output.new_logprobs = result.logprobs[row] if result.logprobs else None
                output.prompt_logprobs = result.prompt_logprobs.get(request_id)
                if request.num_output_tokens == len(token_ids):
                    first_tokens.append(request.num)
            else:
                continue
            if output.finished:
                finished.append(request.num)
            if request.client_index not in packages:
                packages[request.client_index] = EngineCoreOutputs(timestamp_ns=now_ns)
            packages[request.client_index].outputs.append(output)
        self._recorder.complete(
            record, first_tokens=first_tokens, finished=finished, end_ns=self._clock()
        )
        return packages

    def check_integrity(self) -> None:
        """Assert what holds between steps; when idle, that everything has been given back."""
        assert len(self.requests) == len(self.running) + len(self.waiting)
        if self.requests:
            self.kv_cache.check_integrity()
        else:
            self.kv_cache.check_idle()

    # -- running requests ------------------------------------------------------------------------

    def _schedule_running(self, step: StepBuilder) -> None:
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
            step.add_cached(request, num_tokens, added)

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
        self, request: Request, num_tokens: int, step: StepBuilder
    ) -> list[int] | None:
        """Blocks for the request, preempting others until there are; None: it went itself."""
        while (added := self.kv_cache.allocate_slots(request, num_tokens)) is None:
            victim = self.waiting.victim(self.running)
            self._preempt(victim, step, by=request)
            if victim is request:
                return None
        return added

    def _preempt(self, request: Request, step: StepBuilder, *, by: Request) -> None:
        """Take a request's blocks for another (or itself) and send it back to the queue."""
        # Running requests are planned in the order of the policy and preempted from its end. One
        # that this step computes must not go: its full blocks are registered already.
        assert request.request_id not in step.num_scheduled_tokens
        self.running.remove(request)
        num_tokens = request.num_computed_tokens
        num_blocks = self.kv_cache.free(request)
        step.preempted_any = True
        self._recorder.count_preemption(Preemption(request.num, num_blocks, num_tokens, by.num))
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_lost_tokens = num_tokens
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        request.times.preemptions.append((step.begin_ns, 0))
        self._forgettable.append(request.request_id)
        self.waiting.put_back(request)
        self.obs.event(Event.PREEMPT, request.request_id, value=num_tokens)

    # -- waiting requests ------------------------------------------------------------------------

    def _schedule_waiting(self, step: StepBuilder) -> None:
        while self.waiting.has_ready:
            request = self.waiting.peek()
            step.admission_stop = self._try_to_admit(request, step)
            if step.admission_stop is not AdmissionStop.NONE:
                step.admission_stop_request_num = request.num
                step.admission_stop_num_tokens = request.num_uncomputed_tokens
                return

    def _try_to_admit(self, request: Request, step: StepBuilder) -> AdmissionStop:
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
        step: StepBuilder,
    ) -> None:
        self._recorder.count_admission(request, hit)
        if request.status == RequestStatus.PREEMPTED:
            preempted_ns, _ = request.times.preemptions[-1]
            request.times.preemptions[-1] = (preempted_ns, step.begin_ns)
            self.obs.event(Event.RESUME, request.request_id, value=hit.num_tokens)
        else:
            request.times.first_scheduled_ns = step.begin_ns
            request.num_cached_tokens = hit.num_tokens
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit.num_tokens
        self.running.append(request)
        step.add_new(request, num_tokens, block_ids)

    # -- closing the step ------------------------------------------------------------------------

    def _conclude(self, step: StepBuilder) -> tuple[SchedulerOutput, StepRecord] | None:
        """Advance planned state, and write the step down."""
        assert len(self.running) <= self.limits.max_num_seqs
        if not step.scheduled:
            return None
        self._step += 1
        label = step.advance()
        plan = step.plan(self._step, label, forget=self._forgettable)
        self._forgettable = []
        record = self._recorder.record(
            self._step, step, label, running=self.running, waiting=self.waiting
        )
        return plan, record

    # -- results -----------------------------------------------------------------------------------

    def _append(self, request: Request, token_ids: list[int], now_ns: int) -> EngineCoreOutput:
        """Add sampled tokens to a request, and end it if they are its last."""
        request.append_output(token_ids)
        if request.status is RequestStatus.PREEMPTED:
            self.waiting.totals.grow(len(token_ids))
        is_first = request.num_output_tokens == len(token_ids)
        times = request.times
        if is_first:
            times.first_token_ns = now_ns
        times.last_token_ns = now_ns
        reason = check_stop(request, self.limits.max_model_len)
        if reason in (None, FinishReason.LENGTH) and request.grammar and request.grammar.is_over:
            reason = FinishReason.STOP
        if reason is not None:
            self._finish(request, reason)
        # After a preemption any output may be the last: the frontend may find a stop string in it.
        is_told = is_first or reason is not None or request.num_preemptions > 0
        return EngineCoreOutput(
            request.request_id,
            token_ids,
            finish_reason=reason,
            stop_reason=request.stop_reason,
            num_cached_tokens=request.num_cached_tokens,
            times=times if is_told else None,
        )

    def _fail(self, request: Request, error: str, kind: ErrorKind) -> EngineCoreOutput:
        """End a request that cannot go on."""
        self._finish(request, FinishReason.ERROR)
        return EngineCoreOutput(
            request.request_id,
            [],
            finish_reason=FinishReason.ERROR,
            num_cached_tokens=request.num_cached_tokens,
            times=request.times,
            error=error,
            error_kind=kind,
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Take a request out, wherever it stands, and give its blocks back."""
        # One that a step's result ends may have been preempted by the next step.
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            request.times.grammar_ready_ns = self._clock()
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self.kv_cache.free(request)
        self._forgettable.append(request.request_id)
        del self.requests[request.request_id]


def _advance_grammar(request: Request, token_ids: list[int]) -> str | None:
    """Tell the request's grammar of sampled tokens; returns what is wrong with them."""
    return None if request.grammar is None else request.grammar.accept(token_ids)
