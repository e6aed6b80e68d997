"""Where drained records go.

Knows the interface of a sink and the sink that writes the journal. Does not know how records get
here. Sinks run on the drain thread, off the path of any step, and may raise: the drain detaches
them.
"""

import os
import platform
import socket
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Protocol

from instrumentation.journal import SUFFIX, JournalWriter
from instrumentation.records import ClockAnchor, ProcessHeader, Record, ThreadStarted

_ANCHOR_INTERVAL_NS = 60_000_000_000
_MAX_JOURNALS_OF_A_PROCESS = 10_000


class Sink(Protocol):
    """A consumer of records."""

    def thread(self, thread: int, started: ThreadStarted) -> None:
        """Learn of a thread, before any record of it."""

    def write(self, thread: int, records: Iterable[Record]) -> None:
        """Take records of one thread, oldest first."""

    def flush(self) -> None:
        """Bring what was taken to where it survives the process; called several times a second."""

    def close(self) -> None:
        """Flush and let go."""


def read_clock_anchor() -> ClockAnchor:
    """Read the host's clocks as close together as can be."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    before_ns = time.monotonic_ns()
    wall_ns = time.time_ns()
    boottime_ns = time.clock_gettime_ns(boottime) if boottime is not None else before_ns
    after_ns = time.monotonic_ns()
    return ClockAnchor((before_ns + after_ns) // 2, wall_ns, boottime_ns)


def _process_header(role: str, rank: int) -> ProcessHeader:
    try:
        version = metadata.version("isinglass")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return ProcessHeader(
        role=role,
        rank=rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        version=version,
        python_version=platform.python_version(),
        argv=tuple(sys.argv),
        started_ns=time.monotonic_ns(),
    )


def _open_journal(folder: Path, role: str) -> JournalWriter:
    """Open RUN_DIR/<role>.<pid>.journal, numbered if this process has written such a one before."""
    stem = f"{role}.{os.getpid()}"
    for number in range(_MAX_JOURNALS_OF_A_PROCESS):
        name = f"{stem}.{number}{SUFFIX}" if number else f"{stem}{SUFFIX}"
        try:
            return JournalWriter(folder / name)
        except FileExistsError:
            continue
    raise FileExistsError(f"{folder} holds {_MAX_JOURNALS_OF_A_PROCESS} journals of {stem}")


class JournalSink:
    """Writes this process's journal into the run's folder.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, folder: str | os.PathLike[str], *, role: str, rank: int = 0) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._writer = _open_journal(path, role)
        self._writer.write(_process_header(role, rank))
        self._write_anchor()
        self._writer.flush()

    @property
    def path(self) -> Path:
        """The journal's file."""
        return self._writer.path

    def _write_anchor(self) -> None:
        anchor = read_clock_anchor()
        self._anchored_ns = anchor.monotonic_ns
        self._writer.write(anchor)

    def thread(self, thread: int, started: ThreadStarted) -> None:
        """Name a thread in the journal."""
        self._writer.write(started, thread=thread)

    def write(self, thread: int, records: Iterable[Record]) -> None:
        """Append records."""
        for record in records:
            self._writer.write(record, thread=thread)

    def flush(self) -> None:
        """Hand everything to the operating system, with a clock anchor once a minute."""
        if time.monotonic_ns() - self._anchored_ns >= _ANCHOR_INTERVAL_NS:
            self._write_anchor()
        self._writer.flush()

    def close(self) -> None:
        """Write a last clock anchor and close the file."""
        try:
            self._write_anchor()
        finally:
            self._writer.close()
