"""What one hook knows of an engine's progress, for another that looks for stalls.

Knows the probe, which is in the engine's own process, and the file by which the run's other
processes hear of its stalls. Does not know who tells or who listens.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_FILE_NAME = "engine-stalls.txt"


class Progress(NamedTuple):
    """Whether the engine has work to do, and a number that changes as it gets on."""

    is_busy: bool
    num_moves: int


_probes: list[Callable[[], Progress]] = []

# A fork has the memory of an engine, not the engine.
os.register_at_fork(after_in_child=_probes.clear)


def set_probe(probe: Callable[[], Progress]) -> None:
    """Name the function that knows; it is called from another thread and must not block."""
    _probes[:] = [probe]


def read_progress() -> Progress | None:
    """What the probe says, None in a process that has no engine."""
    return _probes[0]() if _probes else None


def tell_stall(folder: Path, stall_s: float) -> None:
    """Let the run's other processes know that this one's engine has stalled.

    Raises:
        OSError: the folder cannot be written to.
    """
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    with (folder / _FILE_NAME).open("a") as stream:
        stream.write(
            f"{when} process {os.getpid()}: the engine has requests and has made no step for "
            f"{stall_s:g} s\n"
        )


class StallNews:
    """Tells of stalls that other processes have told since the last look.

    Args:
        folder: the run's, which need not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE_NAME
        self._num_bytes = self._read_size()

    def is_new(self) -> bool:
        """Whether there is one; each counts once."""
        before, self._num_bytes = self._num_bytes, self._read_size()
        return self._num_bytes > before

    def _read_size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0
