"""The torch profiler without an engine: parts, limits, clock, failures."""

import json
import random
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from instrumentation import StepLabel, WorkerStepRecord
from instrumentation.labels import format_step_label
from instrumentation.profile.files import (
    ANCHOR_NAME,
    ProfileError,
    ProfileState,
    ProfileStatus,
)
from instrumentation.profile.merge import Offset
from instrumentation.profile.torch_profiler import (
    ProfileOptions,
    TorchProfiler,
    initialize_torch_profiler,
)
from instrumentation.record.instrument import NULL
from instrumentation.record.live import LiveInstrument
from tests.support.ranges import KeptRanges
from tests.waiting import PATIENCE_S, wait_until
from traces.operators import find_profiles, read_profile

TENSOR = torch.ones(16, 16)


def options(folder: Path, **changes: object) -> ProfileOptions:
    given = {"folder": str(folder), "max_steps": 1000, "max_bytes": 1 << 30} | changes
    return msgspec.convert(given, ProfileOptions)


def make_profiler(obs: LiveInstrument | None = None) -> TorchProfiler:
    return TorchProfiler(obs or LiveInstrument("worker"), rank=3, world_size=8, backend="cpu")


def step(profiler: TorchProfiler, number: int, *, num_operators: int = 10) -> tuple[int, int]:
    """One step as the worker takes it; returns the begin and end of its forward phase."""
    obs = profiler.obs
    label = StepLabel(1, number, 0, 0)
    obs.step_begin(label)
    with obs.prepare:
        torch.zeros(3)
    with obs.forward:
        begin_ns = time.monotonic_ns()
        for _ in range(num_operators):
            torch.mm(TENSOR, TENSOR)
        end_ns = time.monotonic_ns()
    record = WorkerStepRecord(
        step=number,
        begin_ns=1,
        end_ns=2,
        num_context_requests=1,
        num_context_tokens=number,
        num_generation_requests=0,
        num_generation_tokens=0,
    )
    obs.worker_step(record)
    profiler.step()
    return begin_ns, end_ns


def wait_until_saved(profiler: TorchProfiler) -> None:
    """Between real steps there is time for it."""
    writer = profiler._writer
    assert writer is not None
    wait_until(lambda: writer._parts.empty() or not writer.thread.is_alive(), "parts are not saved")


def finish(profiler: TorchProfiler) -> ProfileStatus:
    assert profiler.close(PATIENCE_S)
    return profiler.status()


def load(status: ProfileStatus) -> dict:
    assert status.file is not None
    return json.loads(Path(status.file).read_text())


def test_a_profile_in_parts_is_one_file_on_our_clock(tmp_path: Path) -> None:
    profiler = make_profiler()
    assert profiler.status().state == ProfileState.IDLE
    profiler.start(options(tmp_path))
    assert profiler.status().state == ProfileState.RUNNING
    forwards = [step(profiler, number) for number in range(1, 41)]
    profiler.stop()
    assert profiler.status().state in (ProfileState.EXPORTING, ProfileState.DONE)
    step(profiler, 41)
    status = finish(profiler)
    assert (status.state, status.error, status.end_reason) == (ProfileState.DONE, "", "stop")
    assert status.num_steps == 40
    assert status.num_bytes == Path(status.file).stat().st_size
    assert "rank3" in Path(status.file).name

    document = load(status)
    assert document["distributedInfo"] == {"rank": 3, "world_size": 8, "backend": "cpu"}
    clock = document["isinglass"]
    assert sum(part["num_steps"] for part in clock["parts"]) == 40
    assert len(clock["parts"]) > 2
    names = [event["name"] for event in document["traceEvents"]]
    assert ANCHOR_NAME not in names
    assert names.count("aten::mm") == 400
    labels = [name for name in names if name.startswith("execute_context")]
    wanted = [format_step_label(StepLabel(1, number, 0, 0)) for number in range(1, 41)]
    assert sorted(labels) == sorted(wanted)
    assert names.count("forward") == names.count("prepare") == 40
    iterations = [name for name in names if name.startswith("ProfilerStep#")]
    assert iterations == [f"ProfilerStep#{number}" for number in range(40)]

    assert 0 < clock["clock_error_ns"] == status.clock_error_ns < 1_000_000
    origin_ns = document["baseTimeNanoseconds"] + clock["monotonic_offset_ns"]
    counts = [0] * 40
    for event in document["traceEvents"]:
        if event["name"] == "aten::mm":
            begin_ns = origin_ns + event["ts"] * 1000
            end_ns = begin_ns + event["dur"] * 1000
            for index, (low, high) in enumerate(forwards):
                error_ns = clock["clock_error_ns"]
                counts[index] += low - error_ns <= begin_ns <= end_ns <= high + error_ns
    assert counts == [10] * 40
    assert list(tmp_path.iterdir()) == [Path(status.file)]


