"""Structured outputs between scheduler and executor: who waits, and which mask meets which step."""

import ctypes
import dataclasses
import math
import random
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core.engine_core import EngineCore
from engine.core.request import Request, RequestStatus
from engine.core.request_queue import RequestQueue, make_request_queue
from engine.frontend.observer import EngineObserver
from engine.frontend.output_processor import ProcessedOutputs
from engine.structured.compiler import Compiled, ConstraintCompiler
from engine.structured.constraint import ConstraintKey
from engine.structured.manager import StructuredOutputManager
from engine.structured.matching import bits_of
from engine.types.messages import CoreTimes, EngineCoreOutputs, EngineCoreRequest, ErrorKind
from engine.types.plan import GrammarOutput, ModelRunnerOutput
from engine.types.sampling import SamplingParams
from instrumentation import (
    AdmissionStop,
    ConsoleStatus,
    Counter,
    GrammarOutcome,
    Metrics,
    Phase,
    StepRecord,
    WaitingReason,
)
from instrumentation.testing import Recorder
from tests.fakes import (
    EOS,
    VOCAB_SIZE,
    FakeExecutor,
    LazyFakeExecutor,
    make_request,
    message,
    reference_output,
    sampling_params,
    write_model_folder,
)
from tests.support.cores import MAX_MODEL_LEN, make_core

SPARE = VOCAB_SIZE - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


class OneWay:
    """A matcher of one sequence of tokens, with an end token behind it."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.position = 0
        self.ended = False

    def consume_token(self, token_id: int) -> bool:
        if self.position == len(self.token_ids):
            self.ended = token_id == EOS
            return self.ended
        accepted = token_id == self.token_ids[self.position]
        self.position += accepted
        return accepted

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        mask = bits_of(self.token_ids[self.position :][:1] or [EOS], VOCAB_SIZE)
        ctypes.memmove(address, mask.ctypes.data, num_bytes)

    def compute_ff_bytes(self) -> bytes:
        return b"x" * (len(self.token_ids) - self.position)

    def is_error(self) -> bool:
        return False

    def deep_copy(self) -> "OneWay":
        return OneWay(self.token_ids)

    def is_accepting(self) -> bool:
        return self.position == len(self.token_ids)

    def is_stopped(self) -> bool:
        return self.ended


class SlowCompiler(ConstraintCompiler):
    """Answers each question when it has been asked for results a few times."""

    def __init__(self, delay: int) -> None:
        super().__init__(lambda: None, timeout_s=1.0)  # type: ignore[arg-type,return-value]
        self.delay = delay
        self.pending: dict[ConstraintKey, int] = {}
        self.num_waits = 0
        self.is_warm = False
        self.shortest_wait_s = math.inf

    def submit(self, key: ConstraintKey) -> None:
        self.pending[key] = self.delay

    def warm_up(self) -> None:
        self.is_warm = True

    def withdraw(self, key: ConstraintKey) -> None:
        self.pending.pop(key, None)

    def take(self) -> list[Compiled]:
        self.pending = {key: left - 1 for key, left in self.pending.items()}
        ready = [key for key, left in self.pending.items() if left < 0]
        for key in ready:
            del self.pending[key]
        return [
            Compiled(key, GrammarOutcome.INVALID, error="it is bad")
            if key[1] == "bad"
            else Compiled(key, GrammarOutcome.COMPILED, OneWay([int(n) for n in key[1].split()]))
            for key in ready
        ]

    def wait(self, timeout_s: float) -> None:
        self.num_waits += 1
        self.shortest_wait_s = min(self.shortest_wait_s, timeout_s)


class _Checked(LazyFakeExecutor):
    """Holds each step's mask against the tokens that the step then samples."""

    lazy = True
    num_rows = 0

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        plan = self.plans[-1]
        future = super().sample_tokens(grammar_output)
        run = future._run  # type: ignore[attr-defined]

        def check() -> ModelRunnerOutput:
            result = run()
            by_request = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
            bound = set() if grammar_output is None else set(grammar_output.req_ids)
            assert bound <= set(plan.structured_output_request_ids)
            for row, request_id in enumerate(grammar_output.req_ids if grammar_output else ()):
                (token_id,) = by_request[request_id]
                np.testing.assert_array_equal(
                    grammar_output.bitmask[row],  # type: ignore[union-attr]
                    bits_of([token_id], VOCAB_SIZE),
                    err_msg=f"{request_id} in step {plan.step}: a mask of another position",
                )
                self.num_rows += 1
            return result

        future._run = check  # type: ignore[attr-defined]
        return future


class CheckedLate(_Checked):
    """As late as may be."""


class CheckedAtOnce(_Checked):
    """Runs each step when it is handed over."""

    lazy = False

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        self.lazy = True
        future = super().sample_tokens(grammar_output)
        self.lazy = False
        future.result()
        return future


