"""The hook that looks for stalls: what is one, in the engine's process and in the others."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from instrumentation.hooks import folder, progress, py_spy_stall
from instrumentation.hooks.progress import Progress
from instrumentation.hooks.py_spy_stall import StallWatch

CHECKS = py_spy_stall._CHECKS_PER_STALL


@pytest.fixture
def hooks_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder, not made yet; and a process in which nobody has told of an engine."""
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "hooks"))
    monkeypatch.setattr(progress, "_probes", [])
    return tmp_path / "hooks"


def watch_by_hand(monkeypatch: pytest.MonkeyPatch, *, follows_engine: bool) -> Callable[[int], int]:
    """A watch without its thread; the function looks so many times, and counts the stalls."""
    monkeypatch.setattr(StallWatch, "_run", lambda self: None)
    watch = StallWatch(stall_s=8.0, follows_engine=follows_engine)
    return lambda times: sum(watch.look() for _ in range(times))


def test_an_engine_without_work_has_not_stalled(
    hooks_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [Progress(is_busy=False, num_moves=4)]
    progress.set_probe(lambda: states[-1])
    look = watch_by_hand(monkeypatch, follows_engine=True)
    assert look(50) == 0
    states.append(Progress(is_busy=True, num_moves=4))
    assert look(CHECKS) == 0
    assert look(50) == 1, "each stall is one"
    states.append(Progress(is_busy=True, num_moves=5))
    assert look(CHECKS) == 0
    assert look(50) == 1
    lines = (hooks_dir / "engine-stalls.txt").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("the engine has requests and has made no step for 8 s")


def test_a_process_that_waits_for_an_engine_stalls_with_it_alone(
    hooks_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its main thread stays where it is, as an API server's or a worker's does."""
    look = watch_by_hand(monkeypatch, follows_engine=True)
    assert look(50) == 0
    hooks_dir.mkdir()
    progress.tell_stall(hooks_dir, 8.0)
    assert look(50) == 1
    progress.tell_stall(hooks_dir, 8.0)
    assert look(1) == 1
    # What was told before a process began is not its own.
    assert watch_by_hand(monkeypatch, follows_engine=True)(50) == 0


def test_without_an_engine_to_follow_the_main_thread_decides(
    hooks_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = watch_by_hand(monkeypatch, follows_engine=False)
    positions = [(1, 10)] * 9 + [(1, 12)] * 9
    monkeypatch.setattr(py_spy_stall, "_position_of_main_thread", lambda: positions.pop())
    assert look(8) == 0
    assert look(1) == 1
    assert look(8) == 0
    assert look(1) == 1


@pytest.mark.parametrize(
    ("gate", "follows"),
    [("py-spy-dump-on-stall", False), ("gc, vllm ,py-spy-dump-on-stall", True)],
)
def test_the_gate_says_whether_there_is_an_engine_to_follow(
    hooks_dir: Path, monkeypatch: pytest.MonkeyPatch, gate: str, follows: bool
) -> None:
    made: list[bool] = []
    monkeypatch.setattr(
        py_spy_stall, "StallWatch", lambda *, stall_s, follows_engine: made.append(follows_engine)
    )
    monkeypatch.setenv("ISINGLASS_HOOKS", gate)
    py_spy_stall.install(sys)
    assert made == [follows]


def test_the_folders_name_is_handed_on_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each process would look for the engine's stalls in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(folder.VARIABLE, "")
    watch_by_hand(monkeypatch, follows_engine=True)
    assert Path(folder.hooks_folder()) == folder.folder_path()
    monkeypatch.chdir("/")
    assert folder.folder_path().parent == tmp_path / "isinglass-hooks"
