"""What the live page is told: a snapshot first, then what is new, a few times a second.

Knows what is read of the engine, and when. Does nothing at all while nobody watches; what several
watch is collected and encoded once. Lives on the server's event loop, so what it reads does not
change under it.
"""

import asyncio
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np

from engine.errors import EngineDeadError, IsinglassError
from engine.frontend.live_tap import LiveTap
from engine.frontend.observer import EngineObserver
from engine.log import get_logger
from engine.server.errors import ApiError
from engine.server.live.about import about
from engine.server.live.facts import (
    FIRST_TOKEN_COLUMNS,
    REQUEST_COLUMNS,
    STEP_COLUMNS,
    Facts,
    counted,
)
from engine.server.live.watcher import Watcher
from engine.server.state import Phase, ServerState
from engine.types.block_map import CACHED_AGES_S, OWNED, SHARED

logger = get_logger(__name__)

INTERVAL_S = 0.12
MAX_WATCHERS = 16
NUM_STEPS = 512
WINDOW_S = 60.0
HEARTBEAT_S = 2.0
"""Something is said at least so often, so that the page notices a dead connection."""

_PROGRESS_INTERVAL_S = 0.5
_MAP_INTERVAL_S = 0.5
_IDLE_MAP_INTERVAL_S = 10.0
_MAP_SHARE = 200
"""A block map is asked for again after at least this many times what the last one took."""


