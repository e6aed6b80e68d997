"""The flight recorder: what it keeps, when it writes, and what its file shows."""

import io
import os
import stat
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from instrumentation import (
    Admission,
    AdmissionStop,
    Event,
    FlightReason,
    ObservabilityConfig,
    Phase,
    Preemption,
    PrefixMiss,
    Role,
    StepRecord,
    WorkerStepRecord,
)
from instrumentation.explain.step_budget import step_budgets
from instrumentation.record.flight import FlightRecorder, SlowStepWatch
from instrumentation.record.journal import read_journal
from instrumentation.record.records import ClockAnchor, FlightDump, ProcessHeader
from instrumentation.setup import setup
from tests.support.synthetic_run import write_synthetic_run
from tests.waiting import wait_until
from traces.flight import read_flight, render_flight
from traces.journal_reader import read_run
from traces.perfetto import write_perfetto
from traces.summary import summarize

MS = 1_000_000


def worker_step(step: int, duration_ms: float, **counts: int) -> WorkerStepRecord:
    counts = counts or {"num_generation_requests": 1, "num_generation_tokens": 1}
    begin_ns = step * 1000 * MS
    return WorkerStepRecord(
        step=step, begin_ns=begin_ns, end_ns=begin_ns + round(duration_ms * MS), **counts
    )


def core_step(step: int, **fields: object) -> StepRecord:
    begin_ns = step * 1000 * MS
    return StepRecord(step=step, begin_ns=begin_ns, end_ns=begin_ns + 9 * MS, **fields)


def steps_of(path: Path | str) -> list[int]:
    return [one.step for one in read_run(path).steps]


def shown(path: Path | str, num_last: int = 20) -> str:
    console = Console(width=120, file=io.StringIO())
    console.print(render_flight(read_flight(path), num_last=num_last))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# What is kept.


def test_only_the_last_steps_are_kept_and_the_file_says_why_last(tmp_path: Path) -> None:
    recorder = FlightRecorder(8, role=Role.CORE, folder=str(tmp_path))
    for step in range(1, 30):
        recorder.steps.append(core_step(step))
        recorder.worker_steps.append(worker_step(step, 5))
    path = recorder.dump(FlightReason.CRASH, "it broke", step=29)
    assert path.name == f"flight-crash-core-{os.getpid()}-0.journal"
    assert steps_of(path) == list(range(22, 30))
    assert [one.step for one in read_run(path).worker_steps] == list(range(22, 30))
    frames = read_journal(path).frames
    assert isinstance(frames[0][1], ProcessHeader)
    assert isinstance(frames[1][1], ClockAnchor)
    dump = frames[-1][1]
    assert isinstance(dump, FlightDump)
    assert (dump.reason, dump.detail, dump.step) == (FlightReason.CRASH, "it broke", 29)
    second = recorder.dump(FlightReason.CRASH)
    assert second.name.endswith("-1.journal")


def test_everything_is_bounded(tmp_path: Path) -> None:
    obs = setup(
        ObservabilityConfig(flight_recorder_steps=4, flight_dir=str(tmp_path)), role=Role.CORE
    )
    for step in range(1000):
        obs.event(Event.ABORT, str(step))
        obs.request_arrived(step, str(step), arrival_ns=1, num_prompt_tokens=1)
        obs.step(core_step(step))
        obs.worker_step(worker_step(step, 1))
    path = obs.dump_flight(FlightReason.API)
    obs.close()
    assert path is not None
    run = read_run(path)
    assert len(run.steps) == len(run.worker_steps) == 4
    assert len(run.events) == len(run.arrivals) == 16
    assert run.events[-1].request_id == "999"
    assert obs.num_drops() == 0, "nothing was recorded, so nothing was dropped"


def test_without_a_recorder_there_is_no_file(tmp_path: Path) -> None:
    config = ObservabilityConfig(flight_recorder_steps=0, flight_dir=str(tmp_path))
    obs = setup(config, role=Role.CORE)
    obs.step(core_step(1))
    assert obs.dump_flight(FlightReason.API) is None
    obs.close()
    assert list(tmp_path.iterdir()) == []


def test_the_caller_keeps_copies_that_outlive_the_core(tmp_path: Path) -> None:
    obs = setup(ObservabilityConfig(flight_dir=str(tmp_path)), role=Role.CALLER)
    assert obs.dump_flight(FlightReason.ENGINE_DEAD) is None, "nothing has happened yet"
    for step in range(1, 6):
        obs.received_step(core_step(step), worker_step(step, 5))
    obs.received_step(None, None)
    path = obs.dump_flight(FlightReason.ENGINE_DEAD, "killed by signal 9")
    obs.close()
    assert path is not None
    assert Path(path).name.startswith("flight-engine_dead-caller-")
    assert steps_of(path) == [1, 2, 3, 4, 5]
    assert "engine_dead - killed by signal 9" in shown(path)


