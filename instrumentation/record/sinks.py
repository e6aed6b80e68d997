"""Where drained records go.

Knows the interface of a sink and the sink that writes the journal. Does not know how records get
here. Sinks run on the drain thread, off the path of any step, and may raise: the drain detaches
them.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from instrumentation.names import Event, SinkName
from instrumentation.record.journal import SUFFIX, JournalWriter
from instrumentation.record.process_header import process_header, read_clock_anchor
from instrumentation.record.records import EventRecord, Record, ThreadStarted
from instrumentation.record.request_records import RequestArrived
from instrumentation.record.step_records import StepRecord

_LOGGER = logging.getLogger("isinglass.telemetry")
_ANCHOR_INTERVAL_NS = 60_000_000_000
_MAX_JOURNALS_OF_A_PROCESS = 10_000
_NUM_SEGMENTS = 6
"""In ring mode: one that is written, four that hold the time asked for, one that straddles it."""


class Sink(Protocol):
    """A consumer of records.

    Calls come from one thread at a time. A sink that has an end of its own may have an attribute
    `is_ended`; once that is true it is let go, without counting as failed.
    """

    name: SinkName

    def thread(self, thread: int, started: ThreadStarted) -> None:
        """Learn of a thread, before any record of it."""

    def write(self, thread: int, records: Iterable[Record]) -> None:
        """Take records of one thread, oldest first."""

    def flush(self) -> None:
        """Bring what was taken to where it survives the process; called several times a second."""

    def close(self) -> None:
        """Flush and let go."""


class JournalSink:
    """Writes this process's journal into the run's folder: RUN_DIR/<role>.<pid>.journal.

    Numbered, if this process has written such a one before. In ring mode the journal is a chain of
    files, `<role>.<pid>.part00000.journal` and so on, each with header, clock anchor, threads and
    unfinished requests; files that are older than asked for are deleted.

    Args:
        max_bytes: size at which the recording ends (in ring mode, what all files together may
            have, roughly); None for no bound.
        ring_s: how many seconds to keep, None for all.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    name = SinkName.JOURNAL

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        role: str,
        rank: int = 0,
        title: str = "",
        max_bytes: int | None = None,
        ring_s: float | None = None,
    ) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.is_ended = False
        self._max_bytes = max_bytes
        self._segment_ns = None if ring_s is None else round(ring_s * 1e9 / (_NUM_SEGMENTS - 2))
        self._header = process_header(role, rank, title)
        self._threads: dict[int, ThreadStarted] = {}
        self._open_requests: dict[int, tuple[int, RequestArrived]] = {}
        self._segments: deque[Path] = deque()
        self._number = 0
        self._writer = self._begin_first(f"{role}.{os.getpid()}")

    @property
    def path(self) -> Path:
        """The file that is being written."""
        return self._writer.path

    def thread(self, thread: int, started: ThreadStarted) -> None:
        """Name a thread in the journal."""
        self._threads[thread] = started
        self._writer.write(started, thread=thread)

    def write(self, thread: int, records: Iterable[Record]) -> None:
        """Append records, up to the recording's end."""
        for record in records:
            if self.is_ended:
                return
            if self._segment_ns is not None:
                self._remember(thread, record)
            self._writer.write(record, thread=thread)
            self._keep_within_bounds()

    def flush(self) -> None:
        """Hand everything to the operating system, with a clock anchor once a minute."""
        if time.monotonic_ns() - self._anchored_ns >= _ANCHOR_INTERVAL_NS:
            self._write_anchor(self._writer)
        self._writer.flush()
        if self._writer.is_deleted:
            raise FileNotFoundError(f"{self._writer.path} was deleted while it was being written")

    def close(self) -> None:
        """Write a last clock anchor and close the file."""
        if self.is_ended:
            return
        self.is_ended = True
        try:
            self._write_anchor(self._writer)
        finally:
            self._writer.close()

    def _begin_first(self, name: str) -> JournalWriter:
        """Open the journal under a name of which neither one nor a chain of files is there yet."""
        for number in range(_MAX_JOURNALS_OF_A_PROCESS):
            self._stem = f"{name}.{number}" if number else name
            if any(self._folder.glob(f"{self._stem}.part*{SUFFIX}")):
                continue
            if (self._folder / f"{self._stem}{SUFFIX}").exists():
                continue
            try:
                return self._begin()
            except FileExistsError:  # another thread was quicker
                continue
        raise FileExistsError(
            f"{self._folder} holds {_MAX_JOURNALS_OF_A_PROCESS} journals of {name}"
        )

    def _begin(self) -> JournalWriter:
        """Open the journal, or its next file."""
        ending = "" if self._segment_ns is None else _part(self._number)
        writer = JournalWriter(self._folder / f"{self._stem}{ending}{SUFFIX}")
        self._number += 1
        try:
            writer.write(self._header)
            self._write_anchor(writer)
            for thread, started in self._threads.items():
                writer.write(started, thread=thread)
            for thread, arrived in self._open_requests.values():
                writer.write(arrived, thread=thread)
            writer.flush()
        except OSError:
            writer.discard()
            raise
        self._began_ns = time.monotonic_ns()
        self._begin_bytes = writer.num_bytes
        self._segments.append(writer.path)
        return writer

    def _write_anchor(self, writer: JournalWriter) -> None:
        anchor = read_clock_anchor()
        self._anchored_ns = anchor.monotonic_ns
        writer.write(anchor)

    def _remember(self, thread: int, record: Record) -> None:
        """Keep the names of requests that are under way, for the next file."""
        if isinstance(record, RequestArrived):
            self._open_requests[record.request_num] = thread, record
        elif isinstance(record, StepRecord):
            for request_num in record.finished:
                self._open_requests.pop(request_num, None)
        elif isinstance(record, EventRecord) and record.kind is Event.ABORT:
            for request_num, (_, arrived) in list(self._open_requests.items()):
                if arrived.request_id == record.request_id:
                    del self._open_requests[request_num]

    def _keep_within_bounds(self) -> None:
        num_bytes = self._writer.num_bytes
        if self._segment_ns is None:
            if self._max_bytes is not None and num_bytes >= self._max_bytes:
                self._end(num_bytes)
            return
        is_old = time.monotonic_ns() - self._began_ns >= self._segment_ns
        is_large = self._max_bytes is not None and (
            # A file that holds nothing yet but the names of requests does not count as large.
            num_bytes - self._begin_bytes >= self._max_bytes // _NUM_SEGMENTS
        )
        if is_old or is_large:
            self._rotate()

    def _rotate(self) -> None:
        self._writer.close()
        while len(self._segments) >= _NUM_SEGMENTS:
            self._segments.popleft().unlink(missing_ok=True)
        self._writer = self._begin()

    def _end(self, num_bytes: int) -> None:
        """Say that the recording is over, and close it."""
        event = EventRecord(Event.RECORDING_ENDED, time.monotonic_ns(), value=num_bytes)
        self._writer.write(event)
        _LOGGER.warning(
            "the recording %s has reached trace_max_bytes (%d bytes) and ends here",
            self._writer.path,
            num_bytes,
        )
        self.close()


def _part(number: int) -> str:
    return f".part{number:05d}"
