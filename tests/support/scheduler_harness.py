"""Drives a `Scheduler` with a fake worker and checks everything that must hold after each move.

Keeps its own account of every request (a shadow) and never asks the scheduler what it should say.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from engine.core.block_hash import BlockHasher
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.types.messages import EngineCoreOutput, FinishReason
from engine.types.plan import ModelRunnerOutput, SchedulerOutput
from engine.types.sampling import SamplingParams
from instrumentation import AdmissionStop, StepRecord, format_step_label, parse_step_label
from tests.fakes import FakeWorker, make_request, make_scheduler, reference_output
from tests.support.record_account import RecordAccount


@dataclass(slots=True)
class Shadow:
    """The harness's own account of one request."""

    request: Request
    prompt: list[int]
    expected: list[int]
    expected_reason: str
    order: int
    output: list[int] = field(default_factory=list)
    reason: str | None = None
    num_sampling: int = 0
    """Output tokens made or being made."""
    num_computed: int = 0
    num_preemptions: int = 0
    num_steps_as_oldest: int = 0


@dataclass(slots=True)
class Settings:
    """One configuration of a history."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_caching: bool
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    scheduling_policy: str
    depth: int
    max_model_len: int = 40

    def __post_init__(self) -> None:
        # As start-up does: one sequence always fits, and without chunks so does each prompt.
        self.max_model_len = min(self.max_model_len, self.num_blocks * self.block_size)
        if not self.enable_chunked_prefill:
            self.max_num_batched_tokens = max(self.max_num_batched_tokens, self.max_model_len)


class SchedulerHarness:
    """A scheduler, a worker, up to `depth` steps in flight, and the account."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.scheduler: Scheduler = make_scheduler(
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            enable_caching=settings.enable_caching,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            enable_chunked_prefill=settings.enable_chunked_prefill,
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            scheduling_policy=settings.scheduling_policy,
        )
        self.account = RecordAccount(self.scheduler)
        self.worker = FakeWorker(settings.num_blocks, settings.block_size)
        self.shadows: dict[str, Shadow] = {}
        self.live: dict[str, Shadow] = {}
        self.in_flight: deque[tuple[SchedulerOutput, StepRecord, ModelRunnerOutput]] = deque()
        self.records: list[StepRecord] = []
        self.num_evictions_seen = 0
        self.num_preemptions_to_tell = 0
        """In moves that planned nothing: the next step's record tells of them."""
        self.first_admissions: list[str] = []

    # -- moves -----------------------------------------------------------------------------------

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """A request arrives."""
        num = len(self.shadows)
        prompt = prompt[: self.settings.max_model_len - 1]
        request = make_request(
            f"r{num}",
            prompt,
            block_size=self.settings.block_size if self.settings.enable_caching else None,
            num=num,
            arrival_ns=num + 1,
            priority=priority,
            cache_salt=cache_salt,
            params=params,
        )
        expected, reason = reference_output(prompt, params, self.settings.max_model_len)
        shadow = Shadow(request, prompt, expected, reason, order=num)
        self.shadows[request.request_id] = self.live[request.request_id] = shadow
        self.account.begin_move()
        self.account.arrived(request)
        self.scheduler.add_request(request)
        self.check()
        return request.request_id

    def abort(self, request_id: str) -> None:
        """A request is ended from outside, whatever its state."""
        shadow = self.live.pop(request_id)
        shadow.reason = "abort"
        self.account.begin_move()
        # Asking twice and for strangers is harmless.
        ended = self.scheduler.finish_requests(
            [request_id, "stranger", request_id], FinishReason.ABORT
        )
        assert ended == [shadow.request]
        assert shadow.request.is_finished
        assert self.scheduler.finish_requests([request_id], FinishReason.ABORT) == []
        self.check()

    def step(self) -> bool:
        """What `EngineCore.step` does; returns whether anything moved."""
        planned = self.schedule() if len(self.in_flight) < self.settings.depth else False
        if planned and len(self.in_flight) < self.settings.depth:
            return True
        if self.in_flight:
            self.update()
            return True
        return planned

    def drain(self) -> None:
        """Run until all requests have ended, within the bound that excludes starvation."""
        bound = 10 + 2 * sum(len(s.prompt) + len(s.expected) for s in self.live.values())
        for _ in range(2 * bound):
            if not self.live and not self.in_flight:
                break
            assert self.step(), "nothing in flight and nothing to schedule, but requests wait"
        assert not self.live, f"still unfinished after {2 * bound} moves: {sorted(self.live)}"
        self.check()
        pool = self.scheduler.kv_cache.pool
        assert pool.num_used_blocks == 0
        assert pool.num_free_blocks == self.settings.num_blocks
        self.scheduler.kv_cache.check_idle()

    # -- scheduling ------------------------------------------------------------------------------

    def schedule(self) -> bool:
        """Plan a step, check the plan against the account, and run it on the worker."""
        was_running = list(self.scheduler.running)
        waiting = self._waiting()
        self.account.begin_move()
        planned = self.scheduler.schedule()
        preempted = [r for r in was_running if r.status is RequestStatus.PREEMPTED]
        for request in preempted:
            shadow = self.shadows[request.request_id]
            shadow.num_preemptions += 1
            shadow.num_computed = 0
            shadow.num_sampling = len(shadow.output)
        self._check_preempted(was_running, preempted)
        self.num_preemptions_to_tell += len(preempted)
        if planned is None:
            self.check()
            return False
        plan, record = planned
        assert record.num_preempted == self.num_preemptions_to_tell
        self.num_preemptions_to_tell = 0
        self._check_plan(plan, was_running, waiting)
        self._check_record(plan, record)
        self.account.check(plan, record, [shadow.request for shadow in self.live.values()])
        self.in_flight.append((plan, record, self.worker.execute(plan)))
        self.check()
        return True

    def _check_preempted(self, was_running: list[Request], preempted: list[Request]) -> None:
        if not preempted:
            return
        kept = [r for r in was_running if r.status is RequestStatus.RUNNING]
        if self.settings.scheduling_policy == "fcfs":
            assert was_running[0] not in preempted, "the oldest request was preempted"
            assert was_running == kept + preempted, "not the last ones were preempted"
        else:
            key = self._priority_key
            assert all(key(k) < key(p) for k in kept for p in preempted), "wrong victims"
        assert self.scheduler.running == kept, "somebody was admitted in a step that preempted"

    def _check_plan(
        self, plan: SchedulerOutput, was_running: list[Request], waiting: list[Request]
    ) -> None:
        limits, counts = self.settings, plan.num_scheduled_tokens
        assert all(n > 0 for n in counts.values())
        assert plan.total_num_scheduled_tokens == sum(counts.values())
        assert plan.total_num_scheduled_tokens <= limits.max_num_batched_tokens
        assert len(counts) <= limits.max_num_seqs
        assert {d.req_id for d in plan.scheduled_cached_reqs} <= {r.request_id for r in was_running}
        if limits.long_prefill_token_threshold:
            assert max(counts.values()) <= limits.long_prefill_token_threshold
        for new in plan.scheduled_new_reqs:
            self._check_admitted(new.req_id, new.num_computed_tokens, counts[new.req_id])
        admitted = [new.req_id for new in plan.scheduled_new_reqs]
        if limits.scheduling_policy == "priority":
            waiting = sorted(waiting, key=self._priority_key)
        assert admitted == [r.request_id for r in waiting[: len(admitted)]], "out of turn"
        context = generation = context_tokens = generation_tokens = 0
        for request_id, num_tokens in counts.items():
            shadow = self.live[request_id]
            if shadow.num_sampling == 0:
                context, context_tokens = context + 1, context_tokens + num_tokens
            else:
                generation, generation_tokens = generation + 1, generation_tokens + num_tokens
            shadow.num_computed += num_tokens
            if shadow.num_computed >= len(shadow.prompt) + shadow.num_sampling:
                shadow.num_sampling += 1
        assert plan.label == (context, context_tokens, generation, generation_tokens)
        assert parse_step_label(format_step_label(plan.label)) == plan.label

    def _check_admitted(self, request_id: str, num_cached: int, num_tokens: int) -> None:
        shadow, limits = self.live[request_id], self.settings
        known = len(shadow.prompt) + len(shadow.output)
        assert 0 <= num_cached < known
        assert num_cached % limits.block_size == 0
        assert limits.enable_caching or num_cached == 0
        if not limits.enable_chunked_prefill and not limits.long_prefill_token_threshold:
            assert num_tokens == known - num_cached, "a prompt was split"
        if shadow.num_preemptions == 0:
            self.first_admissions.append(request_id)
            assert shadow.request.num_cached_tokens == num_cached
        shadow.num_computed = num_cached
        shadow.num_sampling = len(shadow.output)

    def _check_record(self, plan: SchedulerOutput, record: StepRecord) -> None:
        scheduler, pool = self.scheduler, self.scheduler.kv_cache.pool
        assert record.step == plan.step
        assert record.label == plan.label
        pairs = dict(zip(record.scheduled[::2], record.scheduled[1::2], strict=True))
        assert pairs == {
            self.shadows[r].request.num: n for r, n in plan.num_scheduled_tokens.items()
        }
        assert record.num_scheduled_tokens == plan.total_num_scheduled_tokens
        assert record.num_scheduled_requests == len(plan.num_scheduled_tokens)
        budget = self.settings.max_num_batched_tokens
        assert record.token_budget_left == budget - plan.total_num_scheduled_tokens
        assert record.num_running == len(scheduler.running)
        assert record.num_waiting == len(scheduler.waiting) == sum(record.waiting_by_reason)
        num_blocks = record.num_blocks_used + record.num_blocks_cached_free + record.num_blocks_free
        assert num_blocks == self.settings.num_blocks
        assert record.num_blocks_used == pool.num_used_blocks
        assert min(record.num_blocks_cached_free, record.num_blocks_free) >= 0
        assert record.num_evicted_blocks == pool.num_evictions - self.num_evictions_seen
        self.num_evictions_seen = pool.num_evictions
        assert record.prefix_hit_tokens <= record.prefix_query_tokens
        assert record.preempted_prefix_hit_tokens <= record.preempted_prefix_query_tokens
        self._check_admission_stop(record)

    def _check_admission_stop(self, record: StepRecord) -> None:
        stop, waiting, limits = record.admission_stop, self._waiting(), self.settings
        if stop is AdmissionStop.AFTER_PREEMPTION:
            assert record.num_preempted > 0
            return
        assert (stop is AdmissionStop.NONE) == (not waiting)
        if stop is AdmissionStop.NONE:
            assert record.admission_stop_request_num == -1
            return
        assert record.admission_stop_request_num == min(waiting, key=self._queue_key).num
        if stop is AdmissionStop.MAX_NUM_SEQS:
            assert len(self.scheduler.running) == limits.max_num_seqs
        elif stop is AdmissionStop.TOKEN_BUDGET:
            assert record.token_budget_left == 0
        elif stop is AdmissionStop.CHUNKED_PREFILL_OFF:
            assert not limits.enable_chunked_prefill
            assert record.token_budget_left > 0
        else:
            assert stop is AdmissionStop.KV_BLOCKS
            assert record.token_budget_left > 0

    # -- results -----------------------------------------------------------------------------------

    def update(self) -> None:
        """Bring the oldest step's result in and check what comes out."""
        plan, record, result = self.in_flight.popleft()
        alive = {r for r in plan.num_scheduled_tokens if r in self.live}
        before = {r: list(s.output) for r, s in self.live.items()}
        oldest = min(self.live.values(), key=lambda s: s.order, default=None)
        self.account.begin_move()
        packages = self.scheduler.update_from_output(plan, result, record)
        outputs = [output for package in packages.values() for output in package.outputs]
        assert len({o.request_id for o in outputs}) == len(outputs)
        for output in outputs:
            assert output.request_id in alive
            self._take(output)
        firsts = {
            self.shadows[o.request_id].request.num for o in outputs if not before[o.request_id]
        }
        assert set(record.first_tokens) == firsts
        finished = {self.shadows[o.request_id].request.num for o in outputs if o.finished}
        assert set(record.finished) == finished
        assert record.num_sampled_tokens == sum(len(o.new_token_ids) for o in outputs)
        assert record.end_ns >= record.begin_ns > 0
        self.records.append(record)
        if oldest is not None and self.settings.scheduling_policy == "fcfs":
            oldest.num_steps_as_oldest += 1
            bound = 2 * (len(oldest.prompt) + len(oldest.expected)) + 4
            assert oldest.num_steps_as_oldest <= bound, f"{oldest.request.request_id} starves"
        self.check()

    def _take(self, output: EngineCoreOutput) -> None:
        shadow = self.live[output.request_id]
        shadow.output += output.new_token_ids
        assert output.new_token_ids
        assert shadow.output == shadow.expected[: len(shadow.output)], "a wrong token"
        assert output.num_cached_tokens == shadow.request.num_cached_tokens >= 0
        ended = len(shadow.output) == len(shadow.expected)
        assert output.finished == ended
        if ended:
            shadow.reason = str(output.finish_reason)
            assert shadow.reason == shadow.expected_reason
            assert output.times is not None
            times = output.times
            assert 0 < times.queued_ns < times.first_scheduled_ns < times.first_token_ns
            assert times.first_token_ns <= times.last_token_ns
            assert len(times.preemptions) == shadow.num_preemptions
            del self.live[output.request_id]

    # -- invariants --------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that holds between any two moves."""
        scheduler, cache = self.scheduler, self.scheduler.kv_cache
        scheduler.check_integrity()
        cache.check_integrity()
        assert set(scheduler.requests) == set(self.live)
        assert len(scheduler.running) <= self.settings.max_num_seqs
        waiting = self._waiting()
        assert len(waiting) == len(scheduler.waiting)
        assert not {id(r) for r in waiting} & {id(r) for r in scheduler.running}
        if self.settings.scheduling_policy == "fcfs":
            arrival = [r.num for r in (*scheduler.running, *waiting)]
            assert arrival == sorted(arrival), "admission order is not arrival order"
        self._check_blocks(waiting)
        for request_id, shadow in self.live.items():
            self._check_request(request_id, shadow)

    def _check_request(self, request_id: str, shadow: Shadow) -> None:
        request = shadow.request
        assert request.output_token_ids == shadow.output
        assert request.num_preemptions == shadow.num_preemptions
        if request.status is not RequestStatus.RUNNING:
            assert request.num_computed_tokens == request.num_output_placeholders == 0
            return
        assert request.num_computed_tokens == shadow.num_computed
        assert request.num_output_placeholders == shadow.num_sampling - len(shadow.output)
        planned_steps = sum(
            request_id in plan.num_scheduled_tokens for plan, _, _ in self.in_flight
        )
        assert request.num_output_placeholders <= planned_steps
        assert request.num_computed_tokens <= request.num_planned_tokens
        num_slots = len(self.scheduler.kv_cache.block_ids(request)) * self.settings.block_size
        assert (
            request.num_computed_tokens
            <= num_slots
            < (request.num_computed_tokens + self.settings.block_size)
        )
        if not self.in_flight and shadow.output:
            assert len(self.worker.requests[request_id].token_ids) == request.num_tokens

    def _check_blocks(self, waiting: list[Request]) -> None:
        scheduler, pool = self.scheduler, self.scheduler.kv_cache.pool
        size = self.settings.block_size
        owners: dict[int, list[tuple[int, Request]]] = {}
        for request in scheduler.running:
            table = scheduler.kv_cache.block_ids(request)
            assert len(set(table)) == len(table), "a block twice in one table"
            for index, block_id in enumerate(table):
                owners.setdefault(block_id, []).append((index, request))
        assert not any(scheduler.kv_cache.block_ids(request) for request in waiting)
        assert pool.num_used_blocks == len(owners)
        assert pool.num_used_blocks + pool.num_free_blocks == self.settings.num_blocks
        assert 0 <= pool.num_cached_free_blocks <= pool.num_free_blocks
        counts = Counter({block_id: len(held) for block_id, held in owners.items()})
        assert counts == Counter({b: n for b, n in enumerate(pool._ref_counts) if n})
        for held in owners.values():
            prefixes: set[Any] = {
                (i, tuple(r.all_token_ids[: (i + 1) * size]), r.cache_salt) for i, r in held
            }
            assert len(prefixes) == 1, "unequal prefixes share a block"
            if len(held) > 1:
                assert self.settings.enable_caching

    def _waiting(self) -> list[Request]:
        """Waiting requests in the order of the queue, as far as the policy keeps one."""
        return list(self.scheduler.waiting)

    def _queue_key(self, request: Request) -> tuple[int, int]:
        if self.settings.scheduling_policy == "fcfs":
            return (0, request.num)
        return self._priority_key(request)

    @staticmethod
    def _priority_key(request: Request) -> tuple[int, int]:
        return (request.priority, request.num)


def expected_hashes(token_ids: list[int], salt: str | None, block_size: int) -> list[bytes]:
    """Hashes of all full blocks, made anew."""
    hashes: list[bytes] = []
    BlockHasher(block_size).extend(hashes, token_ids, salt)
    return hashes
