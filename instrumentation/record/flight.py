"""The flight recorder: the last steps in full, and the file that they are written to in need.

Knows what is kept, for how long, and the file. Does not know who asks for a dump, except that it
watches for slow steps itself. Records come in from the step's path at the price of an append; all
else happens on other threads or when the engine is at its end.
"""

import logging
import os
import stat
import tempfile
import threading
import time
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from instrumentation.labels import step_kind
from instrumentation.names import MAIN_THREAD_OF_ROLE, FlightReason, Role, ThreadName
from instrumentation.record.journal import JournalWriter, open_numbered
from instrumentation.record.process_header import process_header, read_clock_anchor
from instrumentation.record.records import EventRecord, FlightDump, Record, ThreadStarted
from instrumentation.record.request_records import RequestArrived
from instrumentation.record.step_records import StepRecord, WorkerStepRecord

_LOGGER = logging.getLogger("isinglass.telemetry")
FILE_PREFIX = "flight-"
FOLDER_NAME = "isinglass-flight"
_OTHERS_PER_STEP = 4
_LOCK_TIMEOUT_S = 5.0
_MIN_STEPS_FOR_MEDIAN = 32
_MAX_STEPS_FOR_MEDIAN = 512
_SLOW_STEP_INTERVAL_NS = 60_000_000_000
_MAX_SLOW_STEP_DUMPS = 100

EntryT = TypeVar("EntryT")


