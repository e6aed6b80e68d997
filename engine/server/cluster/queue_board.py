"""How much waits at each of several frontends, so that limits hold for the server as a whole.

    row of a frontend: [sequences that wait, their prompt tokens, sequences reserved, their tokens,
                        the engine's last step and what runs since, what it left of its budget]

One small file in the core's private folder, mapped by all. Each frontend writes its own row, a
number at a time, and reads those of the others: no lock, no message. Two that decide within the
same few microseconds do not see each other. The row of one that is stopped stays as it is until it
goes on, or dies. Knows no engine and no limits; see `QueueCounter` for the last two numbers.
"""

import mmap
import os
from collections.abc import MutableSequence
from pathlib import Path

_FILE_NAME = "queue"
_NUM_COLUMNS = 6
_ROW_LENGTH = 8
"""In numbers of eight bytes: what different processes write should not share a cache line."""


class QueueBoard:
    """The rows of all frontends.

    Args:
        directory: the private folder that all frontends of the core share.
        num_frontends: how many there are; they are numbered from 1.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, directory: str, num_frontends: int) -> None:
        self._num_frontends = num_frontends
        size = (num_frontends + 1) * _ROW_LENGTH * 8
        file = os.open(Path(directory) / _FILE_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Not `ftruncate`: on a full disk, a page that is not there kills whoever writes to it.
            os.posix_fallocate(file, 0, size)  # harmless where another frontend has done it
            self._map = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._numbers = memoryview(self._map).cast("q")

    def row(self, index: int) -> MutableSequence[int]:
        """A frontend's own row, for it to write."""
        at = index * _ROW_LENGTH
        return self._numbers[at : at + _NUM_COLUMNS]  # type: ignore[return-value]  # a memoryview of numbers

    def clear(self, index: int) -> None:
        """Nothing waits at a frontend any more: it is gone."""
        row = self.row(index)
        for column in range(_NUM_COLUMNS):
            row[column] = 0

    def others(self, index: int) -> tuple[int, int]:
        """Sequences and prompt tokens that wait, or have been promised room, at all others."""
        num_requests = num_tokens = 0
        for other in range(1, self._num_frontends + 1):
            if other != index:
                requests, tokens, reserved, reserved_tokens, *_ = self.row(other)
                num_requests += requests + reserved
                num_tokens += tokens + reserved_tokens
        return num_requests, num_tokens

    def newest(self) -> tuple[int, int]:
        """The last two numbers of whichever frontend has heard of the engine's last step."""
        rows = [self.row(index) for index in range(1, self._num_frontends + 1)]
        newest = max(rows, key=lambda row: row[4])
        return newest[4], newest[5]
