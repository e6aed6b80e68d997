"""What the other frontends over the same core tell the live view of their requests.

Follows each of them while somebody watches here, and keeps what a page that is opened later needs.
Rows are those of `engine.server.live.facts`, from the same instant in all processes. Knows no page.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from engine.server.cluster.peers import PeerError, Peers
from engine.server.live.facts import FIRST_TOKEN_COLUMNS, REQUEST_COLUMNS

SILENCE_S = 5.0
"""Another frontend says something every two seconds; one that says nothing for so long is lost."""

REQUEST_KEYS = ("arrived", "first_tokens", "ended", "progress", "gaps")
"""The parts of a delta that are about a frontend's own requests."""

_QUESTION = "live"
_RETRY_S = 1.0
_END, _NUM_GENERATED = REQUEST_COLUMNS.index("end"), REQUEST_COLUMNS.index("num_generated")
_FIRST_TOKEN_TO_REQUEST = tuple(map(REQUEST_COLUMNS.index, FIRST_TOKEN_COLUMNS))

Row = list[Any]


class OtherFrontends:
    """The requests of all frontends but this one.

    Args:
        peers: the way to them.
        window_us: how long requests that have ended are kept.
        on_loss: called when requests that have been told of are not known any more.
    """

    def __init__(self, peers: Peers, *, window_us: int, on_loss: Callable[[], None]) -> None:
        self._peers = peers
        self._window_us = window_us
        self._on_loss = on_loss
        self._known: dict[int, _Requests] = {}
        self._silent: set[int] = set()
        self._news: dict[str, list[Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Follow them from now on."""
        self._tasks = [
            asyncio.create_task(self._follow(other), name=f"follow frontend {other}")
            for other in self._peers.others
        ]

    def end(self) -> None:
        """Follow them no longer, and forget what they have told."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._known.clear()
        self._silent.clear()
        self._news.clear()

    @property
    def silent(self) -> list[int]:
        """Those that have been asked, and tell nothing."""
        return sorted(self._silent)

    def take(self) -> dict[str, list[Any]]:
        """What is new since the last call, as parts of a delta."""
        news, self._news = self._news, {}
        return news

    def snapshot(self) -> dict[str, list[Row]]:
        """All that is known: rows of requests that ended of late, and of those under way."""
        return {
            "ended": [row for one in self._known.values() for row in one.ended],
            "unfinished": [row for one in self._known.values() for row in one.unfinished.values()],
        }

    async def _follow(self, other: int) -> None:
        while True:
            with contextlib.suppress(PeerError, TimeoutError):
                messages = self._peers.follow(other, _QUESTION)
                async with contextlib.aclosing(messages):
                    while True:
                        async with asyncio.timeout(SILENCE_S):
                            message = await anext(messages)
                        self._take(other, msgspec.json.decode(message))
            self._silent.add(other)
            self._lose(other)
            await asyncio.sleep(_RETRY_S)

    def _take(self, other: int, message: Mapping[str, Any]) -> None:
        if message["kind"] == "snapshot":
            self._silent.discard(other)
            self._lose(other)
            self._known[other] = known = _Requests(self._window_us)
            known.keep(message["unfinished"], message["ended"])
            self._tell({"arrived": message["unfinished"], "ended": message["ended"]})
        elif other in self._known:
            self._known[other].take(message)
            self._tell({key: message[key] for key in REQUEST_KEYS if key in message})

    def _tell(self, news: Mapping[str, list[Any]]) -> None:
        for key, values in news.items():
            if values:
                self._news.setdefault(key, []).extend(values)

    def _lose(self, other: int) -> None:
        if self._known.pop(other, None) is not None:
            self._news.clear()  # whoever watches gets a snapshot
            self._on_loss()


class _Requests:
    """One frontend's requests, as rows."""

    def __init__(self, window_us: int) -> None:
        self._window_us = window_us
        self.unfinished: dict[int, Row] = {}
        self.ended: deque[Row] = deque()

    def keep(self, unfinished: Iterable[Row], ended: Iterable[Row]) -> None:
        """These are under way, those have ended."""
        for row in unfinished:
            self.unfinished[row[0]] = row
        for row in ended:
            self.unfinished.pop(row[0], None)
            self.ended.append(row)
            while self.ended[0][_END] < row[_END] - self._window_us:
                self.ended.popleft()

    def take(self, delta: Mapping[str, Any]) -> None:
        """Follow a delta."""
        self.keep(delta.get("arrived", ()), ())
        for values in delta.get("first_tokens", ()):
            if (row := self.unfinished.get(values[0])) is not None:
                for column, value in zip(_FIRST_TOKEN_TO_REQUEST, values, strict=True):
                    row[column] = value
        progress = delta.get("progress", ())
        for num, num_generated in zip(progress[::2], progress[1::2], strict=True):
            if num in self.unfinished:
                self.unfinished[num][_NUM_GENERATED] = num_generated
        self.keep((), delta.get("ended", ()))