def structured_core(
    model: Path, *, delay: int = 0, executor: type[FakeExecutor] = CheckedLate, **settings: Any
) -> tuple[EngineCore, SlowCompiler]:
    core = make_core(model, executor=executor, **settings)
    compiler = SlowCompiler(delay)
    core.structured_outputs = StructuredOutputManager(
        compiler,
        vocab_size=VOCAB_SIZE,
        end_token_ids=[EOS],
        cache_bytes=0,
        obs=core.obs,
    )
    return core, compiler


def constrained(
    num: int, prompt: list[int], params: SamplingParams, *, priority: int = 0
) -> tuple[EngineCoreRequest, list[int], str]:
    """A request whose grammar allows what the model would say anyway; its tokens and reason."""
    output, reason = reference_output(prompt, params, MAX_MODEL_LEN)
    if reason == "stop":
        script = output[:-1]
        output = script or output  # over before the end token, unless that is all
    else:
        script = [*output, SPARE]
    regex = " ".join(map(str, script)) or " "
    own = params.clone(structured_outputs={"regex": regex})
    own = own.update_from_model(() if params.ignore_eos else (EOS,))
    return message(f"r{num}", prompt, num=num, params=own, priority=priority), output, reason


def mixed_load(seed: int, num_requests: int) -> Iterator[tuple[EngineCoreRequest, list[int], str]]:
    rng = random.Random(seed)
    for num in range(num_requests):
        prompt = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randrange(1, 22))]
        params = sampling_params(max_tokens=rng.choice((1, 3, 9, 15)))
        if rng.random() < 0.6:
            yield constrained(num, prompt, params, priority=rng.randrange(3))
        else:
            output, reason = reference_output(prompt, params, MAX_MODEL_LEN)
            yield message(f"r{num}", prompt, num=num, params=params), output, reason


def take(
    packages: dict[int, EngineCoreOutputs], tokens: dict[str, list[int]], reasons: dict[str, str]
) -> list[StepRecord]:
    for package in packages.values():
        for output in package.outputs:
            assert output.request_id not in reasons, "an output after the last one"
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            assert output.error is None
            if output.finished:
                reasons[output.request_id] = str(output.finish_reason)
    return [package.step for package in packages.values() if package.step is not None]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_gpu_blocks_override": 12},
    {"num_gpu_blocks_override": 12, "enable_prefix_caching": False},
    {"max_num_batched_tokens": 7},
    {"max_num_batched_tokens": 48, "enable_chunked_prefill": False},
    {"scheduling_policy": "priority", "num_gpu_blocks_override": 12},
]


@pytest.mark.parametrize("executor", [CheckedLate, CheckedAtOnce])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_mask_belongs_to_the_token_that_its_step_samples(
    model: Path, variant: dict[str, Any], async_scheduling: bool, executor: type[FakeExecutor]
) -> None:
    for seed in range(4):
        load = list(mixed_load(seed, 12))
        core, _ = structured_core(
            model, delay=seed, executor=executor, async_scheduling=async_scheduling, **variant
        )
        tokens: dict[str, list[int]] = {}
        reasons: dict[str, str] = {}
        records: list[StepRecord] = []
        for index, (request, _, _) in enumerate(load):
            core.add_request(core.prepare_request(request))
            if index > 5:
                records += take(core.step(), tokens, reasons)
        for _ in range(2_000):
            if not core.has_work():
                break
            records += take(core.step(), tokens, reasons)
            core.check_integrity()
        assert tokens == {request.request_id: output for request, output, _ in load}
        assert reasons == {request.request_id: reason for request, _, reason in load}
        assert isinstance(core.executor, _Checked)
        assert core.executor.num_rows > 10
        assert sum(record.num_structured for record in records) == core.executor.num_rows
        for record in records:
            assert sum(record.waiting_by_reason) == record.num_waiting
        if variant.get("num_gpu_blocks_override") and not variant.get("scheduling_policy"):
            assert sum(record.num_preempted for record in records) or seed != 0


def test_steps_without_grammars_are_handed_over_as_they_always_were(model: Path) -> None:
    core, _ = structured_core(model, executor=LazyFakeExecutor)
    core.add_request(core.prepare_request(message("r", [1, 2, 3], ignore_eos=True, max_tokens=5)))
    executor = core.executor
    assert isinstance(executor, FakeExecutor)
    while core.has_work():
        core.step()
        assert len(executor.grammar_outputs) == len(executor.plans), "sampling was held back"
    assert set(executor.grammar_outputs) == {None}


