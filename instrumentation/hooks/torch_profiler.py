"""The hook `torch-profiler`: profile for some seconds, after a delay or on SIGUSR1.

Knows torch's profiler and the environment's settings. Does not know the program. The profiler runs
on a thread of its own and sees the operators of all threads. The signal is taken at start: it must
not end a program that has not imported torch yet, or imports it in another thread.
"""

import atexit
import os
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from instrumentation.hooks.folder import hooks_folder

DELAY = "ISINGLASS_HOOKS_PROFILE_DELAY_S"
DURATION = "ISINGLASS_HOOKS_PROFILE_S"
_DEFAULT_DURATION_S = 5.0
_EXPORT_TIMEOUT_S = 60.0


class Plan(NamedTuple):
    """When to profile."""

    delay_s: float | None
    """From the import of torch, None: wait for the signal."""
    duration_s: float


def read_plan() -> Plan:
    """The plan that the environment names.

    Raises:
        ValueError: a setting is not a number, or out of range.
    """
    delay_s = _seconds(DELAY)
    duration_s = _seconds(DURATION)
    return Plan(delay_s, _DEFAULT_DURATION_S if duration_s is None else duration_s)


def _seconds(name: str) -> float | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} is {text!r}; it must be a number of seconds, 0 or more")
    return value


class Request:
    """Whether a profile is asked for, perhaps before there is a profiler; a fork begins anew."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.wanted = threading.Event()


class TimedProfiler:
    """Profiles one stretch of time after another, each into a file of its own.

    Args:
        torch: the module.
        plan: when to profile.
        request: asks for a profile; while one is under way that does nothing.
    """

    def __init__(self, torch: Any, plan: Plan, request: Request) -> None:
        self._torch = torch
        self._plan = plan
        self._request = request
        self._ending = threading.Event()
        self._start_thread(plan.delay_s)
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self._end)

    def _start_thread(self, delay_s: float | None) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(delay_s,), name="isinglass-torch-profiler", daemon=True
        )
        self._thread.start()

    def _after_fork(self) -> None:
        self._ending = threading.Event()
        self._start_thread(self._plan.delay_s)

    def _end(self) -> None:
        """Let a profile that is under way end early, and be written."""
        self._ending.set()
        self._request.wanted.set()
        self._thread.join(_EXPORT_TIMEOUT_S)

    def _run(self, delay_s: float | None) -> None:
        self._request.wanted.wait(delay_s)
        while not self._ending.is_set():
            try:
                path = self._profile()
                _say(f"wrote {path}")
            except Exception as error:
                _say(f"the profile failed: {type(error).__name__}: {error}")
            if self._ending.is_set():
                return
            self._request.wanted.clear()
            self._request.wanted.wait()

    def _profile(self) -> Path:
        import torch.profiler as profiler
        from torch._C._profiler import _ExperimentalConfig

        activities = [profiler.ProfilerActivity.CPU]
        if self._torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        with profiler.profile(
            activities=activities,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        ) as profile:
            self._ending.wait(self._plan.duration_s)
        path = _new_path(hooks_folder(), _rank(self._torch))
        # A reader never finds half a file under the final name. The suffix tells torch to compress.
        unfinished = path.with_name(f"unfinished.{path.name}")
        profile.export_chrome_trace(str(unfinished))
        unfinished.replace(path)
        return path


def _rank(torch: Any) -> int:
    """The process's rank in its group; before there is one, as its launcher says, else 0."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def _new_path(folder: Path, rank: int) -> Path:
    number = 0
    while True:
        suffix = f".{number}" if number else ""
        path = folder / f"torch.rank{rank}.{os.getpid()}{suffix}.pt.trace.json.gz"
        if not path.exists():
            return path
        number += 1


def _say(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"isinglass hooks: torch-profiler: {text}\n")


_request = Request()


def install(module: ModuleType) -> None:
    """At start, take the signal, unless somebody handles it; with torch, plan the profiles.

    Raises:
        ValueError: a setting of the environment is out of range.
    """
    plan = read_plan()
    if module is not sys:
        TimedProfiler(module, plan, _request)
        return
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda number, frame: _request.wanted.set())
