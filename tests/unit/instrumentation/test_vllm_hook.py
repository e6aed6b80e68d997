"""The vllm hook, on fakes of vLLM's classes."""

import itertools
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from instrumentation import Event, FlightReason, format_step_label
from instrumentation.hooks.vllm_engine import install
from instrumentation.names import Phase
from tests.support.hooked_vllm import close_and_read, hooked_core, request, run_until_done
from tests.waiting import PATIENCE_S, wait_until
from traces.flight import FlightRecord, read_flight


def test_steps_of_vllm_are_recorded_with_their_labels(hooks_dir: Path) -> None:
    core = hooked_core()
    for number, prompt in enumerate((5, 11)):
        core.scheduler.add_request(request(number, prompt=prompt, output=3))
    plans = run_until_done(core)
    assert core.shutdown() == "shut down"
    run = close_and_read(hooks_dir)
    labels = [format_step_label(step.label) for step in run.steps]
    assert labels == [
        "execute_context_2(8)_generation_0(0)",  # 5 and 3 of 11
        "execute_context_1(7)_generation_1(1)",  # the next 7 of 11
        "execute_context_1(1)_generation_1(1)",  # its last one
        "execute_context_0(0)_generation_1(1)",
        "execute_context_0(0)_generation_1(1)",
    ]
    assert [step.label for step in run.worker_steps] == [step.label for step in run.steps]
    assert [sum(step.scheduled[1::2]) for step in run.steps] == [
        sum(plan.values()) for plan in plans
    ]
    assert [step.first_tokens for step in run.steps] == [(0,), (), (1,), (), ()]
    assert [step.finished for step in run.steps] == [(), (), (0,), (), (1,)]
    assert sum(step.num_sampled_tokens for step in run.steps) == 6
    assert all(sum(step.blocks_at_end) == 15 for step in run.steps)
    first = run.timelines[0]
    assert (first.request_id, first.finish_reason) == ("request-0", "length")
    assert (first.num_prompt_tokens, first.num_generation_tokens) == (5, 3)
    assert 0.1 <= first.intake_ns / 1e9 < PATIENCE_S
    assert first.queue_ns + first.prefill_ns + first.decode_ns + first.preempted_ns == first.e2e_ns
    assert [phase.phase.label for phase in run.startups] == [
        "load_model",
        "allocate_kv_cache",
        "build_scheduler",
    ]


def test_phases_of_core_and_worker_are_recorded_and_do_not_overlap(hooks_dir: Path) -> None:
    core = hooked_core()
    core.scheduler.add_request(request(0, prompt=4, output=2))
    run_until_done(core)
    run = close_and_read(hooks_dir)
    for _, thread in run.threads():
        spans = thread.phase_spans()
        assert all(one.end_ns <= two.begin_ns for one, two in itertools.pairwise(spans))
    phases = {span.phase for _, thread in run.threads() for span in thread.phase_spans()}
    assert phases >= {Phase.SCHEDULE, Phase.EXECUTE, Phase.WAIT, Phase.UPDATE}
    assert phases >= {Phase.PREPARE, Phase.FORWARD, Phase.LOGITS, Phase.SAMPLE}


def test_preemptions_of_vllm_are_recorded(hooks_dir: Path) -> None:
    core = hooked_core()
    for number in range(2):
        core.scheduler.add_request(request(number, prompt=3, output=4))
    core.step_fn()
    core.scheduler.preempt_next = True
    run_until_done(core)
    run = close_and_read(hooks_dir)
    (preemption,) = [one for step in run.steps for one in step.preempted]
    assert (preemption.request_num, preemption.blocks_lost, preemption.tokens_lost) == (1, 1, 3)
    # It has a first output token, so computing its prompt again counts as generation.
    assert run.steps[2].label == (0, 0, 2, 5)
    assert run.steps[2].preempted_prefix_query_tokens == 4
    timeline = {one.request_num: one for one in run.timelines}[1]
    ((preempted_ns, resumed_ns),) = timeline.preemptions
    assert preempted_ns < resumed_ns
    assert timeline.preempted_ns == resumed_ns - preempted_ns
    assert [event.value for event in run.events if event.kind is Event.PREEMPT] == [3]


def test_requests_of_vllm_that_are_aborted_end_once(hooks_dir: Path) -> None:
    core = hooked_core()
    for number in range(2):
        core.scheduler.add_request(request(number, prompt=3, output=4))
    core.step_fn()
    assert len(core.scheduler.finish_requests(["request-0", "nobody"], "abort")) == 1
    run_until_done(core)
    run = close_and_read(hooks_dir)
    reasons = {one.request_id: one.finish_reason for one in run.timelines}
    assert reasons == {"request-0": "abort", "request-1": "length"}
    assert [event.value for event in run.events if event.kind is Event.ABORT] == [1]