def test_a_request_without_its_grammar_lets_others_pass_and_then_takes_its_turn(
    model: Path,
) -> None:
    recorder = Recorder()
    core, compiler = structured_core(model, delay=6, max_num_seqs=1, obs=recorder)
    params = sampling_params(max_tokens=4, ignore_eos=True)
    first, expected, _ = constrained(0, [1, 2, 3], params)
    core.add_request(core.prepare_request(first))
    for num in range(1, 5):
        core.add_request(core.prepare_request(message(f"r{num}", [num], num=num, params=params)))
    ended: list[str] = []
    times: dict[str, CoreTimes] = {}
    tokens: dict[str, list[int]] = {}
    for _ in range(200):
        if not core.has_work():
            break
        for package in core.step().values():
            for output in package.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finished:
                    ended.append(output.request_id)
                    times[output.request_id] = output.times
    assert ended[0] == "r1", "who came later was held up"
    assert ended.index("r0") < 4, "it lost its turn to those that came after it"
    assert tokens["r0"] == expected
    by_reason = [record.waiting_by_reason[WaitingReason.GRAMMAR] for record in recorder.steps]
    assert by_reason[0] == 1
    assert by_reason[-1] == 0
    assert times["r0"].queued_ns < times["r0"].grammar_ready_ns < times["r0"].first_scheduled_ns
    assert times["r1"].grammar_ready_ns == 0, "it did not wait for any"
    assert recorder.steps[0].num_waiting_deferred_tokens == 3
    assert recorder.steps[0].admission_stop is AdmissionStop.MAX_NUM_SEQS
    assert Phase.GRAMMAR_BITMASK in recorder.phases_seen
    assert compiler.num_waits == 0, "there was something to do all the time"


def test_alone_it_waits_without_spinning(model: Path) -> None:
    core, compiler = structured_core(model, delay=5)
    request, expected, _ = constrained(0, [1, 2], sampling_params(max_tokens=2))
    core.add_request(core.prepare_request(request))
    tokens: dict[str, list[int]] = {}
    while core.has_work():
        take(core.step(), tokens, {})
    assert tokens["r0"] == expected
    assert compiler.num_waits == 5
    assert compiler.shortest_wait_s >= 0.005, "an idle processor is woken too often"


def test_a_constraint_that_cannot_be_compiled_ends_its_own_request(model: Path) -> None:
    core, _ = structured_core(model, delay=2)
    params = sampling_params(max_tokens=6, ignore_eos=True)
    bad = params.clone(structured_outputs={"regex": "bad"})
    for num, own in enumerate((params, bad, bad)):
        core.add_request(core.prepare_request(message(f"r{num}", [1, 2], num=num, params=own)))
    outputs = []
    while core.has_work():
        outputs += [o for package in core.step().values() for o in package.outputs]
        core.check_integrity()
    for request_id in ("r1", "r2"):
        (last,) = [output for output in outputs if output.request_id == request_id]
        assert str(last.finish_reason) == "error"
        assert last.error_kind is ErrorKind.INPUT
        assert last.error == "structured_outputs.regex cannot be used: it is bad"
        assert last.times is not None
        assert 0 < last.times.queued_ns < last.times.grammar_ready_ns
    assert sum(len(output.new_token_ids) for output in outputs) == 6


def test_grammars_are_got_ready_for_where_there_can_be_any(model: Path) -> None:
    core, compiler = structured_core(model)
    for without_tokenizer in (True, False):
        own = dataclasses.replace(core.config.model, skip_tokenizer_init=without_tokenizer)
        core.config = dataclasses.replace(core.config, model=own)
        told = core.call_utility("warm_up_structured_outputs", [])
        assert told is compiler.is_warm is not without_tokenizer


@pytest.mark.parametrize("is_aborted", [False, True])
def test_what_becomes_of_a_grammar_is_told_without_a_step(model: Path, is_aborted: bool) -> None:
    core, _ = structured_core(model, delay=0)
    core.listeners.add(1)
    params = sampling_params(structured_outputs={"regex": "bad"})
    core.add_request(core.prepare_request(message("r", [1, 2], params=params)))
    if is_aborted:
        assert core.abort_requests(["r"])
        packages = core.idle_outputs()
    else:
        packages = core.step()
        assert [output.request_id for output in packages[0].outputs] == ["r"]
    assert not core.has_work()
    outcome = GrammarOutcome.WITHDRAWN if is_aborted else GrammarOutcome.INVALID
    for client, counts_steps in ((0, True), (1, True), (1, False)):
        metrics = Metrics()
        observer = EngineObserver(metrics, ConsoleStatus(), counts_steps=counts_steps)
        observer.observe(packages[client], ProcessedOutputs())
        name = "isinglass_structured_output_compiles_total"
        series = {one.labels["outcome"]: one for one in metrics.snapshot() if one.name == name}
        metric = series[outcome.label]
        assert isinstance(metric, Counter)
        assert metric.value == counts_steps, "of several frontends, one speaks for all"