def test_appending_while_a_record_is_written_loses_nothing_before_it(tmp_path: Path) -> None:
    recorder = FlightRecorder(64, role=Role.CORE, folder=str(tmp_path))
    is_done = threading.Event()

    def work() -> None:
        step = 0
        while not is_done.is_set():
            step += 1
            recorder.steps.append(core_step(step))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while not recorder.steps:
            time.sleep(0.001)
        for _ in range(20):
            steps = steps_of(recorder.dump(FlightReason.API))
            assert steps == list(range(steps[0], steps[0] + len(steps)))
    finally:
        is_done.set()
        thread.join()


# Where it goes.


def test_the_temporary_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    recorder = FlightRecorder(4, role=Role.CORE)
    path = recorder.dump(FlightReason.API)
    assert path.parent == tmp_path / "isinglass-flight"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.parent.chmod(0o755)
    other = recorder.dump(FlightReason.API)
    assert other.parent != path.parent, "others could read there"
    assert stat.S_IMODE(other.parent.stat().st_mode) == 0o700


def test_the_run_folder_is_used_while_recording(tmp_path: Path) -> None:
    obs = setup(ObservabilityConfig(), role=Role.CORE, run_dir=str(tmp_path / "run"))
    obs.step(core_step(1))
    path = obs.dump_flight(FlightReason.API)
    obs.close()
    assert path is not None
    assert Path(path).parent == tmp_path / "run"
    run = read_run(tmp_path / "run")
    assert len(run.processes) == 1, "the flight record repeats what the journal holds"
    assert [event.kind for event in run.events] == [Event.FLIGHT_RECORD]