def test_it_ends_by_itself_after_its_steps(tmp_path: Path) -> None:
    profiler = make_profiler()
    profiler.start(options(tmp_path, max_steps=7))
    for number in range(1, 12):
        step(profiler, number)
    status = finish(profiler)
    assert (status.num_steps, status.end_reason) == (7, "max_steps")
    names = [event["name"] for event in load(status)["traceEvents"]]
    assert names.count("forward") == 7
    with pytest.raises(ProfileError, match="ended by max_steps after 7 steps"):
        profiler.stop()


def test_it_ends_by_itself_at_its_size(tmp_path: Path) -> None:
    profiler = make_profiler()
    limit = 300_000
    profiler.start(options(tmp_path, max_bytes=limit))
    for number in range(1, 200):
        step(profiler, number, num_operators=50)
        wait_until_saved(profiler)
    status = finish(profiler)
    assert (status.state, status.end_reason) == (ProfileState.DONE, "max_bytes")
    assert 1 < status.num_steps < 100
    assert limit / 3 < status.num_bytes < 1.5 * limit


def test_a_second_start_and_a_stop_too_many_are_refused(tmp_path: Path) -> None:
    profiler = make_profiler()
    with pytest.raises(ProfileError, match="there has been none"):
        profiler.stop()
    profiler.start(options(tmp_path))
    with pytest.raises(ProfileError, match="is running already"):
        profiler.start(options(tmp_path))
    step(profiler, 1)
    profiler.stop()
    with pytest.raises(ProfileError, match="ended by stop after 1 steps"):
        profiler.stop()
    first = finish(profiler).file
    profiler.start(options(tmp_path))
    step(profiler, 2)
    second = finish(profiler)
    assert second.end_reason == "shutdown"
    assert second.file != first
    assert [str(path) for path in find_profiles(tmp_path)] == [first, second.file]


def test_a_profile_of_anybody_else_in_the_process_is_respected(tmp_path: Path) -> None:
    first, second = make_profiler(), make_profiler()
    first.start(options(tmp_path))
    with pytest.raises(ProfileError, match="another torch profile is running"):
        second.start(options(tmp_path))
    initialize_torch_profiler()  # leaves the one alone that is running
    step(first, 1)
    assert finish(first).state == ProfileState.DONE
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        with pytest.raises(ProfileError, match="of your own"):
            second.start(options(tmp_path))
        torch.mm(TENSOR, TENSOR)
    assert [event.key for event in own.key_averages()].count("aten::mm") == 1
    second.start(options(tmp_path))
    step(second, 1)
    assert finish(second).state == ProfileState.DONE


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profiler = make_profiler()
    with pytest.raises(ProfileError, match=r"cannot write a profile to .*set profiler_dir"):
        profiler.start(options(tmp_path / "file" / "profiles"))
    assert not profiler.is_running
    step(profiler, 1)
    profiler.start(options(tmp_path / "new" / "folder"))
    step(profiler, 2)
    assert finish(profiler).state == ProfileState.DONE


@pytest.mark.filterwarnings("ignore")
def test_a_profile_on_a_full_disk_says_so(tmp_path: Path) -> None:
    """No file may grow beyond a limit: a part that torch has begun stays unfinished."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    profiler = make_profiler()
    profiler.start(options(tmp_path))
    step(profiler, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        for number in range(2, 5):
            step(profiler, number)
        if profiler.is_running:
            profiler.stop()
        assert profiler.close(PATIENCE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    status = profiler.status()
    assert status.state is ProfileState.FAILED
    assert "File too large" in status.error
    assert "could not be written" in status.error
    assert not list(tmp_path.glob("*/*.tmp"))


def test_a_profile_that_cannot_be_written_fails_and_steps_go_on(tmp_path: Path) -> None:
    profiler = make_profiler()
    profiler.start(options(tmp_path / "gone"))
    shutil.rmtree(tmp_path / "gone")
    for number in range(1, 100):
        step(profiler, number)
        wait_until_saved(profiler)
    status = finish(profiler)
    assert (status.state, status.end_reason) == (ProfileState.FAILED, "error")
    assert status.error
    assert status.num_steps < 99
    profiler.start(options(tmp_path))
    step(profiler, 1)
    assert finish(profiler).state == ProfileState.DONE


class Broken:
    """A profiler of torch's that cannot be stopped."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __exit__(self, *error: object) -> None:
        self.part.__exit__(*error)
        raise RuntimeError("out of events")


@pytest.mark.parametrize("how", ["step", "stop", "close"])
def test_a_failure_of_torchs_profiler_is_kept_from_the_steps(tmp_path: Path, how: str) -> None:
    obs, ranges = LiveInstrument("worker"), KeptRanges()
    obs.set_ranges(ranges)
    profiler = make_profiler(obs)
    profiler.start(options(tmp_path))
    step(profiler, 1)
    profiler._part = Broken(profiler._part)
    if how == "step":
        for number in range(2, 6):
            step(profiler, number)
    elif how == "stop":
        with pytest.raises(ProfileError, match="failed at the end: out of events"):
            profiler.stop()
    status = finish(profiler)
    assert (status.state, status.end_reason) == (ProfileState.FAILED, "error")
    assert status.error == "RuntimeError: out of events"
    assert obs.telemetry_errors() == {"profiler": 1}
    assert obs.ranges is ranges
    assert not ranges.open
    # What was recorded before is there.
    assert json.loads(Path(status.file).read_text())["isinglass"]["num_steps"] == 1
    profiler.start(options(tmp_path))
    step(profiler, 1)
    assert finish(profiler).state == ProfileState.DONE