class LiveFeed:
    """Watches the engine for those who watch the page."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._facts = Facts(time.monotonic_ns())
        self._encoder = msgspec.json.Encoder()
        self._watchers: set[Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._tap: LiveTap | None = None
        self._phase: Phase | None = None
        self._last_num = -1
        self._progress: dict[int, int] = {}
        self._gaps: deque[tuple[int, list[int]]] = deque()
        self._map: dict[str, Any] | None = None
        self._new_map: dict[str, Any] | None = None
        self._map_call: asyncio.Task[None] | None = None
        self._map_due_s = self._progress_due_s = self._heartbeat_due_s = 0.0
        self._stepped_since_map = True
        self._map_failed = False
        """Whether the log has been told."""

    def join(self) -> Watcher:
        """Begin to watch; call `leave` in the end.

        Raises:
            ApiError: 503, as many as may are watching already.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise ApiError(
                503,
                f"{MAX_WATCHERS} live views are open already; close one",
                code="too_many_live_views",
                headers={"Retry-After": "10"},
            )
        watcher = Watcher()
        self._watchers.add(watcher)
        if self._task is None:
            self._begin()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Watch no longer; harmless when called twice."""
        self._watchers.discard(watcher)
        if not self._watchers:
            self._end()

    async def next_frames(self, watcher: Watcher) -> bytes:
        """What to send next, as soon as there is something; empty at the stream's end."""
        await watcher.wait()
        if watcher.needs_snapshot and not watcher.is_closed:
            self._flush()
            num_lost = watcher.num_lost
            watcher.restart(self._frame(self.snapshot() | {"num_lost": num_lost}))
        return watcher.take()

    # -- what is told --------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """All that the page starts from."""
        state, observer = self._state, self._state.engine.observer
        facts, now_ns = self._facts, time.monotonic_ns()
        snapshot: dict[str, Any] = {
            "kind": "snapshot",
            "now": facts.time(now_ns),
            "phase": state.phase.value,
            "about": about(state, base_ns=facts.base_ns),
            "columns": {
                "step": STEP_COLUMNS,
                "request": REQUEST_COLUMNS,
                "first_token": FIRST_TOKEN_COLUMNS,
            },
            "codes": {"cached_ages_s": CACHED_AGES_S, "shared": SHARED, "owned": OWNED},
            "window_s": WINDOW_S,
            "has_statistics": observer is not None or state.phase is Phase.STARTING,
        }
        if observer is None:
            return snapshot
        history = observer.history
        since_ns = now_ns - int(WINDOW_S * 1e9)
        output_processor = state.engine.llm_engine.output_processor
        self._progress = dict(output_processor.progress())
        return snapshot | {
            "steps": [facts.step(*one) for one in history.steps()[-NUM_STEPS:]],
            "ended": [
                facts.request(one) for one in history.finished_requests() if one.end_ns >= since_ns
            ],
            "unfinished": [facts.request(one) for one in output_processor.timelines_since(-1)],
            "gaps": list(self._gaps),
            "map": self._map,
        }

    def delta(self) -> dict[str, Any]:
        """What is new since the last call; only what there is."""
        delta: dict[str, Any] = {}
        phase = self._state.phase
        if phase is not self._phase:
            self._phase = phase
            delta["phase"] = phase.value
        tap = self._tap
        if tap is None:
            return delta
        facts = self._facts
        output_processor = self._state.engine.llm_engine.output_processor
        arrived = output_processor.timelines_since(self._last_num)
        if arrived:
            self._last_num = arrived[-1].request_num
            delta["arrived"] = [facts.request(one) for one in arrived]
        if tap.steps:
            delta["steps"] = [facts.step(*one) for one in tap.steps]
            tap.steps.clear()
            self._stepped_since_map = True
        if tap.first_tokens:
            delta["first_tokens"] = [facts.first_token(one) for one in tap.first_tokens]
            tap.first_tokens.clear()
        if tap.ended:
            delta["ended"] = [facts.request(one) for one in tap.ended]
            tap.ended.clear()
        if tap.token_gaps_ns:
            now = facts.time(time.monotonic_ns())
            assert now is not None
            delta["gaps"] = gaps = counted(tap.token_gaps_ns)
            self._gaps.append((now, gaps))
            tap.token_gaps_ns.clear()
            while self._gaps[0][0] < now - WINDOW_S * 1e6:
                self._gaps.popleft()
        return delta | self._levels()

    def _levels(self) -> dict[str, Any]:
        """Tokens of requests, and the block map: told as they stand, less often."""
        levels: dict[str, Any] = {}
        now_s = time.monotonic()
        if now_s >= self._progress_due_s:
            self._progress_due_s = now_s + _PROGRESS_INTERVAL_S
            progress = self._state.engine.llm_engine.output_processor.progress()
            before = self._progress
            new = [n for pair in progress if before.get(pair[0], 0) != pair[1] for n in pair]
            if new:
                self._progress = dict(progress)
                levels["progress"] = new
        if self._new_map is not None:
            if self._new_map != self._map:
                levels["map"] = self._map = self._new_map
            self._new_map = None
        return levels

    # -- the rounds ------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._phase = self._state.phase
        self._hang_up(self._state.engine.observer)
        self._task = asyncio.create_task(self._run(), name="live feed")

    def _hang_up(self, observer: EngineObserver | None) -> None:
        """Have everything from now on told, if there is somebody to tell it."""
        if observer is None or observer.tap is not None:
            return
        self._tap = observer.tap = LiveTap()
        unfinished = self._state.engine.llm_engine.output_processor.timelines_since(-1)
        self._last_num = max((one.request_num for one in unfinished), default=-1)
        self._stepped_since_map = True

    def _end(self) -> None:
        task, self._task, self._tap = self._task, None, None
        if task is not None:
            task.cancel()
        observer = self._state.engine.observer
        if observer is not None:
            observer.tap = None
        self._gaps.clear()
        self._map = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                self._round()
            except Exception:  # ours; the engine goes on, and the page says that it lost the feed
                logger.exception("the live view failed")
                self._close_all()

    def _round(self) -> None:
        engine = self._state.engine
        if self._tap is None and engine.observer is not None:
            self._hang_up(engine.observer)
            for watcher in self._watchers:
                watcher.void()
        self._flush()
        if engine.dead_error is not None:
            self._broadcast({"kind": "end", "reason": str(engine.dead_error)})
            self._close_all()
        elif self._tap is not None and self._map_call is None:
            self._ask_for_map(time.monotonic())

    def _flush(self) -> None:
        delta = self.delta()
        if delta or time.monotonic() >= self._heartbeat_due_s:
            self._broadcast({"kind": "delta"} | delta)

    def _broadcast(self, content: dict[str, Any]) -> None:
        self._heartbeat_due_s = time.monotonic() + HEARTBEAT_S
        content["now"] = self._facts.time(time.monotonic_ns())
        frame = self._frame(content)
        for watcher in self._watchers:
            watcher.put(frame)

    def _frame(self, content: dict[str, Any]) -> bytes:
        return b"data: " + self._encoder.encode(content) + b"\n\n"

    def _close_all(self) -> None:
        for watcher in list(self._watchers):
            watcher.close()

    # -- the block map ---------------------------------------------------------------------------

    def _ask_for_map(self, now_s: float) -> None:
        idle_s = 0.0 if self._stepped_since_map else _IDLE_MAP_INTERVAL_S
        if now_s >= self._map_due_s + idle_s:
            self._stepped_since_map = False
            self._map_call = asyncio.create_task(self._fetch_map(now_s), name="block map")

    async def _fetch_map(self, now_s: float) -> None:
        try:
            answer = await self._state.engine.kv_block_map()
        except EngineDeadError:
            return  # the next round says so
        except IsinglassError as error:
            if not self._map_failed:
                logger.warning("the live view has no block map: %s", error)
            self._map_failed = True
            self._map_due_s = now_s + _IDLE_MAP_INTERVAL_S
            return
        finally:
            self._map_call = None
        took_s = answer["took_ns"] / 1e9
        self._map_due_s = now_s + max(_MAP_INTERVAL_S, _MAP_SHARE * took_s)
        codes = np.frombuffer(answer["codes"], dtype="<u2")
        self._new_map = {"runs": _runs(codes), "owners": answer["owners"]}


def _runs(codes: "np.ndarray[Any, np.dtype[np.uint16]]") -> list[int]:
    """Flat pairs: code, how many blocks in a row have it, ..."""
    begins = np.flatnonzero(np.diff(codes, prepend=codes[0] + 1))  # [num_runs]
    lengths = np.diff(begins, append=len(codes))  # [num_runs]
    return np.stack([codes[begins], lengths], axis=1).reshape(-1).tolist()
