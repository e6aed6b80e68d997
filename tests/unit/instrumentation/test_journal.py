"""The journal: what is written is read, up to wherever the file was cut off."""

import errno
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from instrumentation import (
    AdmissionStop,
    Event,
    GraphMode,
    Instrument,
    ObservabilityConfig,
    Preemption,
    RequestArrived,
    RequestTimeline,
    Role,
    StartupPhase,
    StepRecord,
    WorkerStepRecord,
)
from instrumentation.record.journal import MAGIC, JournalWriter, read_journal
from instrumentation.record.records import (
    ClockAnchor,
    Drops,
    EventRecord,
    ProcessHeader,
    Record,
    Spans,
    StartupRecord,
    ThreadStarted,
)
from instrumentation.setup import setup
from instrumentation.testing import FakeClock
from tests.waiting import wait_until
from traces.journal_reader import read_run


def some_records(seed: int) -> list[tuple[int, Record]]:
    """One record of each kind, with random numbers, on random threads."""
    chance = random.Random(seed)

    def number() -> int:
        return chance.randrange(2 ** chance.randint(1, 62))

    def numbers(count: int) -> tuple[int, ...]:
        return tuple(number() for _ in range(count))

    records: list[Record] = [
        ProcessHeader(
            role="core",
            rank=number(),
            pid=number(),
            host="h\N{LATIN SMALL LETTER O WITH DIAERESIS}st",
            version="1",
            python_version="3",
            argv=("a", ""),
            started_ns=number(),
        ),
        ClockAnchor(*numbers(3)),
        ThreadStarted("core loop", number()),
        StepRecord(
            step=number(),
            begin_ns=number(),
            end_ns=number(),
            admission_stop=chance.choice(list(AdmissionStop)),
            preempted=(Preemption(*numbers(3)), Preemption(*numbers(3))),
            scheduled=numbers(8),
            phases=numbers(9),
        ),
        WorkerStepRecord(
            step=number(), begin_ns=number(), end_ns=number(), graph_mode=GraphMode.FULL
        ),
        RequestArrived(number(), "request \N{SNOWMAN}", number(), number()),
        RequestTimeline(
            request_id="x", preemptions=[(number(), number()), (number(), 0)], stop_reason=number()
        ),
        RequestTimeline(request_id="y", stop_reason="</s>", error="it broke"),
        EventRecord(Event.ENGINE_DEAD, number(), detail="last words"),
        StartupRecord(StartupPhase.WARMUP, number(), number()),
        Spans(numbers(6)),
        Drops(number()),
    ]
    chance.shuffle(records)
    return [(chance.randrange(2**16), record) for record in records]


def write_all(path: Path, records: list[tuple[int, Record]]) -> None:
    writer = JournalWriter(path)
    for thread, record in records:
        writer.write(record, thread=thread)
    writer.close()


@pytest.mark.parametrize("seed", range(5))
def test_round_trip(tmp_path: Path, seed: int) -> None:
    records = some_records(seed)
    write_all(tmp_path / "a.journal", records)
    journal = read_journal(tmp_path / "a.journal")
    assert journal.frames == records
    assert not journal.is_truncated


def test_every_cut_leaves_the_whole_frames_before_it(tmp_path: Path) -> None:
    records = some_records(17)
    path = tmp_path / "a.journal"
    ends = [len(MAGIC)]
    for count in range(1, len(records) + 1):
        write_all(tmp_path / f"{count}.journal", records[:count])
        ends.append((tmp_path / f"{count}.journal").stat().st_size)
    data = (tmp_path / f"{len(records)}.journal").read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        journal = read_journal(path)
        num_whole = sum(end <= size for end in ends[1:])
        assert journal.frames == records[:num_whole], size
        assert journal.is_truncated == (size not in ends), size


def test_garbage_at_the_end_does_not_matter(tmp_path: Path) -> None:
    records = some_records(3)
    path = tmp_path / "a.journal"
    write_all(path, records)
    whole = path.read_bytes()
    for seed in range(50):
        path.write_bytes(whole + random.Random(seed).randbytes(40))
        journal = read_journal(path)
        assert journal.frames[: len(records)] == records
        assert journal.is_truncated


@pytest.mark.parametrize("payload", [b"\xff\xff\xff", b"\x91\x63", b"\xc0"])
def test_a_frame_that_is_no_record_ends_the_journal(tmp_path: Path, payload: bytes) -> None:
    records = some_records(4)
    path = tmp_path / "a.journal"
    write_all(path, records)
    whole = path.read_bytes()
    frame = len(payload).to_bytes(4, "little") + b"\0\0" + payload
    path.write_bytes(whole + frame + whole[len(MAGIC) :])
    journal = read_journal(path)
    assert journal.frames == records
    assert journal.is_truncated


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    path.write_bytes(b"something else altogether")
    with pytest.raises(ValueError, match="not a journal that this version reads"):
        read_journal(path)