def test_a_profiler_that_does_not_start_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = make_profiler()

    def refuse() -> None:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(profiler, "_begin_part", refuse)
    with pytest.raises(ProfileError, match="does not start: no CUPTI"):
        profiler.start(options(tmp_path))
    assert not list(tmp_path.iterdir())
    step(profiler, 1)
    assert profiler.status().state == ProfileState.IDLE


def test_parts_that_do_not_fit_together_are_an_error_and_stay(tmp_path: Path) -> None:
    profiler = make_profiler()
    profiler.start(options(tmp_path))
    for number in range(1, 4):
        step(profiler, number)
    (parts,) = tmp_path.glob("*.parts")
    wait_until(lambda: (parts / "part-00000.json").exists() and profiler.status().num_bytes)
    (parts / "part-00000.json").write_text('{"traceEvents": [], "baseTimeNanoseconds": 0}')
    status = finish(profiler)
    assert status.state == ProfileState.FAILED
    assert "recorded 0 of 10 clock anchors" in status.error
    assert (parts / "manifest.json").is_file()
    assert not find_profiles(tmp_path)


def test_a_tool_sees_the_same_before_during_and_after(tmp_path: Path) -> None:
    obs, ranges = LiveInstrument("worker"), KeptRanges()
    obs.set_ranges(ranges)
    profiler = make_profiler(obs)
    assert profiler.obs is obs
    step(profiler, 1)
    once = list(ranges.told)
    ranges.told.clear()
    profiler.start(options(tmp_path))
    step(profiler, 1)
    profiler.stop()
    step(profiler, 1)
    assert ranges.told == once * 2
    assert not ranges.open
    assert obs.ranges is ranges
    names = [event["name"] for event in load(finish(profiler))["traceEvents"]]
    assert names.count("forward") == 1


def test_steps_are_named_even_where_nothing_is_recorded(tmp_path: Path) -> None:
    profiler = TorchProfiler(NULL, rank=0, world_size=1, backend="cpu")
    profiler.start(options(tmp_path))
    step(profiler, 5)
    names = [event["name"] for event in load(finish(profiler))["traceEvents"]]
    assert names.count("execute_context_1(5)_generation_0(0)") == 1


def test_shapes_and_stacks_are_recorded_on_demand(tmp_path: Path) -> None:
    profiler = make_profiler()
    profiler.start(options(tmp_path, record_shapes=True, with_stack=True))
    step(profiler, 1)
    status = finish(profiler)
    events = load(status)["traceEvents"]
    shapes = [event["args"]["Input Dims"] for event in events if event["name"] == "aten::mm"]
    assert shapes == [[[16, 16], [16, 16]]] * 10
    assert any(event.get("cat") == "python_function" for event in events)
    profile = read_profile(Path(status.file))
    slices = profile.places[profile.clock.pid, profile.clock.thread_id]
    drawn = [piece for piece in slices if piece.name == "aten::mm"]
    assert {piece.annotations["Input Dims"] for piece in drawn} == {"[[16, 16], [16, 16]]"}
    names = {piece.name for piece in slices}
    assert not {"forward", "prepare", "ProfilerStep#0"} & names


def test_a_file_of_somebody_else_is_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "other.pt.trace.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="is not a torch profile of an engine"):
        read_profile(path)


@pytest.mark.parametrize("seed", range(20))
def test_the_clocks_bound_holds(seed: int) -> None:
    draw = random.Random(seed)
    offset_ns, drift = draw.randrange(-(10**18), 10**18), draw.uniform(-1e-4, 1e-4)

    def true_offset(ours_ns: int) -> float:
        return offset_ns + drift * (ours_ns - 10**9)

    readings, ranges = [], []
    for start_ns in (10**9, 10**9 + 20_000_000):
        now_ns = start_ns
        for _ in range(5):
            before_ns = now_ns
            stamps = [before_ns + draw.randrange(1, 3000)]
            stamps.append(stamps[0] + draw.randrange(1, 3000))
            now_ns = stamps[1] + draw.randrange(1, 3000)
            readings.append((before_ns, now_ns))
            begin, end = (round(stamp - true_offset(stamp)) for stamp in stamps)
            ranges.append((begin, end))
    found = Offset(ranges, readings)
    for ours_ns in range(10**9, 10**9 + 20_000_000, 1_000_000):
        assert abs(true_offset(ours_ns) - found.offset_ns) <= found.error_ns + 2
    assert found.error_ns < 10_000
    with pytest.raises(ValueError, match="recorded 9 of 10"):
        Offset(ranges[1:], readings)
