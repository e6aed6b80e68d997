"""Journals of an engine that never ran: a small simulated one, for tests.

Knows the order in which a real engine leaves its records. Does not know the engine. The same seed
gives the same run.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from instrumentation.names import AdmissionStop, Event, Phase, Role, StartupPhase, ThreadName
from instrumentation.record.journal import SUFFIX, JournalWriter
from instrumentation.record.records import (
    ClockAnchor,
    EventRecord,
    ProcessHeader,
    Spans,
    StartupRecord,
    ThreadStarted,
)
from instrumentation.record.request_records import RequestArrived, RequestTimeline
from instrumentation.record.step_records import Preemption, StepRecord, WorkerStepRecord

START_NS = 5_000_000_000_000
_BLOCK_TOKENS = 16
_NUM_BLOCKS = 512
_CALLER_PID, _CORE_PID = 4100, 4200


@dataclass(slots=True)
class _Request:
    timeline: RequestTimeline
    num_tokens_wanted: int
    num_to_compute: int
    num_made: int = 0

    @property
    def num(self) -> int:
        return self.timeline.request_num


@dataclass(slots=True)
class SyntheticRun:
    """What was written, to compare with what is read."""

    folder: Path
    steps: list[StepRecord] = field(default_factory=list)
    worker_steps: list[WorkerStepRecord] = field(default_factory=list)
    timelines: list[RequestTimeline] = field(default_factory=list)
    """All requests, in the order of their numbers, as they were when the run ended."""
    num_events: int = 0
    num_startups: int = 0


def write_synthetic_run(
    folder: Path,
    *,
    seed: int = 0,
    num_requests: int = 12,
    is_async: bool = False,
    is_killed: bool = False,
    token_budget: int = 64,
    max_num_seqs: int = 6,
    start_ns: int = START_NS,
) -> SyntheticRun:
    """Simulate an engine in two processes and write their journals.

    With `is_async` each step is scheduled before the one ahead of it is done, so steps overlap.
    With `is_killed` both processes die half-way, and the core's journal is cut off in a frame.
    """
    folder.mkdir(parents=True, exist_ok=True)
    engine = _Engine(
        folder, random.Random(seed), start_ns, token_budget=token_budget, max_num_seqs=max_num_seqs
    )
    engine.write_start()
    engine.arrive(num_requests)
    limit = num_requests if is_killed else 100_000
    while (engine.waiting or engine.running) and len(engine.run.steps) < limit:
        if is_async:
            engine.step_async()
        else:
            engine.step_sync()
    if is_async and not is_killed:
        engine.finish_async()
    engine.end(is_killed=is_killed)
    return engine.run


class _Engine:
    """Scheduler, worker and frontend in one, on a clock of their own."""

    def __init__(
        self,
        folder: Path,
        chance: random.Random,
        start_ns: int,
        *,
        token_budget: int,
        max_num_seqs: int,
    ) -> None:
        self.run = SyntheticRun(folder)
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []
        self._chance = chance
        self._token_budget = token_budget
        self._max_num_seqs = max_num_seqs
        self._now_ns = start_ns
        self._num_steps = 0
        self._phases: list[int] = []
        self._in_flight: tuple[StepRecord, list[_Request]] | None = None
        self._caller = self._open(folder, Role.CALLER, _CALLER_PID)
        self._core = self._open(folder, Role.CORE, _CORE_PID)

    def _open(self, folder: Path, role: Role, pid: int) -> JournalWriter:
        process = JournalWriter(folder / f"{role}.{pid}{SUFFIX}")
        process.write(
            ProcessHeader(
                role=role,
                rank=0,
                pid=pid,
                host="synthetic",
                version="0",
                python_version="3",
                argv=("synthetic", role),
                started_ns=self._now_ns,
            )
        )
        process.write(ClockAnchor(self._now_ns, self._now_ns + 10**18, self._now_ns + 10**9))
        return process

    def _pass(self, low_us: int, high_us: int) -> int:
        self._now_ns += self._chance.randint(low_us * 1000, high_us * 1000)
        return self._now_ns

    def _phase(self, phase: Phase, low_us: int, high_us: int) -> int:
        begin_ns = self._pass(0, 2)
        end_ns = self._pass(low_us, high_us)
        self._phases += (phase, begin_ns, end_ns)
        return begin_ns

    def write_start(self) -> None:
        self._caller.write(ThreadStarted(ThreadName.CALLER, _CALLER_PID))
        self._core.write(ThreadStarted(ThreadName.CORE_LOOP, _CORE_PID))
        self._core.write(ThreadStarted(ThreadName.WORKER, _CORE_PID + 1), thread=1)
        for process, phase in (
            (self._caller, StartupPhase.SPAWN),
            (self._core, StartupPhase.LOAD_MODEL),
            (self._core, StartupPhase.READY),
        ):
            begin_ns = self._now_ns
            process.write(StartupRecord(phase, begin_ns, self._pass(100, 5000)))
            self.run.num_startups += 1

    def arrive(self, num_requests: int) -> None:
        for number in range(num_requests):
            begin_ns = self._now_ns
            timeline = RequestTimeline(
                request_id=f"request-{number}",
                request_num=number,
                arrival_ns=begin_ns,
                queued_ns=self._pass(20, 200),
                num_prompt_tokens=self._chance.randint(2, 150),
                preemptions=[],
            )
            self._caller.write(Spans((Phase.PROCESS_INPUTS, begin_ns, self._now_ns)))
            self._core.write(
                RequestArrived(number, timeline.request_id, begin_ns, timeline.num_prompt_tokens)
            )
            wanted = self._chance.randint(1, 12)
            self.waiting.append(_Request(timeline, wanted, timeline.num_prompt_tokens))
            self.run.timelines.append(timeline)

    def _schedule(self) -> tuple[StepRecord, list[_Request]]:
        # Like the engine, which stamps the step inside its first phase.
        begin_ns = self._phase(Phase.SCHEDULE, 5, 60) + 700
        self._num_steps += 1
        record = StepRecord(step=self._num_steps, begin_ns=begin_ns, end_ns=0)
        if len(self.running) > 2 and self._chance.random() < 0.1:
            self._preempt(record)
        budget = self._token_budget
        served: list[tuple[_Request, int]] = []
        for request in self.running:
            budget -= self._serve(request, budget, served)
        while self.waiting and not record.preempted:
            if len(self.running) >= self._max_num_seqs or not budget:
                record.admission_stop = (
                    AdmissionStop.TOKEN_BUDGET if not budget else AdmissionStop.MAX_NUM_SEQS
                )
                record.admission_stop_request_num = self.waiting[0].num
                break
            request = self.waiting.popleft()
            self._admit(request, record)
            budget -= self._serve(request, budget, served)
        self._fill(record, served, budget)
        return record, [request for request, _ in served]

    def _preempt(self, record: StepRecord) -> None:
        victim = self.running.pop()
        num_tokens = victim.timeline.num_prompt_tokens + victim.num_made
        lost = Preemption(victim.num, 1 + num_tokens // _BLOCK_TOKENS, num_tokens)
        record.preempted = (lost,)
        victim.num_to_compute = num_tokens
        victim.timeline.preemptions.append((record.begin_ns, 0))
        self.waiting.appendleft(victim)
        event = EventRecord(
            Event.PREEMPT, record.begin_ns, victim.timeline.request_id, lost.tokens_lost
        )
        self._core.write(event)
        self.run.num_events += 1

    def _admit(self, request: _Request, record: StepRecord) -> None:
        timeline = request.timeline
        self.running.append(request)
        hit_tokens = min(request.num_to_compute - 1, self._chance.choice((0, 0, _BLOCK_TOKENS)))
        hit_tokens -= hit_tokens % _BLOCK_TOKENS
        if timeline.preemptions:
            record.preempted_prefix_query_tokens += request.num_to_compute
            record.preempted_prefix_hit_tokens += hit_tokens
            timeline.preemptions[-1] = (timeline.preemptions[-1][0], record.begin_ns)
        else:
            record.prefix_query_tokens += request.num_to_compute
            record.prefix_hit_tokens += hit_tokens
            timeline.num_cached_tokens = hit_tokens
            timeline.first_scheduled_ns = record.begin_ns
        request.num_to_compute -= hit_tokens

    @staticmethod
    def _serve(request: _Request, budget: int, served: list[tuple[_Request, int]]) -> int:
        num_tokens = min(max(1, request.num_to_compute), budget)
        if num_tokens:
            served.append((request, num_tokens))
            request.num_to_compute = max(0, request.num_to_compute - num_tokens)
        return num_tokens

    def _fill(self, record: StepRecord, served: list[tuple[_Request, int]], budget: int) -> None:
        for request, num_tokens in served:
            record.scheduled += (request.num, num_tokens)
            if request.num_made:
                record.num_generation_requests += 1
                record.num_generation_tokens += num_tokens
            else:
                record.num_context_requests += 1
                record.num_context_tokens += num_tokens
        record.token_budget_left = budget
        record.num_running, record.num_waiting = len(self.running), len(self.waiting)
        record.waiting_by_reason = (len(self.waiting), 0)
        record.num_blocks_used = sum(
            1 + (one.timeline.num_prompt_tokens + one.num_made) // _BLOCK_TOKENS
            for one in self.running
        )
        record.num_blocks_cached_free = min(40, _NUM_BLOCKS - record.num_blocks_used)
        record.num_blocks_free = (
            _NUM_BLOCKS - record.num_blocks_used - record.num_blocks_cached_free
        )

    def _work(self, record: StepRecord) -> None:
        phases: list[int] = []
        begin_ns = self._now_ns
        for phase in (Phase.PREPARE, Phase.FORWARD, Phase.LOGITS, Phase.SAMPLE, Phase.READBACK):
            phase_begin_ns = self._pass(0, 3)
            phases += (phase, phase_begin_ns, self._pass(10, 400))
        worker_record = WorkerStepRecord(
            step=record.step,
            begin_ns=begin_ns,
            end_ns=self._pass(1, 2),
            num_context_requests=record.num_context_requests,
            num_context_tokens=record.num_context_tokens,
            num_generation_requests=record.num_generation_requests,
            num_generation_tokens=record.num_generation_tokens,
            phases=tuple(phases),
        )
        self._core.write(worker_record, thread=1)
        self.run.worker_steps.append(worker_record)

    def _update(self, record: StepRecord, served: list[_Request]) -> None:
        begin_ns = self._pass(0, 2)
        now_ns = self._pass(5, 50)
        for request in served:
            if request.num_to_compute or request not in self.running:
                continue
            timeline = request.timeline
            request.num_made += 1
            record.num_sampled_tokens += 1
            timeline.last_token_ns = now_ns
            timeline.num_generation_tokens = request.num_made
            if request.num_made == 1:
                timeline.first_token_ns = now_ns
                record.first_tokens += (request.num,)
            if request.num_made >= request.num_tokens_wanted:
                record.finished += (request.num,)
                self.running.remove(request)
        record.end_ns = now_ns
        self._phases += (Phase.UPDATE, begin_ns, self._pass(1, 3))
        record.phases = tuple(self._phases)
        self._phases = []
        self._core.write(record)
        self.run.steps.append(record)
        self._phase(Phase.PUBLISH, 2, 20)
        self._deliver(record)

    def _deliver(self, record: StepRecord) -> None:
        begin_ns = self._now_ns
        delivered_ns = self._now_ns + self._chance.randint(5_000, 90_000)
        self._caller.write(Spans((Phase.PROCESS_OUTPUTS, begin_ns, delivered_ns)))
        for number in record.finished:
            timeline = self.run.timelines[number]
            timeline.delivered_ns = delivered_ns
            timeline.finish_reason = "length"
            self._caller.write(timeline)

    def step_sync(self) -> None:
        record, served = self._schedule()
        begin_ns = self._pass(0, 1)
        self._work(record)
        self._phases += (Phase.EXECUTE, begin_ns, self._pass(1, 2))
        self._update(record, served)

    def step_async(self) -> None:
        ahead = self._schedule()
        self._phase(Phase.EXECUTE, 2, 9)
        if self._in_flight is not None:
            self._land()
        self._in_flight = ahead

    def _land(self) -> None:
        assert self._in_flight is not None
        record, served = self._in_flight
        begin_ns = self._pass(0, 1)
        self._work(record)
        self._phases += (Phase.WAIT, begin_ns, self._pass(1, 2))
        self._update(record, served)
        self._in_flight = None

    def finish_async(self) -> None:
        while self._in_flight is not None or self.running:
            if self._in_flight is not None:
                self._land()
            elif self.running:
                self.step_async()

    def end(self, *, is_killed: bool) -> None:
        for process in (self._caller, self._core):
            if not is_killed:
                process.write(ClockAnchor(self._now_ns, self._now_ns + 10**18, self._now_ns))
            process.close()
        if is_killed:
            path = self._core.path
            path.write_bytes(path.read_bytes() + b"\x40\x00\x00\x00\x00\x00cut")