def test_a_journal_is_never_overwritten(tmp_path: Path) -> None:
    write_all(tmp_path / "a.journal", some_records(1))
    with pytest.raises(FileExistsError):
        JournalWriter(tmp_path / "a.journal")


def test_writes_reach_the_file_within_the_interval(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "a.journal")
    writer.write(Drops(1))
    time.sleep(0.25)
    writer.write(Drops(2))
    assert [record for _, record in read_journal(writer.path).frames] == [Drops(1), Drops(2)]
    writer.write(Drops(3))
    writer.flush()
    assert len(read_journal(writer.path).frames) == 3
    writer.close()
    writer.close()


def test_short_writes_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    monkeypatch.setattr(
        "instrumentation.record.journal.os.write", lambda fd, data: real_write(fd, data[:7])
    )
    records = some_records(5)
    write_all(tmp_path / "a.journal", records)
    assert read_journal(tmp_path / "a.journal").frames == records


def test_full_disk_ends_the_journal_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    obs = setup(ObservabilityConfig(), role=Role.CORE, run_dir=str(tmp_path))
    obs.step(StepRecord(step=1, begin_ns=1, end_ns=2))
    assert obs.flush()

    def write(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("instrumentation.record.journal.os.write", write)
    for step in range(2, 6):
        obs.step(StepRecord(step=step, begin_ns=1, end_ns=2))
        assert obs.flush()
    obs.close()
    assert obs.num_drops() == 3
    assert len([one for one in caplog.records if one.name == "isinglass.telemetry"]) == 1
    [path] = tmp_path.iterdir()
    steps = [record for _, record in read_journal(path).frames if isinstance(record, StepRecord)]
    assert [step.step for step in steps] == [1]


def steps_in(path: Path) -> list[int]:
    """The numbers of the steps that a journal holds by now."""
    frames = read_journal(path).frames
    return [record.step for _, record in frames if isinstance(record, StepRecord)]


def test_a_killed_process_leaves_a_readable_journal(tmp_path: Path) -> None:
    """SIGKILL with no warning: what was recorded gets into the file without being asked for."""
    code = (
        "import sys, time; from instrumentation import *; "
        "from instrumentation.setup import setup; "
        "obs = setup(ObservabilityConfig(), role=Role.CORE, run_dir=sys.argv[1]); "
        "[obs.step(StepRecord(step=n, begin_ns=1, end_ns=2)) for n in range(500)]; "
        "print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            [path] = tmp_path.glob("core.*.journal")
            wait_until(lambda: len(steps_in(path)) == 500)
        finally:
            process.kill()
    assert steps_in(path) == list(range(500))


def test_a_script_that_never_closes_keeps_its_last_records(tmp_path: Path) -> None:
    code = (
        "import sys; from instrumentation import *; "
        "from instrumentation.setup import setup; "
        "obs = setup(ObservabilityConfig(), role=Role.CALLER, run_dir=sys.argv[1]); "
        "obs.request(RequestTimeline(request_id='last'))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    [path] = tmp_path.glob("caller.*.journal")
    frames = read_journal(path).frames
    assert [r.request_id for _, r in frames if isinstance(r, RequestTimeline)] == ["last"]
    assert isinstance(frames[-1][1], ClockAnchor)


def test_journals_of_older_versions_stay_readable() -> None:
    """A record that lacks the newest fields takes their defaults: fields are only ever appended."""
    full = msgspec.msgpack.decode(
        msgspec.msgpack.encode(StepRecord(step=3, begin_ns=1, end_ns=2, num_running=9))
    )
    shorter = msgspec.msgpack.encode(full[:12])
    record = msgspec.msgpack.decode(shorter, type=Record)
    assert isinstance(record, StepRecord)
    assert record.step == 3
    assert record.scheduled == ()


# Bounds and ring mode.


def write_steps(obs: Instrument, numbers: range) -> None:
    for number in numbers:
        obs.step(StepRecord(step=number, begin_ns=number, end_ns=number + 1))
        if number % 50 == 0:
            assert obs.flush()
    assert obs.flush()


def test_a_recording_ends_at_its_size_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = 1 << 16
    obs = setup(
        ObservabilityConfig(trace_max_bytes=limit, flight_recorder_steps=0),
        role=Role.CORE,
        run_dir=str(tmp_path),
    )
    write_steps(obs, range(5000))
    [path] = tmp_path.iterdir()
    assert limit <= path.stat().st_size < limit + 1000
    run = read_run(tmp_path)
    steps = [step.step for step in run.steps]
    assert steps == list(range(len(steps)))
    assert 100 < len(steps) < 5000
    [event] = run.events
    assert event.kind is Event.RECORDING_ENDED
    assert event.value >= limit
    assert "trace_max_bytes" in caplog.text
    assert obs.num_drops() == 0, "an end that was asked for is no loss"
    assert obs.telemetry_errors() == {}
    assert not obs.stop_recording()
    assert obs.early_end == "it had reached trace_max_bytes"
    assert not obs.stop_recording()
    assert not obs.early_end, "it is told once"
    assert obs.start_recording(str(tmp_path)), "the next one may begin"
    write_steps(obs, range(5))
    obs.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_ring_mode_keeps_the_last_seconds_and_reads_as_one_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(now_ns=10**12)
    monkeypatch.setattr("instrumentation.record.sinks.time.monotonic_ns", clock)
    obs = setup(ObservabilityConfig(trace_ring_s=4), role=Role.CORE, run_dir=str(tmp_path))
    obs.request_arrived(1, "long", arrival_ns=1, num_prompt_tokens=7)
    obs.request_arrived(2, "short", arrival_ns=1, num_prompt_tokens=7)
    obs.request_arrived(3, "given up", arrival_ns=1, num_prompt_tokens=7)
    obs.step(StepRecord(step=0, begin_ns=clock.now_ns, end_ns=clock.now_ns + 1, finished=(2,)))
    obs.event(Event.ABORT, "given up")
    worker = obs.for_thread("worker")
    for step in range(1, 401):
        clock.advance(50_000_000)
        obs.step(StepRecord(step=step, begin_ns=clock.now_ns, end_ns=clock.now_ns + 1))
        worker.worker_step(WorkerStepRecord(step=step, begin_ns=clock.now_ns, end_ns=clock.now_ns))
        assert obs.flush()
        assert len(list(tmp_path.iterdir())) <= 6
    run = read_run(tmp_path)
    [process] = run.processes
    assert [thread.name for thread in process.threads] == ["core loop", "worker"]
    steps = [step.step for step in run.steps]
    assert steps == list(range(steps[0], 401))
    kept_s = (401 - steps[0]) * 0.05
    assert 4 <= kept_s <= 6.5
    # Threads are written one after the other, so a file may begin between them.
    assert abs(len(run.worker_steps) - len(steps)) <= 1
    assert [arrival.request_id for arrival in run.arrivals] == ["long"]
    assert not process.is_truncated
    assert len({id(thread) for thread in process.threads}) == 2
    obs.close()


def test_ring_mode_is_bounded_by_size_too(tmp_path: Path) -> None:
    limit = 1 << 16
    obs = setup(
        ObservabilityConfig(trace_ring_s=3600, trace_max_bytes=limit),
        role=Role.CORE,
        run_dir=str(tmp_path),
    )
    write_steps(obs, range(5000))
    obs.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < limit + 8192
    steps = [step.step for step in read_run(tmp_path).steps]
    assert steps == list(range(steps[0], 5000))
    assert len(steps) > 100


def test_two_ring_recordings_of_a_process_stay_apart(tmp_path: Path) -> None:
    for begin in (0, 100):
        obs = setup(ObservabilityConfig(trace_ring_s=60), role=Role.CORE, run_dir=str(tmp_path))
        write_steps(obs, range(begin, begin + 10))
        obs.close()
    run = read_run(tmp_path)
    assert sorted([step.step for step in one.of_type(StepRecord)] for one in run.processes) == [
        list(range(10)),
        list(range(100, 110)),
    ]


def test_a_fork_leaves_its_parents_journal_alone(tmp_path: Path) -> None:
    code = (
        "import os, sys; from instrumentation import *; "
        "from instrumentation.setup import setup; "
        "obs = setup(ObservabilityConfig(), role=Role.CALLER, run_dir=sys.argv[1]); "
        "obs.request(RequestTimeline(request_id='once')); "
        "child = os.fork(); "
        "child or sys.exit(0); "
        "os.waitpid(child, 0)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    subprocess.run(command, check=True)
    [path] = tmp_path.glob("caller.*.journal")
    frames = read_journal(path).frames
    assert [r.request_id for _, r in frames if isinstance(r, RequestTimeline)] == ["once"]


def test_a_journal_that_is_deleted_is_missed(tmp_path: Path) -> None:
    obs = setup(ObservabilityConfig(), role=Role.CORE, run_dir=str(tmp_path))
    [path] = tmp_path.glob("core.*.journal")
    path.unlink()
    obs.step(StepRecord(step=1, begin_ns=1, end_ns=2))
    obs.flush()
    obs.step(StepRecord(step=2, begin_ns=1, end_ns=2))
    obs.flush()
    assert obs.telemetry_errors() == {"journal": 1}
    assert obs.telemetry_drops() == {"journal": 1}
    obs.close()