class FlightRecorder:
    """Keeps the last steps of an engine, and writes them to a file in the journal's format.

    Append to the deques from any thread; each holds a bounded number of entries.

    Args:
        num_steps: how many steps to keep, above 0.
        role: the process's, one of `names.Role`.
        folder: where to write. None: the run's folder while there is one, else a private folder
            below the temporary folder.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        role: str,
        rank: int = 0,
        title: str = "",
        folder: str | None = None,
    ) -> None:
        assert num_steps > 0
        self.steps: deque[StepRecord] = deque(maxlen=num_steps)
        self.worker_steps: deque[WorkerStepRecord] = deque(maxlen=num_steps)
        self.events: deque[EventRecord] = deque(maxlen=_OTHERS_PER_STEP * num_steps)
        self.arrivals: deque[RequestArrived] = deque(maxlen=_OTHERS_PER_STEP * num_steps)
        self.run_dir: str | None = None
        self._role = role
        self._rank = rank
        self._title = title
        self._folder = folder
        self._lock = threading.Lock()

    def dump(self, reason: FlightReason, detail: str = "", *, step: int = -1) -> Path:
        """Write `flight-<reason>-<role>-<pid>-<n>.journal`, and return its path.

        Raises:
            OSError: it cannot be written, or another dump takes too long.
        """
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            raise OSError("another flight record is still being written")
        try:
            return self._write(reason, detail, step)
        finally:
            self._lock.release()

    def _write(self, reason: FlightReason, detail: str, step: int) -> Path:
        steps = copy_of(self.steps)
        stem = f"{FILE_PREFIX}{reason.label}-{self._role}-{os.getpid()}-"
        writer = open_numbered(self._prepare_folder(), stem)
        try:
            writer.write(process_header(self._role, self._rank, self._title))
            writer.write(read_clock_anchor())
            self._write_records(writer, steps)
            writer.write(FlightDump(reason, time.monotonic_ns(), detail, step))
        finally:
            writer.close()
        return writer.path

    def _write_records(self, writer: JournalWriter, steps: list[StepRecord]) -> None:
        threads: dict[str, list[Record]] = {
            ThreadName.CORE_LOOP: [*copy_of(self.arrivals), *steps],
            ThreadName.WORKER: list(copy_of(self.worker_steps)),
        }
        threads.setdefault(MAIN_THREAD_OF_ROLE[self._role], []).extend(copy_of(self.events))
        for thread, (name, records) in enumerate(threads.items()):
            # Not the threads' own numbers, which records do not tell: readers need distinct ones.
            writer.write(ThreadStarted(name, os.getpid() + thread), thread=thread)
            for record in records:
                writer.write(record, thread=thread)

    def _prepare_folder(self) -> Path:
        named = self._folder or self.run_dir
        if named is not None:
            folder = Path(named).expanduser().absolute()
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        folder = Path(tempfile.gettempdir()) / FOLDER_NAME
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        is_ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
        if is_ours and not facts.st_mode & 0o077:
            return folder
        # Somebody else's: prompts' ids and names of requests are none of their business.
        return Path(tempfile.mkdtemp(prefix=f"{FOLDER_NAME}-"))


class SlowStepWatch:
    """Looks at new worker steps now and then, and asks for a dump at one that was slow.

    Called from one thread, off the step's path. A step is slow when it took at least `slow_s`, or
    at least `factor` times the median of the steps of its kind before it (once there are enough).
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        dump: Callable[[FlightReason, str, int], object],
        *,
        slow_s: float | None,
        factor: float | None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._recorder = recorder
        self._dump = dump
        self._slow_ns = None if slow_s is None else round(slow_s * 1e9)
        self._factor = factor
        self._clock = clock
        self._last_step = -1
        self._dumped_ns: int | None = None
        self._num_dumps = 0
        self._recent: dict[str, deque[int]] = defaultdict(
            lambda: deque(maxlen=_MAX_STEPS_FOR_MEDIAN)
        )
        self._ordered: dict[str, list[int]] = defaultdict(list)

    def __call__(self) -> None:
        """Look at what is new."""
        slow = None
        for record in self._unseen():
            kind = step_kind(record.label)
            why = self._why_slow(record.duration_ns, kind)
            if why and (slow is None or record.duration_ns > slow[0].duration_ns):
                slow = record, why
            self._learn(record.duration_ns, kind)
        if slow is not None:
            self._report(*slow)

    def _unseen(self) -> list[WorkerStepRecord]:
        """The steps since the last look, oldest first."""
        last_step, unseen = self._last_step, []
        for record in reversed(copy_of(self._recorder.worker_steps)):
            if record.step <= last_step:
                break
            unseen.append(record)
        if unseen:
            self._last_step = unseen[0].step
        return unseen[::-1]

    def _why_slow(self, duration_ns: int, kind: str) -> str:
        took = f"took {duration_ns / 1e6:.1f} ms"
        if self._slow_ns is not None and duration_ns >= self._slow_ns:
            return f"{took}, at least {self._slow_ns / 1e9:g} s"
        ordered = self._ordered[kind]
        if self._factor is not None and len(ordered) >= _MIN_STEPS_FOR_MEDIAN:
            median_ns = ordered[len(ordered) // 2]
            if duration_ns >= self._factor * median_ns:
                return (
                    f"{took}, at least {self._factor:g} times the median of {kind} steps "
                    f"({median_ns / 1e6:.1f} ms)"
                )
        return ""

    def _learn(self, duration_ns: int, kind: str) -> None:
        recent, ordered = self._recent[kind], self._ordered[kind]
        if len(recent) == recent.maxlen:
            ordered.remove(recent[0])
        recent.append(duration_ns)
        insort(ordered, duration_ns)

    def _report(self, record: WorkerStepRecord, why: str) -> None:
        now_ns = self._clock()
        if self._dumped_ns is not None and now_ns - self._dumped_ns < _SLOW_STEP_INTERVAL_NS:
            return
        if self._num_dumps >= _MAX_SLOW_STEP_DUMPS:
            return
        self._dumped_ns = now_ns
        self._num_dumps += 1
        if self._num_dumps == _MAX_SLOW_STEP_DUMPS:
            _LOGGER.warning("%d slow steps are on record; no more are written", self._num_dumps)
        self._dump(FlightReason.SLOW_STEP, f"step {record.step} {why}", record.step)


def copy_of(entries: Iterable[EntryT]) -> list[EntryT]:
    """A list of what a deque holds, although other threads append to it meanwhile."""
    while True:
        try:
            return list(entries)
        except RuntimeError:  # it grew while it was read
            continue


def is_flight_file(path: Path) -> bool:
    """Whether a journal is a flight record, going by its name."""
    return path.name.startswith(FILE_PREFIX)


def role_is_watched(role: str) -> bool:
    """Whether a process of this role runs steps, so that slow ones show there."""
    return role in (Role.CORE, Role.WORKER)