def test_blocks_of_vllm_are_counted_as_they_are(hooks_dir: Path) -> None:
    core = hooked_core(num_blocks=4)
    pool = core.scheduler.pool
    for number in range(7):
        core.scheduler.add_request(request(number, prompt=3, output=2))
    while core.scheduler.requests:
        core.scheduler.max_num_running_reqs = 3
        core.step_fn()
    run = close_and_read(hooks_dir)
    cached_free = sum(block.block_hash is not None for block in pool.free)
    assert run.steps[-1].blocks_at_end == (0, cached_free, 3 - cached_free)
    assert sum(step.num_evicted_blocks for step in run.steps) == 4
    assert run.steps[0].admission_stop.label == "token_budget"


def test_a_step_of_vllm_that_fails_is_told_and_dumped(hooks_dir: Path) -> None:
    core = hooked_core()
    core.scheduler.add_request(request(0, prompt=3, output=4))
    core.step_fn()
    core.model_executor.worker.fails_at = "execute_model"
    with pytest.raises(RuntimeError, match="the device is lost"):
        core.step_fn()
    run = close_and_read(hooks_dir)
    (event,) = [event for event in run.events if event.kind is Event.STEP_FAILED]
    assert event.detail == "RuntimeError: the device is lost"
    assert list(hooks_dir.glob("flight-*"))


def test_a_signal_asks_for_a_flight_record(
    hooks_dir: Path,
) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    core = hooked_core()
    core.scheduler.add_request(request(0, prompt=3, output=2))
    core.step_fn()
    signal.raise_signal(signal.SIGUSR2)
    wait_until(lambda: list(hooks_dir.glob("flight-*")))


def test_errors_of_the_hook_do_not_reach_vllm(
    hooks_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = hooked_core()
    monkeypatch.setattr(
        "instrumentation.hooks.vllm_requests.RequestBook.plan", lambda *args, **kwargs: 1 / 0
    )
    core.scheduler.add_request(request(0, prompt=3, output=4))
    assert len(run_until_done(core)) == 4
    assert capsys.readouterr().err.count("ZeroDivisionError") == 1


def test_another_vllm_is_refused_by_name(hooks_dir: Path) -> None:
    module = ModuleType("vllm.v1.worker.gpu_worker")
    module.Worker = type("Worker", (), {})
    with pytest.raises(AttributeError, match=r"0\.32"):
        install(module)


# Steps that fail.


def crash(core: Any, hooks_dir: Path) -> FlightRecord:
    """Make the step that fails, and read the record that it leaves."""
    with pytest.raises(RuntimeError, match="the device is lost"):
        core.step_fn()
    (file,) = hooks_dir.glob("flight-crash-*")
    return read_flight(file)


def reason_of(record: FlightRecord) -> int:
    """The step that a record of a crash names."""
    assert record.dump is not None
    assert record.dump.reason is FlightReason.CRASH
    return record.dump.step


@pytest.mark.parametrize(
    ("part", "method", "phase"),
    [
        ("worker", "execute_model", Phase.EXECUTE),
        ("worker", "sample_tokens", Phase.EXECUTE),
        ("scheduler", "update_from_output", Phase.UPDATE),
    ],
)
def test_a_step_of_vllm_that_fails_is_in_its_flight_record(
    hooks_dir: Path, part: str, method: str, phase: Phase
) -> None:
    core = hooked_core()
    core.scheduler.add_request(request(0, prompt=3, output=4))
    core.step_fn()
    owner = core.scheduler if part == "scheduler" else core.model_executor.worker
    owner.fails_at = method
    record = crash(core, hooks_dir)
    assert [step.step for step in record.steps] == [0, 1]
    assert reason_of(record) == 1
    failed = record.steps[1]
    assert failed.num_sampled_tokens == 0
    assert failed.begin_ns < failed.end_ns
    assert {Phase.SCHEDULE, phase} <= set(failed.phases[::3])
    run = close_and_read(hooks_dir)
    assert [step.step for step in run.steps] == [0, 1]
    assert [step.step for step in run.worker_steps] == [0, 1], "the worker's part of it, too"


def test_a_plan_of_vllm_that_fails_is_no_step(hooks_dir: Path) -> None:
    core = hooked_core()
    core.scheduler.add_request(request(0, prompt=3, output=4))
    core.step_fn()
    core.scheduler.fails_at = "schedule"
    record = crash(core, hooks_dir)
    assert [step.step for step in record.steps] == [0]
    assert reason_of(record) == -1


@pytest.mark.parametrize(("is_handed_over", "reason"), [(True, 1), (False, 2)])
def test_of_two_steps_of_vllm_the_one_that_failed_is_the_reason(
    hooks_dir: Path, is_handed_over: bool, reason: int
) -> None:
    core = hooked_core(overlaps=True)
    core.scheduler.add_request(request(0, prompt=23, output=4))
    for _ in range(2):
        core.step_fn()
    if is_handed_over:
        core.fails_at_result = True
    else:
        core.model_executor.worker.fails_at = "execute_model"
    record = crash(core, hooks_dir)
    assert [step.step for step in record.steps] == [0, 1, 2]
    assert reason_of(record) == reason
