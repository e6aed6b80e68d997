"""One reader of the live stream: frames on their way to it, a few at most.

A reader that does not keep up loses what waits for it, and goes on from a new snapshot that says
how many frames were lost. Knows no HTTP.
"""

import asyncio
from collections import deque

MAX_FRAMES = 64


class Watcher:
    """The frames that wait for one reader."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._is_closed = False
        self._has_begun = False
        self.num_lost = 0
        self.needs_snapshot = True
        """Whether frames would make no sense to it before it has got a snapshot."""

    def put(self, frame: bytes) -> None:
        """Hand a frame over; it is dropped, with those before it, where too many wait."""
        if self.needs_snapshot:
            self.num_lost += self._has_begun
        elif len(self._frames) >= MAX_FRAMES:
            self.num_lost += len(self._frames) + 1
            self._frames.clear()
            self.needs_snapshot = True
        else:
            self._frames.append(frame)
        self._news.set()

    def restart(self, snapshot: bytes) -> None:
        """Begin anew with a snapshot; frames from now on belong to it."""
        self._frames.clear()
        self._frames.append(snapshot)
        self.needs_snapshot, self.num_lost, self._has_begun = False, 0, True
        self._news.set()

    def void(self) -> None:
        """Have it begin anew, since what it knows is of no use any more."""
        self._frames.clear()
        self.needs_snapshot, self._has_begun = True, False
        self._news.set()

    def close(self) -> None:
        """End the stream behind what waits."""
        self._is_closed = True
        self._news.set()

    @property
    def is_closed(self) -> bool:
        """Whether nothing more will come."""
        return self._is_closed

    async def wait(self) -> None:
        """Until there are frames, or a snapshot is needed, or the end."""
        while not (self._frames or self.needs_snapshot or self._is_closed):
            self._news.clear()
            await self._news.wait()

    def take(self) -> bytes:
        """All frames that wait."""
        frames = b"".join(self._frames)
        self._frames.clear()
        return frames
