"""What the live page is told: a snapshot first, then what is new, a few times a second.

Knows what is read of the engine, and when. Does nothing at all while nobody watches; what several
watch is collected and encoded once. Of several frontends, each tells the feeds of the others of its
own requests, and a page gets them all. Lives on the server's event loop, so what it reads does not
change under it.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from engine.frontend.live_tap import LiveTap
from engine.frontend.observer import EngineObserver
from engine.log import get_logger
from engine.server.http.errors import ApiError
from engine.server.http.served import Phase
from engine.server.live.about import about
from engine.server.live.block_watch import BlockWatch
from engine.server.live.facts import (
    FIRST_TOKEN_COLUMNS,
    REQUEST_COLUMNS,
    STEP_COLUMNS,
    Facts,
    counted,
)
from engine.server.live.others import REQUEST_KEYS, OtherFrontends
from engine.server.live.watcher import Watcher
from engine.server.state import ServerState
from engine.types.block_map import CACHED_AGES_S, OWNED, SHARED

logger = get_logger(__name__)

INTERVAL_S = 0.12
MAX_WATCHERS = 16
NUM_STEPS = 512
WINDOW_S = 60.0
HEARTBEAT_S = 2.0
"""Something is said at least so often, so that the page notices a dead connection."""

_FRAME_BEGIN, _FRAME_END = b"data: ", b"\n\n"
_PROGRESS_INTERVAL_S = 0.5


class LiveFeed:
    """Watches the engine for those who watch the page."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        attachment = state.engine.attachment  # frontends of one core count from one instant
        self._facts = Facts(time.monotonic_ns() if attachment is None else attachment.began_ns)
        self._encoder = msgspec.json.Encoder()
        self._watchers: set[Watcher] = set()
        self._followers: set[Watcher] = set()
        """Feeds of other frontends, which want to know of our requests only."""
        self._others: OtherFrontends | None = None
        if state.peers is not None:
            self._others = OtherFrontends(
                state.peers, window_us=int(WINDOW_S * 1e6), on_loss=self._void
            )
        self._silent: list[int] = []
        self._task: asyncio.Task[None] | None = None
        self._tap: LiveTap | None = None
        self._phase: Phase | None = None
        self._recording: str | None = None
        self._last_num = -1
        self._progress: dict[int, int] = {}
        self._gaps: deque[tuple[int, list[int]]] = deque()
        self._blocks = BlockWatch(state.engine)
        self._progress_due_s = self._heartbeat_due_s = self._followers_due_s = 0.0

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
        if not self._watchers and self._others is not None:
            self._others.begin()
        self._watchers.add(watcher)
        if self._task is None:
            self._begin()
        return watcher

    async def tell_other(self) -> AsyncGenerator[bytes, None]:
        """All of our requests, and then what is new of them, for another frontend's feed."""
        follower = Watcher()
        self._followers.add(follower)
        if self._task is None:
            self._begin()
        try:
            while frames := await self.next_frames(follower):
                for frame in frames.split(_FRAME_END)[:-1]:
                    yield frame.removeprefix(_FRAME_BEGIN)
        finally:
            self.leave(follower)

    def leave(self, watcher: Watcher) -> None:
        """Watch no longer; harmless when called twice."""
        self._watchers.discard(watcher)
        self._followers.discard(watcher)
        if not self._watchers:
            self._gaps.clear()
            self._blocks.forget()
            if self._others is not None:
                self._others.end()
        if not self._watchers and not self._followers:
            self._end()

    async def next_frames(self, watcher: Watcher) -> bytes:
        """What to send next, as soon as there is something; empty at the stream's end."""
        await watcher.wait()
        if watcher.needs_snapshot and not watcher.is_closed:
            self._flush()
            num_lost = watcher.num_lost
            if watcher in self._followers:
                content = {"kind": "snapshot"} | self._requests()
            else:
                content = self.snapshot() | {"num_lost": num_lost}
            watcher.restart(self._frame(content))
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
            "silent": self._silent,
            "recording": self._run_dir,
        }
        if observer is None:
            return snapshot
        requests = self._requests()
        if self._others is not None:
            for kind, rows in self._others.snapshot().items():
                requests[kind] += rows
        return snapshot | {
            "steps": [facts.step(*one) for one in observer.history.steps()[-NUM_STEPS:]],
            **requests,
            "gaps": list(self._gaps),
            "map": self._blocks.shown,
        }

    @property
    def _run_dir(self) -> str | None:
        """Where a recording goes, whoever has begun it; None without one."""
        engine = self._state.engine
        is_recording = engine.is_running and engine.llm_engine.obs.is_recording
        return engine.run_dir if is_recording else None

    def _requests(self) -> dict[str, list[Any]]:
        """This frontend's requests: those that have ended of late, and those that have not."""
        observer = self._state.engine.observer
        if observer is None:
            return {"ended": [], "unfinished": []}
        since_ns = time.monotonic_ns() - int(WINDOW_S * 1e9)
        output_processor = self._state.engine.llm_engine.output_processor
        ended = [one for one in observer.history.finished_requests() if one.end_ns >= since_ns]
        return {
            "ended": [self._facts.request(one) for one in ended],
            "unfinished": [
                self._facts.request(one) for one in output_processor.timelines_since(-1)
            ],
        }

    def delta(self) -> dict[str, Any]:
        """What is new of this process since the last call; only what there is."""
        delta: dict[str, Any] = {}
        phase = self._state.phase
        if phase is not self._phase:
            self._phase = phase
            delta["phase"] = phase.value
        if self._run_dir != self._recording:
            delta["recording"] = self._recording = self._run_dir
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
            if self._watchers:
                delta["steps"] = [facts.step(*one) for one in tap.steps]
            tap.steps.clear()
            self._blocks.has_stepped = True
        if tap.first_tokens:
            delta["first_tokens"] = [facts.first_token(one) for one in tap.first_tokens]
            tap.first_tokens.clear()
        if tap.ended:
            delta["ended"] = [facts.request(one) for one in tap.ended]
            tap.ended.clear()
        if tap.token_gaps_ns:
            delta["gaps"] = counted(tap.token_gaps_ns)
            tap.token_gaps_ns.clear()
        return delta | self._levels()

    def _add_others(self, delta: dict[str, Any]) -> None:
        """Add what the other frontends have told of since the last call."""
        assert self._others is not None
        for key, values in self._others.take().items():
            delta[key] = [*delta.get(key, ()), *values]
        if self._others.silent != self._silent:
            delta["silent"] = self._silent = self._others.silent

    def _keep_gaps(self, gaps: list[int]) -> None:
        """Keep times between tokens for snapshots to come."""
        now = self._facts.time(time.monotonic_ns())
        assert now is not None
        self._gaps.append((now, gaps))
        while self._gaps[0][0] < now - WINDOW_S * 1e6:
            self._gaps.popleft()

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
        if (new_map := self._blocks.take()) is not None:
            levels["map"] = new_map
        return levels

    # -- the rounds ------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._phase, self._recording = self._state.phase, self._run_dir
        self._hang_up(self._state.engine.observer)
        self._task = asyncio.create_task(self._run(), name="live feed")

    def _hang_up(self, observer: EngineObserver | None) -> None:
        """Have everything from now on told, if there is somebody to tell it."""
        if observer is None or observer.tap is not None:
            return
        self._tap = observer.tap = LiveTap()
        unfinished = self._state.engine.llm_engine.output_processor.timelines_since(-1)
        self._last_num = max((one.request_num for one in unfinished), default=-1)
        self._blocks.has_stepped = True

    def _end(self) -> None:
        task, self._task, self._tap = self._task, None, None
        if task is not None:
            task.cancel()
        observer = self._state.engine.observer
        if observer is not None:
            observer.tap = None

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
            self._void()
            for follower in self._followers:
                follower.void()
        self._flush()
        if engine.dead_error is not None:
            self._broadcast({"kind": "end", "reason": str(engine.dead_error)})
            self._close_all()
        elif self._watchers and self._tap is not None:
            self._blocks.ask(time.monotonic())

    def _flush(self) -> None:
        delta = self.delta()
        now_s = time.monotonic()
        if self._followers:
            requests = {key: delta[key] for key in REQUEST_KEYS if key in delta}
            if requests or now_s >= self._followers_due_s:
                self._followers_due_s = now_s + HEARTBEAT_S
                frame = self._frame({"kind": "delta"} | requests)
                for follower in self._followers:
                    follower.put(frame)
        if not self._watchers:
            return
        if self._others is not None:
            self._add_others(delta)
        if "gaps" in delta:
            self._keep_gaps(delta["gaps"])
        if delta or now_s >= self._heartbeat_due_s:
            self._heartbeat_due_s = now_s + HEARTBEAT_S
            self._broadcast({"kind": "delta"} | delta)

    def _void(self) -> None:
        """Have pages begin anew: what they know is of no use any more."""
        for watcher in self._watchers:
            watcher.void()

    def _broadcast(self, content: dict[str, Any]) -> None:
        content["now"] = self._facts.time(time.monotonic_ns())
        frame = self._frame(content)
        for watcher in self._watchers:
            watcher.put(frame)

    def _frame(self, content: dict[str, Any]) -> bytes:
        return _FRAME_BEGIN + self._encoder.encode(content) + _FRAME_END

    def _close_all(self) -> None:
        for watcher in [*self._watchers, *self._followers]:
            watcher.close()
