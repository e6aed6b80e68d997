"""How much waits at each of several frontends, so that limits hold for the server as a whole.

    row of a frontend: [sequences that wait, their prompt tokens, sequences reserved, their tokens]

One small file in the core's private folder, mapped by all. Each frontend writes its own row, a
number at a time, and reads those of the others: no lock, no message. Two that decide within the
same few microseconds do not see each other. Knows no engine and no limits.
"""

import mmap
import os
from collections.abc import MutableSequence
from pathlib import Path

_FILE_NAME = "queue"
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
            os.ftruncate(file, size)  # harmless where another frontend has done it
            self._map = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._numbers = memoryview(self._map).cast("q")

    def row(self, index: int) -> MutableSequence[int]:
        """A frontend's own row, for it to write: what waits, and what has been reserved."""
        at = index * _ROW_LENGTH
        return self._numbers[at : at + 4]  # type: ignore[return-value]  # a memoryview of numbers

    def clear(self, index: int) -> None:
        """Nothing waits at a frontend: it is new, or gone."""
        row = self.row(index)
        for column in range(4):
            row[column] = 0

    def others(self, index: int) -> tuple[int, int]:
        """Sequences and prompt tokens that wait, or have been promised room, at all others."""
        num_requests = num_tokens = 0
        for other in range(1, self._num_frontends + 1):
            if other != index:
                requests, tokens, reserved, reserved_tokens = self.row(other)
                num_requests += requests + reserved
                num_tokens += tokens + reserved_tokens
        return num_requests, num_tokens
