"""The journal file: records appended as length-prefixed msgpack frames.

Knows the file's format, for writing and for reading. Does not know when records come or what they
mean. A file that was cut off anywhere is good up to its last whole frame.

Layout: the magic, then frames of a little-endian header (payload length u32, thread u16) and the
payload. Threads are numbered from 0 in the order of their `ThreadStarted` records.
"""

import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from instrumentation.record.records import Record

MAGIC = b"isinglass journal 1\n"
SUFFIX = ".journal"
_HEADER = struct.Struct("<IH")
_MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
_BUFFER_BYTES = 256 * 1024
_FLUSH_INTERVAL_NS = 200_000_000
_MAX_NUMBER = 10_000


class JournalWriter:
    """Appends records to a new file.

    Records are gathered in memory and go to the operating system once 200 ms have passed at the
    next write, once 256 KiB have come together, at `flush` and at `close`. The caller flushes at
    least every 200 ms for that to hold while nothing is written.

    Raises:
        FileExistsError: there is such a file already.
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray(MAGIC)
        self._num_bytes_flushed = 0
        self._flushed_ns = time.monotonic_ns()
        try:
            self.flush()
        except OSError:
            self.discard()
            raise

    @property
    def num_bytes(self) -> int:
        """Size of the file once everything written so far is in it."""
        return self._num_bytes_flushed + len(self._buffer)

    def write(self, record: Record, *, thread: int = 0) -> None:
        """Append one record of the thread with that number."""
        buffer = self._buffer
        start = len(buffer)
        buffer += b"\0" * _HEADER.size
        self._encoder.encode_into(record, buffer, -1)
        _HEADER.pack_into(buffer, start, len(buffer) - start - _HEADER.size, thread)
        if (
            len(buffer) >= _BUFFER_BYTES
            or time.monotonic_ns() - self._flushed_ns >= _FLUSH_INTERVAL_NS
        ):
            self.flush()

    @property
    def is_deleted(self) -> bool:
        """Whether the file has lost its name: what is written to it will be gone."""
        return os.fstat(self._fd).st_nlink == 0

    def flush(self) -> None:
        """Hand everything to the operating system, where it survives this process."""
        with memoryview(self._buffer) as rest:
            num_written = 0
            while num_written < len(rest):
                num_written += os.write(self._fd, rest[num_written:])
        self._num_bytes_flushed += num_written
        self._buffer.clear()
        self._flushed_ns = time.monotonic_ns()

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if self._fd < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Close the file and remove it: nothing of use is in it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.path.unlink(missing_ok=True)


def open_numbered(folder: Path, stem: str) -> JournalWriter:
    """Open a new journal, `<stem><number>.journal` with the lowest number that is free.

    Raises:
        OSError: the file cannot be written, or there are ten thousand of them.
    """
    for number in range(_MAX_NUMBER):
        try:
            return JournalWriter(folder / f"{stem}{number}{SUFFIX}")
        except FileExistsError:
            continue
    raise FileExistsError(f"{folder} holds {_MAX_NUMBER} journals {stem}*")


@dataclass(frozen=True, slots=True)
class Journal:
    """What a journal file held."""

    path: Path
    frames: list[tuple[int, Record]] = field(repr=False)
    """(thread, record) in the order of writing, so in time order within a thread."""
    is_truncated: bool
    """Whether the file ended in the middle of a frame."""
    is_damaged: bool = False
    """Whether bytes follow the last frame that are not the beginning of another one."""


def read_journal(path: str | os.PathLike[str]) -> Journal:
    """Read a journal, up to its last whole frame.

    Raises:
        ValueError: the file is not a journal of a known version.
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    if not data.startswith(MAGIC):
        # A process that was killed while it opened its journal leaves part of the magic.
        if MAGIC.startswith(data):
            return Journal(Path(path), [], is_truncated=True)
        raise ValueError(
            f"{path} is not a journal that this version reads: it should begin with {MAGIC!r}, "
            f"not {data[: len(MAGIC)]!r}"
        )
    frames = []
    end = len(MAGIC)
    for thread, record, frame_end in _iter_frames(data):
        frames.append((thread, record))
        end = frame_end
    is_damaged = False
    if len(data) - end >= _HEADER.size:
        num_bytes, _ = _HEADER.unpack_from(data, end)
        # A writer that was killed leaves part of a frame, and nothing behind it.
        is_damaged = num_bytes > _MAX_PAYLOAD_BYTES or num_bytes <= len(data) - end - _HEADER.size
    return Journal(Path(path), frames, is_truncated=end < len(data), is_damaged=is_damaged)


def _iter_frames(data: bytes) -> Iterator[tuple[int, Record, int]]:
    """Yield (thread, record, end offset), stopping at the first frame that is not whole."""
    decoder = msgspec.msgpack.Decoder(Record)
    offset = len(MAGIC)
    with memoryview(data) as view:
        while offset + _HEADER.size <= len(data):
            num_bytes, thread = _HEADER.unpack_from(data, offset)
            begin = offset + _HEADER.size
            offset = begin + num_bytes
            if num_bytes > _MAX_PAYLOAD_BYTES or offset > len(data):
                return
            try:
                record = decoder.decode(view[begin:offset])
            except msgspec.DecodeError:
                return
            yield thread, record, offset
