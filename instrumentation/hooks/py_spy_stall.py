"""The hook `py-spy-dump-on-stall`: all stacks in a file, once nothing has moved for some time.

Knows how to tell a stall and how to have the stacks written: by py-spy, which sees native frames
too, or by the interpreter itself where py-spy is missing or may not look. Does not know the
program, save for an engine's progress where another hook tells it.
"""

import faulthandler
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Hashable
from pathlib import Path
from types import ModuleType

from instrumentation.hooks.folder import folder_path, hooks_folder
from instrumentation.hooks.progress import StallNews, read_progress, tell_stall
from instrumentation.hooks.registry import BUILTIN_HOOKS, GATE_VARIABLE, names_in

VARIABLE = "ISINGLASS_HOOKS_STALL_S"
_DEFAULT_STALL_S = 30.0
_CHECKS_PER_STALL = 8
_MAX_DUMPS = 5
_PY_SPY_TIMEOUT_S = 30.0


class StallWatch:
    """Looks at the process several times in the time that makes a stall.

    Each stall is dumped once, and a process a bounded number of times.

    Args:
        stall_s: how long nothing must have moved.
        follows_engine: a stall is an engine that has work and makes no step, in whichever process
            of the run it is: what waits for it, or for requests, has not stalled. Else it is a main
            thread that stays at one instruction of one frame, which a program that waits for
            something does too.
        max_dumps: files in all.
    """

    def __init__(
        self, *, stall_s: float, follows_engine: bool, max_dumps: int = _MAX_DUMPS
    ) -> None:
        self._stall_s = stall_s
        self._follows_engine = follows_engine
        self._max_dumps = max_dumps
        self._start_thread()
        os.register_at_fork(after_in_child=self._start_thread)

    def _start_thread(self) -> None:
        self._num_dumps = 0
        self._num_unchanged = 0
        self._position: Hashable = None
        self._news = StallNews(folder_path())
        threading.Thread(target=self._run, name="isinglass-stall-watch", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while self._num_dumps < self._max_dumps:
            pause.wait(self._stall_s / _CHECKS_PER_STALL)
            if self.look():
                self._dump()

    def look(self) -> bool:
        """Whether there is a stall that was not there at the last look."""
        if not self._follows_engine:
            return self._is_stuck(_position_of_main_thread())
        progress = read_progress()
        if progress is None:
            return self._news.is_new()
        is_stalled = self._is_stuck(progress.num_moves if progress.is_busy else None)
        if is_stalled:
            try:
                tell_stall(hooks_folder(), self._stall_s)
            except OSError as error:
                _say(f"other processes cannot be told of a stall: {error}")
        return is_stalled

    def _is_stuck(self, position: Hashable) -> bool:
        """Whether a position, None for nothing to do, has been the same for just long enough."""
        is_same = position is not None and position == self._position
        self._position = position
        self._num_unchanged = self._num_unchanged + 1 if is_same else 0
        return self._num_unchanged == _CHECKS_PER_STALL

    def _dump(self) -> None:
        self._num_dumps += 1
        what = "the engine has made no step" if self._follows_engine else "nothing has moved"
        try:
            name = f"stall.{os.getpid()}.{self._num_dumps}.txt"
            path = write_stacks(hooks_folder() / name)
            _say(f"{what} for {self._stall_s:g} s; stacks are in {path}")
        except Exception as error:
            _say(f"the stacks cannot be written: {type(error).__name__}: {error}")


def _position_of_main_thread() -> Hashable:
    """Something that changes as the program gets on."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return (id(frame), frame.f_lasti) if frame is not None else None


def write_stacks(path: Path) -> Path:
    """Write the stacks of all threads of this process to a file, whose first line says by what.

    Raises:
        OSError: the file cannot be written.
    """
    trouble = _run_py_spy(path)
    if trouble is not None:
        with path.open("w") as stream:
            stream.write(f"by the interpreter, without native frames, because {trouble}\n\n")
            stream.flush()
            faulthandler.dump_traceback(stream, all_threads=True)
    return path


def _run_py_spy(path: Path) -> str | None:
    """Have py-spy write the file; else say why it did not."""
    program = shutil.which("py-spy") or shutil.which(
        "py-spy", path=str(Path(sys.executable).parent)
    )
    if program is None:
        return "py-spy is not installed"
    try:
        done = subprocess.run(  # noqa: S603 - a program of the user's own path
            [program, "dump", "--pid", str(os.getpid())],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy failed ({error})"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return f"py-spy failed ({lines[0]})"
    path.write_text(f"by py-spy\n\n{done.stdout}")
    return None


def _say(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"isinglass hooks: py-spy-dump-on-stall: {text}\n")


def install(module: ModuleType) -> None:
    """Watch this process.

    Raises:
        ValueError: the environment's time is no number above 0.
    """
    text = os.environ.get(VARIABLE, str(_DEFAULT_STALL_S))
    try:
        stall_s = float(text)
    except ValueError:
        stall_s = 0.0
    if not 0 < stall_s < float("inf"):
        raise ValueError(f"{VARIABLE} is {text!r}; it must be a number of seconds above 0")
    hooks = [BUILTIN_HOOKS.get(name) for name in names_in(os.environ.get(GATE_VARIABLE, ""))]
    follows_engine = any(hook is not None and hook.tells_progress for hook in hooks)
    StallWatch(stall_s=stall_s, follows_engine=follows_engine)