def test_a_token_against_the_grammar_ends_the_request_and_is_not_delivered(model: Path) -> None:
    core, _ = structured_core(model, executor=LazyFakeExecutor)
    params = sampling_params(max_tokens=6, ignore_eos=True)
    output, _ = reference_output([1, 2], params, MAX_MODEL_LEN)
    wrong = (output[2] + 1) % VOCAB_SIZE
    own = params.clone(structured_outputs={"regex": f"{output[0]} {output[1]} {wrong} {SPARE}"})
    core.add_request(core.prepare_request(message("r", [1, 2], params=own)))
    outputs, records = [], []
    while core.has_work():
        for package in core.step().values():
            outputs += package.outputs
            records.append(package.step)
    assert [o.new_token_ids for o in outputs] == [[output[0]], [output[1]], []]
    assert outputs[-1].error_kind is ErrorKind.INPUT
    assert f"token {output[2]} was sampled" in str(outputs[-1].error)
    assert sum(record.num_sampled_tokens for record in records if record) == 2


@pytest.mark.parametrize("num_steps", range(8))
def test_aborts_in_every_state(model: Path, num_steps: int) -> None:
    core, compiler = structured_core(model, delay=2, num_gpu_blocks_override=12)
    params = sampling_params(max_tokens=20, ignore_eos=True)
    load = [constrained(num, [num + 1] * 9, params) for num in range(4)]
    for request, _, _ in load:
        core.add_request(core.prepare_request(request))
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    for _ in range(num_steps):
        take(core.step(), tokens, reasons)
    take(core.abort_requests(["r0", "r2"]), tokens, reasons)
    for _ in range(500):
        if not core.has_work():
            break
        take(core.step(), tokens, reasons)
    assert reasons == {"r0": "abort", "r1": "length", "r2": "abort", "r3": "length"}
    assert [tokens["r1"], tokens["r3"]] == [load[1][1], load[3][1]]
    assert not core.structured_outputs.has_pending
    assert not compiler.pending
    core.check_integrity()


# -- the queue -------------------------------------------------------------------------------------


def arrived(queue: RequestQueue, num: int, *, is_deferred: bool, priority: int = 0) -> Request:
    request = make_request(
        f"r{num}", [1] * (num % 5 + 1), num=num, arrival_ns=num, priority=priority
    )
    request.times.queued_ns = num + 1
    if is_deferred:
        request.status = RequestStatus.WAITING_FOR_GRAMMAR
        queue.defer(request)
    else:
        queue.add(request)
    return request


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(6))
def test_random_histories_with_deferred_requests_equal_a_sorted_list(
    policy: str, seed: int
) -> None:
    rng = random.Random(seed)
    queue = make_request_queue(policy)
    ready: list[Request] = []
    deferred: list[Request] = []
    out: list[Request] = []

    def key(one: Request) -> tuple[int, ...]:
        if policy == "priority":
            return (one.priority, one.num)
        return (one.status is not RequestStatus.PREEMPTED, one.num)

    for num in range(600):
        choice = rng.random()
        if choice < 0.45:
            is_deferred = rng.random() < 0.5
            one = arrived(queue, num, is_deferred=is_deferred, priority=rng.randrange(4))
            (deferred if is_deferred else ready).append(one)
        elif choice < 0.6 and deferred:
            one = deferred.pop(rng.randrange(len(deferred)))
            one.status = RequestStatus.WAITING
            queue.release(one)
            ready.append(one)
        elif choice < 0.7 and ready + deferred:
            one = rng.choice(ready + deferred)
            (ready if one in ready else deferred).remove(one)
            queue.remove(one)
        elif choice < 0.95 and ready:
            out.append(queue.pop())
            assert out[-1] is min(ready, key=key)
            ready.remove(out[-1])
        elif out and not any(one.status is RequestStatus.PREEMPTED for one in ready):
            one = out.pop()
            out.clear()
            one.status = RequestStatus.PREEMPTED
            one.times.preemptions.append((num + 1, 0))
            queue.put_back(one)
            ready.append(one)
        assert queue.has_ready == bool(ready)
        assert queue.num_deferred == len(deferred)
        assert queue.num_deferred_tokens == sum(one.num_tokens for one in deferred)
        assert len(queue) == len(ready) + len(deferred)
        assert {one.num for one in queue} == {one.num for one in ready + deferred}
        assert queue.totals.num_tokens == sum(one.num_tokens for one in ready + deferred)
        if ready:
            assert queue.peek() is min(ready, key=key)


def test_removed_requests_do_not_pile_up_behind_one_that_was_deferred() -> None:
    queue = make_request_queue("fcfs")
    for num in range(5_000):
        one = arrived(queue, num, is_deferred=True)
        one.status = RequestStatus.WAITING
        queue.release(one)
        if num:
            queue.remove(one)
    assert len(queue) == 1
    assert len(queue._late) < 500  # type: ignore[attr-defined]
