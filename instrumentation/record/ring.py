"""The ring: where a thread leaves its entries for the drain thread.

Knows its bound and how many entries it had no room for. Does not know what entries mean. Without
locks: one thread appends, one other takes, and each operation on the deque is atomic.
"""

from collections import deque
from typing import Any


class Ring:
    """A bounded queue between one thread and the drain thread; when full, new entries drop."""

    __slots__ = ("_capacity", "_entries", "name", "native_id", "num_dropped")

    def __init__(self, capacity: int, *, name: str, native_id: int) -> None:
        assert capacity > 0
        self._capacity = capacity
        self._entries: deque[Any] = deque()
        self.name = name
        self.native_id = native_id
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, entry: Any) -> None:
        """Leave an entry, or count it as dropped; the owner's thread only."""
        entries = self._entries
        if len(entries) < self._capacity:
            entries.append(entry)
        else:
            self.num_dropped += 1

    def take(self) -> list[Any]:
        """Remove what is there now, oldest first; the drain thread only."""
        popleft = self._entries.popleft
        return [popleft() for _ in range(len(self._entries))]