def test_a_folder_that_cannot_be_written_is_counted_not_raised(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    obs = setup(ObservabilityConfig(flight_dir=str(blocked)), role=Role.CORE)
    record = core_step(2)
    obs.step(core_step(1))
    assert obs.dump_flight(FlightReason.API) is None
    obs.step(record)
    assert obs.telemetry_errors() == {"flight_recorder": 1}
    assert record.telemetry_errors == (1, 1)
    obs.close()


# Slow steps and signals.


@pytest.mark.parametrize("factor", [None, 3.0])
def test_slow_steps_are_found_by_threshold_and_by_median(factor: float | None) -> None:
    recorder = FlightRecorder(512, role=Role.CORE)
    dumps: list[tuple[FlightReason, str, int]] = []
    clock = [0]
    watch = SlowStepWatch(
        recorder,
        lambda reason, why, step: dumps.append((reason, why, step)),
        slow_s=None if factor else 0.050,
        factor=factor,
        clock=lambda: clock[0],
    )
    for step in range(1, 41):
        recorder.worker_steps.append(worker_step(step, 10 + step % 3))
        # Prompts take longer; they are a kind of their own.
        recorder.worker_steps.append(
            worker_step(1000 + step, 45, num_context_requests=1, num_context_tokens=9)
        )
    recorder.worker_steps = type(recorder.worker_steps)(
        sorted(recorder.worker_steps, key=lambda one: one.step), maxlen=512
    )
    watch()
    assert dumps == []
    recorder.worker_steps.append(worker_step(2000, 60))
    watch()
    [(reason, why, step)] = dumps
    assert (reason, step) == (FlightReason.SLOW_STEP, 2000)
    assert "60.0 ms" in why
    recorder.worker_steps.append(worker_step(2001, 70))
    watch()
    assert len(dumps) == 1, "at most one a minute"
    clock[0] += 61 * 1000 * MS
    recorder.worker_steps.append(worker_step(2002, 80))
    watch()
    assert [step for _, _, step in dumps] == [2000, 2002]


def wait_for_file(folder: Path, pattern: str) -> Path:
    def is_whole(path: Path) -> bool:
        frames = read_journal(path).frames
        return bool(frames) and isinstance(frames[-1][1], FlightDump)

    wait_until(lambda: any(map(is_whole, folder.glob(pattern))), f"no {pattern} in {folder}")
    return next(filter(is_whole, folder.glob(pattern)))


def test_the_drain_thread_writes_what_a_signal_or_a_slow_step_asks_for(tmp_path: Path) -> None:
    obs = setup(
        ObservabilityConfig(flight_dir=str(tmp_path), flight_slow_step_s=0.02), role=Role.CORE
    )
    obs.worker_step(worker_step(1, 5))
    obs.step(core_step(1))
    obs.ask_for_flight(FlightReason.SIGNAL)
    wait_for_file(tmp_path, "flight-signal-core-*")
    obs.worker_step(worker_step(2, 25))
    path = wait_for_file(tmp_path, "flight-slow_step-core-*")
    record = read_flight(path)
    assert record.dump is not None
    assert record.dump.step == 2
    obs.close()


# What is shown.


def test_show_tells_every_decision(tmp_path: Path) -> None:
    obs = setup(ObservabilityConfig(flight_dir=str(tmp_path)), role=Role.CORE)
    for num, name in ((3, "alpha"), (4, "beta"), (5, "gamma")):
        obs.request_arrived(num, name, arrival_ns=1, num_prompt_tokens=4)
    obs.step(core_step(1))
    obs.step(
        core_step(
            2,
            num_generation_requests=1,
            num_generation_tokens=1,
            preempted=(Preemption(3, 7, 99, 4),),
            admissions=(
                Admission(4, 40, 32, False, PrefixMiss.EVICTED, 5 * MS),
                Admission(5, 9, 0, True, PrefixMiss.NEVER_CACHED),
            ),
            admission_stop=AdmissionStop.KV_BLOCKS,
            admission_stop_request_num=5,
            num_running=2,
            num_waiting=11,
            num_blocks_used=60,
            num_blocks_free=4,
            finished=(5,),
        )
    )
    obs.worker_step(worker_step(2, 3.25))
    obs.event(Event.STEP_FAILED, detail="ZeroDivisionError: boom")
    path = obs.dump_flight(FlightReason.CRASH, "ZeroDivisionError: boom")
    obs.close()
    assert path is not None
    text = shown(path)
    for part in (
        *("why: crash - ZeroDivisionError: boom", "execute_context_0(0)_generation_1(1)"),
        *("preempted alpha for request beta: 99 tokens, 7 blocks lost", "3.250", "of 64 KV blocks"),
        "admitted beta: 32 of 40 tokens cached (evicted 5.0 ms ago)",
        "resumed gamma: 0 of 9 tokens cached (never_cached)",
        *("stopped admitting at gamma: kv_blocks", "finished gamma", "step_failed"),
    ):
        assert part in text, part
    assert "The last 1 of 2 steps" in shown(path, 1)


def test_every_trace_command_reads_a_flight_record(tmp_path: Path) -> None:
    recorder = FlightRecorder(50, role=Role.CORE, folder=str(tmp_path))
    synthetic = write_synthetic_run(tmp_path / "run")
    recorder.steps.extend(synthetic.steps)
    recorder.worker_steps.extend(synthetic.worker_steps)
    path = recorder.dump(FlightReason.SLOW_STEP, step=synthetic.steps[-1].step)
    assert summarize(path).num_steps == min(50, len(synthetic.steps))
    trace = write_perfetto(path)
    assert trace == path.with_suffix(".pftrace")
    assert trace.stat().st_size > 1000
    with pytest.raises(ValueError, match="name a flight record"):
        read_flight(tmp_path)


def test_a_cut_off_record_still_shows(tmp_path: Path) -> None:
    recorder = FlightRecorder(50, role=Role.CORE, folder=str(tmp_path))
    recorder.steps.extend(core_step(step) for step in range(1, 9))
    path = recorder.dump(FlightReason.API)
    path.write_bytes(path.read_bytes()[:-20])
    assert "cut off" in shown(path)


# The step-time budget.


def test_a_budget_adds_up_and_counts_each_instant_once() -> None:
    step = StepRecord(
        step=1,
        begin_ns=100,
        end_ns=1000,
        phases=(
            *(Phase.INTAKE, 50, 90, Phase.SCHEDULE, 100, 150, Phase.EXECUTE, 150, 160),
            *(Phase.WAIT, 160, 900, Phase.UPDATE, 910, 1000),
        ),
    )
    worker = WorkerStepRecord(
        step=1, begin_ns=170, end_ns=890, phases=(Phase.PREPARE, 170, 200, Phase.FORWARD, 210, 880)
    )
    [budget] = step_budgets([step], [worker])
    assert budget.phases_ns == {
        Phase.PREPARE: 30,
        Phase.FORWARD: 670,
        Phase.SCHEDULE: 50,
        Phase.EXECUTE: 10,
        Phase.WAIT: 740 - 700,
        Phase.UPDATE: 90,
    }
    assert budget.unexplained_ns == 10
    assert sum(budget.phases_ns.values()) + budget.unexplained_ns == budget.duration_ns == 900
    assert budget.slowest == "forward"


@pytest.mark.parametrize("is_async", [False, True])
def test_budgets_of_a_run_add_up_to_its_steps(tmp_path: Path, is_async: bool) -> None:
    run = write_synthetic_run(tmp_path / "run", is_async=is_async)
    budgets = step_budgets(run.steps, run.worker_steps)
    assert len(budgets) == len(run.steps)
    summed = summarize(run.folder).budget
    assert summed.duration_ns == sum(budget.duration_ns for budget in budgets)
    assert sum(summed.phases_ns.values()) + summed.unexplained_ns == summed.duration_ns
    for budget in budgets:
        assert all(time_ns > 0 for time_ns in budget.phases_ns.values())
        assert budget.unexplained_ns >= 0
        assert sum(budget.phases_ns.values()) + budget.unexplained_ns == budget.duration_ns
