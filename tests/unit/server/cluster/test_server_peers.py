"""Frontends that ask each other, over engines made for the purpose: what one tells of all, and what
it says of those that do not answer."""

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from engine.api.async_llm import AsyncLLM
from engine.config import EngineConfig
from engine.errors import EngineDeadError, IsinglassError
from engine.frontend.observer import make_observer
from engine.server.admin import control, debug, load
from engine.server.cluster import peers
from engine.server.cluster.peers import PeerError, Peers
from engine.server.config import ServerConfig
from engine.server.http.errors import add_error_handlers
from engine.server.http.observe import observe
from engine.server.http.route_names import RouteNames
from engine.server.http.served import Phase
from engine.server.live import others
from engine.server.live.facts import REQUEST_COLUMNS
from engine.server.live.feed import LiveFeed
from engine.server.openai import chat, completions
from engine.server.state import ServerState
from engine.types.attachment import CoreAttachment
from instrumentation import NULL, ObservabilityConfig, RequestTimeline
from tests.fakes import FakeRequests
from tests.waiting import PATIENCE_S, until

BEGAN_NS = time.monotonic_ns()


class FakeEngine:
    """One of several frontends' engines, of which only the outside is there."""

    model_name = "tiny"
    labelled_name = None
    num_unfinished = 0
    is_running = False
    dead_error = None

    def __init__(self, directory: Path, index: int, *, run_dir: str | None = None) -> None:
        self.config = EngineConfig.from_kwargs()
        self.metric_sources: list[Any] = []
        self.metric_exporters: list[Any] = []
        self.observer = make_observer(ObservabilityConfig(), NULL, model_name="m")
        self.requests = FakeRequests()
        self.llm_engine = SimpleNamespace(
            output_processor=self.requests, tracer=SimpleNamespace(is_on=False)
        )
        self.attachment = CoreAttachment(
            directory=str(directory),
            client_index=index,
            first_request_num=index * 1000,
            core_pid=1,
            began_ns=BEGAN_NS,
            death_fd=0,
            run_dir=run_dir,
        )
        self.early_end = ""
        self._nums = itertools.count(self.attachment.first_request_num)
        self.recorded: list[str] = [] if run_dir is None else [run_dir]
        self.is_recording = run_dir is not None

    async def kv_block_map(self) -> dict[str, Any]:
        return {"codes": b"\0\0", "owners": [], "took_ns": 1000}

    async def start_trace(self) -> str:
        if not await self.join_recording("runs/run-1"):
            raise IsinglassError("a recording is being written already")
        return "runs/run-1"

    async def stop_trace(self) -> str | None:
        return self.recorded[-1] if await self.leave_recording() else None

    async def join_recording(self, run_dir: str) -> bool:
        if self.is_recording:
            return False
        self.is_recording = True
        self.recorded.append(run_dir)
        return True

    async def leave_recording(self) -> bool:
        was_recording, self.is_recording = self.is_recording, False
        return was_recording

    def begin(self, name: str) -> RequestTimeline:
        """A request has arrived."""
        num = next(self._nums)
        now_ns = time.monotonic_ns()
        one = RequestTimeline(request_id=name, request_num=num, arrival_ns=now_ns)
        self.requests.unfinished[num] = one
        return one

    def end(self, one: RequestTimeline) -> None:
        """It has ended."""
        del self.requests.unfinished[one.request_num]
        one.finish_reason = "stop"
        one.first_token_ns = one.last_token_ns = one.delivered_ns = time.monotonic_ns()
        assert self.observer is not None
        self.observer.observe_ended([one])


class Frontend:
    """One of several: its engine, its application, its way to the others."""

    def __init__(self, directory: Path, index: int, count: int, **engine: Any) -> None:
        self.engine = FakeEngine(directory, index, **engine)
        config = ServerConfig(api_server_count=count)
        self.state = ServerState(self.engine, config)  # type: ignore[arg-type]
        self.state.phase = Phase.READY
        assert self.state.peers is not None
        self.peers = self.state.peers
        self.app = FastAPI()
        self.app.state.server = self.state
        add_error_handlers(self.app)
        observation = observe(self.app, self.state, lambda: RouteNames(self.app.routes))
        self.state.observation = observation
        self.app.include_router(control.router)
        for routes in (debug, load, completions, chat):
            self.app.include_router(routes.router)
        debug.answer_peers(self.peers, self.state, observation)
        load.answer_peers(self.peers, self.state)
        self.state.recording.answer_peers()
        self.feed = LiveFeed(self.state)
        self.peers.tellers["live"] = self.feed.tell_other

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)


@contextlib.asynccontextmanager
async def frontends(directory: Path, num_running: int, count: int) -> AsyncIterator[list[Frontend]]:
    """So many of them, of which so many are there."""
    running = [Frontend(directory, index, count) for index in range(1, num_running + 1)]
    try:
        for one in running:
            await one.peers.start()
        yield running
    finally:
        for one in running:
            await one.peers.close()


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test's coroutine."""

    def run(tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(tmp_path), PATIENCE_S))

    return run


@contextlib.contextmanager
def errors_of_ours() -> Iterator[list[BaseException]]:
    """What has been logged as a failure of a frontend's own."""
    errors: list[BaseException] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers.logger, "exception", lambda *_: errors.append(sys.exc_info()[1]))
        yield errors


# -- the way ---------------------------------------------------------------------------------------


@on_loop
async def test_all_are_asked_at_once_and_those_that_do_not_answer_are_named(folder: Path) -> None:
    made = [Peers(str(folder), index, 5) for index in (1, 2, 3, 4)]  # the fifth is not there
    me, quick, slow, broken = made
    left = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    async def fail() -> None:
        raise KeyError("ours")

    async def double(number: int) -> dict[str, int]:
        return {"twice": 2 * number}

    quick.answerers["double"] = double
    slow.answerers["double"] = lambda _: hang()
    broken.answerers["double"] = lambda _: fail()
    for one in made:
        await one.start()
    began_s = time.monotonic()
    answers = await me.ask("double", 21, timeout_s=1.0)  # one of them would hang for ever
    assert time.monotonic() - began_s >= 1.0
    assert answers == ({2: {"twice": 42}}, (3, 4, 5))
    assert (await me.ask("unheard of", timeout_s=0.1)).silent == (2, 3, 4, 5)
    for one in made:
        await one.close()
    assert left.is_set()
    assert (await me.ask("double", 21)).silent == (2, 3, 4, 5)


@on_loop
async def test_a_follower_hears_all_until_either_side_leaves(folder: Path) -> None:
    me, other = Peers(str(folder), 1, 2), Peers(str(folder), 2, 2)
    left = asyncio.Event()

    async def count(first: int) -> AsyncGenerator[int, None]:
        try:
            for number in range(first, first + 3):
                yield number
            await asyncio.Event().wait()
        finally:
            left.set()

    other.tellers["count"] = count
    await other.start()
    async with contextlib.aclosing(me.follow(2, "count", 7)) as numbers:
        assert [await anext(numbers) for _ in range(3)] == [7, 8, 9]
    await asyncio.wait_for(left.wait(), PATIENCE_S)
    numbers = me.follow(2, "count", 1)
    assert await anext(numbers) == 1
    await other.close()
    with pytest.raises(PeerError):
        async for _ in numbers:
            pass
    with pytest.raises(PeerError):
        await anext(me.follow(2, "count", 1))


@on_loop
async def test_what_fails_in_a_teller_is_logged_and_ends_its_telling(folder: Path) -> None:
    me, other = Peers(str(folder), 1, 2), Peers(str(folder), 2, 2)
    ended = []

    async def fail(at: int) -> AsyncGenerator[Any, None]:
        try:
            yield 0
            if at == 1:
                raise KeyError("ours")
            yield object()  # which cannot be sent
        finally:
            ended.append(at)

    other.tellers["fail"] = fail
    await other.start()
    for at, error in ((1, KeyError), (2, TypeError)):
        with errors_of_ours() as logged:
            numbers = me.follow(2, "fail", at)
            assert await anext(numbers) == 0
            with pytest.raises(PeerError):
                await anext(numbers)
        assert [type(one) for one in logged] == [error]
    assert ended == [1, 2]
    await other.close()


@on_loop
async def test_an_answer_that_cannot_be_sent_is_none(folder: Path) -> None:
    async def answer() -> Any:
        return object()

    me, other = Peers(str(folder), 1, 2), Peers(str(folder), 2, 2)
    other.answerers["answer"] = answer
    await other.start()
    with errors_of_ours() as logged:
        with pytest.raises(PeerError, match="TypeError"):
            await me._ask_one(2, ["answer"], 2)
        assert (await me.ask("answer")).silent == (2,)
    assert [type(one) for one in logged] == [TypeError, TypeError]
    await other.close()


@on_loop
async def test_whoever_takes_the_place_of_one_that_died_is_heard(folder: Path) -> None:
    async def name() -> str:
        return "second"

    me, dead, second = Peers(str(folder), 1, 2), Peers(str(folder), 2, 2), Peers(str(folder), 2, 2)
    second.answerers["name"] = name
    await dead.start()  # and its socket stays
    await second.start()
    assert (await me.ask("name")).by_index == {2: "second"}
    await dead.close()
    await second.close()


# -- requests --------------------------------------------------------------------------------------


@on_loop
async def test_requests_of_all_frontends_are_listed_in_order(folder: Path) -> None:
    async with frontends(folder, 2, 2) as (one, two):
        for number in range(6):
            engine = (one, two)[number % 2].engine
            engine.end(engine.begin(f"ended-{number}"))
        for number, frontend in enumerate((two, one)):
            frontend.engine.begin(f"running-{number}")
        for asked in (one, two):
            listed = (await asked.ask("GET", "/debug/requests", params={"limit": 3})).json()
            assert [(o["id"], o["frontend"]) for o in listed["finished"]] == [
                ("ended-3", 2),
                ("ended-4", 1),
                ("ended-5", 2),
            ]
            assert [(o["id"], o["frontend"]) for o in listed["unfinished"]] == [
                ("running-0", 2),
                ("running-1", 1),
            ]
            assert listed["frontends"] == {"answered": [1, 2], "silent": []}
            assert listed["http"][-1]["state"] == "under way"  # this one


@on_loop
async def test_a_request_is_found_wherever_it_is(folder: Path) -> None:
    async with frontends(folder, 2, 2) as (one, two):
        for number, frontend in ((0, one), (1, two), (1, one)):
            frontend.engine.end(frontend.engine.begin(f"cmpl-r{number}"))
        for asked in (one, two):
            story = (await asked.ask("GET", "/debug/requests/r0")).json()
            assert [(o["id"], o["frontend"]) for o in story["sequences"]] == [("cmpl-r0", 1)]
            both = (await asked.ask("GET", "/debug/requests/r1")).json()
            assert {o["frontend"] for o in both["sequences"]} == {1, 2}
            assert both["frontends"] == {"answered": [1, 2], "silent": []}
            text = await asked.ask("GET", "/debug/requests/r1", headers={"Accept": "text/plain"})
            assert text.text.count("request cmpl-r1 (stop)") == 2
            unknown = await asked.ask("GET", "/debug/requests/nobody")
            assert unknown.status_code == 404
            assert "not answered" not in unknown.text
            assert "died" not in unknown.text
        two.engine.attachment = msgspec.structs.replace(two.engine.attachment, life=1)
        unknown = await one.ask("GET", "/debug/requests/nobody")
        assert "What frontend 2 knew before it died" in unknown.json()["error"]["message"]


@on_loop
async def test_an_answer_says_what_it_lacks(folder: Path) -> None:
    async with frontends(folder, 2, 3) as (one, two):
        two.engine.end(two.engine.begin("cmpl-r1"))
        listed = (await one.ask("GET", "/debug/requests")).json()
        assert listed["frontends"]["silent"] == [3]
        assert "frontend 3 has not answered in time" in listed["frontends"]["note"]
        assert [o["id"] for o in listed["finished"]] == ["cmpl-r1"]
        story = (await one.ask("GET", "/debug/requests/r1")).json()
        assert story["frontends"]["answered"] == [1, 2]
        assert "frontend 3 has" in story["frontends"]["note"]
        for options in ({}, {"headers": {"Accept": "text/plain"}}):
            for name in ("r1", "nobody"):
                answer = await one.ask("GET", f"/debug/requests/{name}", **options)
                assert "frontend 3 has not answered in time" in answer.text


@on_loop
async def test_a_frontend_that_hangs_holds_nobody_up_for_long(folder: Path) -> None:
    async with frontends(folder, 2, 2) as (one, two):

        async def hang(*_: Any) -> None:
            await asyncio.Event().wait()

        two.peers.answerers |= {"requests": hang, "request": hang}
        one.engine.begin("cmpl-r1")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peers, "TIMEOUT_S", 0.2)
            for path in ("/debug/requests", "/debug/requests/r1"):
                answer = await one.ask("GET", path)
                assert (answer.status_code, answer.json()["frontends"]["silent"]) == (200, [2])


@on_loop
async def test_of_too_many_requests_those_that_wait_longest_are_listed(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(debug, "MAX_LISTED", 3)
        async with frontends(folder, 2, 2) as (one, two):
            for number in range(8):
                (one, two)[number % 2].engine.begin(f"running-{number}")
            listed = (await one.ask("GET", "/debug/requests")).json()
            assert [o["id"] for o in listed["unfinished"]] == [f"running-{n}" for n in range(3)]


# -- recordings ------------------------------------------------------------------------------------


@on_loop
async def test_a_recording_ends_everywhere_though_the_core_is_dead(folder: Path) -> None:
    async with frontends(folder, 2, 2) as (one, two):
        await one.ask("POST", "/start_trace")

        async def fail() -> None:
            raise EngineDeadError("gone")

        one.engine.stop_trace = fail  # type: ignore[assignment,method-assign]
        with pytest.raises(EngineDeadError):
            await one.state.recording.stop()
        assert not two.engine.is_recording
        assert (one.state.recording.run_dir, two.state.recording.run_dir) == (None, None)


@on_loop
async def test_a_recording_is_all_frontends(folder: Path) -> None:
    async with frontends(folder, 3, 3) as all_three:
        one, two, three = all_three
        assert (await two.ask("POST", "/stop_trace")).status_code == 409
        begun = await one.ask("POST", "/start_trace")
        assert begun.json() == {"run_dir": "runs/run-1", "frontends": {"recorded": [1, 2, 3]}}
        assert [o.engine.recorded for o in all_three] == [["runs/run-1"]] * 3
        assert (await one.ask("POST", "/start_trace")).status_code == 409
        assert all(o.engine.is_recording for o in all_three)
        ended = await three.ask("POST", "/stop_trace")
        assert ended.json() == begun.json()
        assert not any(o.engine.is_recording for o in all_three)
        assert (await one.ask("POST", "/stop_trace")).status_code == 409


@on_loop
async def test_a_recording_says_whose_requests_it_lacks(folder: Path) -> None:
    async with frontends(folder, 2, 3) as (one, two):
        two.engine.is_recording = True  # so that it takes no part
        begun = (await one.ask("POST", "/start_trace")).json()
        assert begun["frontends"]["recorded"] == [1]
        assert "lacks the requests of frontend 2, 3" in begun["frontends"]["note"]


@on_loop
async def test_whoever_comes_up_later_does_as_the_others_do(folder: Path) -> None:
    async with frontends(folder, 2, 3) as (one, two):
        await one.ask("POST", "/start_trace")
        late = Frontend(folder, 3, 3)
        await late.peers.start()
        await late.state.recording.catch_up()
        assert late.engine.recorded == ["runs/run-1"]
        ended = (await late.ask("POST", "/stop_trace")).json()
        assert ended == {"run_dir": "runs/run-1", "frontends": {"recorded": [1, 2, 3]}}
        assert not two.engine.is_recording
        await late.peers.close()
        # It was started with --trace-dir, and the others have ended that recording since.
        again = Frontend(folder, 3, 3, run_dir="runs/run-0")
        await again.peers.start()
        await again.state.recording.catch_up()
        assert not again.engine.is_recording
        await again.peers.close()


@on_loop
async def test_whoever_comes_up_records_where_the_others_do(folder: Path) -> None:
    async with frontends(folder, 2, 3) as (one, _):
        await one.ask("POST", "/start_trace")
        late = Frontend(folder, 3, 3, run_dir="runs/run-0")
        await late.peers.start()
        await late.state.recording.catch_up()
        assert late.engine.is_recording
        assert late.engine.recorded == ["runs/run-0", "runs/run-1"]
        assert late.state.recording.run_dir == "runs/run-1"
        await late.peers.close()


@on_loop
async def test_a_frontend_that_has_not_started_takes_no_part_and_catches_up(folder: Path) -> None:
    async with frontends(folder, 1, 2) as (one,):
        starting = Frontend(folder, 2, 2, run_dir="runs/run-0")
        one.engine.recorded, one.engine.is_recording = ["runs/run-0"], True
        one.state.recording.run_dir = "runs/run-0"
        unstarted = AsyncLLM(attachment=starting.engine.attachment)
        with pytest.MonkeyPatch.context() as patch, errors_of_ours() as errors:
            for name in ("join_recording", "leave_recording"):
                patch.setattr(starting.engine, name, getattr(unstarted, name))
            await starting.peers.start()
            for path in ("/stop_trace", "/start_trace"):
                answer = await one.ask("POST", path)
                assert (answer.status_code, answer.json()["frontends"]["recorded"]) == (200, [1])
            assert not errors
        await starting.state.recording.catch_up()
        assert starting.engine.recorded == ["runs/run-0", "runs/run-1"]
        await starting.peers.close()


@on_loop
async def test_what_others_said_before_a_recording_began_does_not_end_it(folder: Path) -> None:
    async with frontends(folder, 2, 2) as (one, two):
        answered, begun = asyncio.Event(), asyncio.Event()

        async def nothing() -> None:
            answered.set()
            await begun.wait()

        two.peers.answerers["recording"] = nothing
        catching_up = asyncio.create_task(one.state.recording.catch_up())
        await answered.wait()
        await one.ask("POST", "/start_trace")
        begun.set()
        await catching_up
        assert one.engine.is_recording


# -- how much there is to do -----------------------------------------------------------------------


def arrive(frontend: Frontend, method: str, path: str) -> Callable[[], None]:
    """A request's headers have come; what is returned ends it."""
    observation = frontend.state.observation
    exchange = observation.begin(
        {"type": "http", "method": method, "path": path, "headers": [], "client": None}
    )
    return lambda: observation.end(exchange, None)


@on_loop
async def test_the_load_is_that_of_all_frontends(folder: Path) -> None:
    async with frontends(folder, 2, 2) as (one, two):
        ends = [
            arrive(frontend, "POST", path)
            for frontend in (one, two, two)
            for path in ("/v1/completions", "/v1/chat/completions")
        ]
        for path in ("/v1/models", "/debug/requests", "/load", "/v1/completions", "/nothing"):
            arrive(two, "GET", path)  # which the engine has nothing to do with
        arrive(one, "POST", "/v1/nothing")
        both = {"frontends": {"answered": [1, 2], "silent": []}}
        for num_left in range(6, 4, -1):
            for asked in (one, two):
                assert (await asked.ask("GET", "/load")).json() == {"server_load": num_left} | both
            ends.pop()()
        await two.peers.close()
        alone = (await one.ask("GET", "/load")).json()
        assert (alone["server_load"], alone["frontends"]["silent"]) == (2, [2])
        assert "frontend 2 has not answered" in alone["frontends"]["note"]


# -- the live view ---------------------------------------------------------------------------------


async def messages_until(
    feed: LiveFeed, watcher: Any, is_done: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """What a page is told, until it has been told enough."""
    messages: list[dict[str, Any]] = []
    async with asyncio.timeout(PATIENCE_S):
        while not is_done(messages):
            frames = await feed.next_frames(watcher)
            messages += [
                json.loads(one.removeprefix("data: ")) for one in frames.decode().split("\n\n")[:-1]
            ]
    return messages


def rows(messages: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Rows of requests, by column."""
    return [
        dict(zip(REQUEST_COLUMNS, row, strict=True))
        for one in messages
        for key in keys
        for row in one.get(key, ())
    ]


@on_loop
async def test_a_page_is_told_of_the_requests_of_all_frontends(folder: Path) -> None:
    async with frontends(folder, 2, 2) as (one, two):
        two.engine.end(two.engine.begin("before"))
        under_way = two.engine.begin("under way")
        own = one.engine.begin("own")
        watcher = one.feed.join()
        told = await messages_until(
            one.feed, watcher, lambda m: len(rows(m, "unfinished", "arrived", "ended")) >= 3
        )
        assert {row["id"] for row in rows(told, "unfinished", "arrived")} == {"own", "under way"}
        (before,) = rows(told, "ended")
        arrival = (
            next(iter(two.engine.observer.history.finished_requests())).arrival_ns
        ) - BEGAN_NS  # type: ignore[union-attr]
        assert (before["id"], before["arrival"]) == ("before", arrival // 1000)
        assert not any(one.get("silent") for one in told)
        under_way.num_generation_tokens = 5
        late = two.engine.begin("late")
        told = await messages_until(
            one.feed, watcher, lambda m: rows(m, "arrived") and any("progress" in o for o in m)
        )
        assert [row["id"] for row in rows(told, "arrived")] == ["late"]
        pairs = [n for message in told for n in message.get("progress", ())]
        assert [under_way.request_num, 5] in [pairs[at : at + 2] for at in range(0, len(pairs), 2)]
        two.engine.end(late)
        told = await messages_until(one.feed, watcher, lambda m: bool(rows(m, "ended")))
        assert [row["id"] for row in rows(told, "ended")] == ["late"]
        # A page that is opened now starts from the same.
        second = one.feed.join()
        (snapshot,) = await messages_until(one.feed, second, bool)
        assert {row["id"]: row["num_generated"] for row in rows([snapshot], "unfinished")} == {
            "own": 0,
            "under way": 5,
        }
        assert {row["id"] for row in rows([snapshot], "ended")} == {"before", "late"}
        # Nobody watches any more: nobody follows.
        for page in (watcher, second):
            one.feed.leave(page)
        observer = two.engine.observer
        assert observer is not None
        await until(lambda: observer.tap is None)
        assert own.request_num in one.engine.requests.unfinished


@on_loop
async def test_a_page_says_of_whom_nothing_is_heard(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(others, "_RETRY_S", 0.05)
        async with frontends(folder, 2, 2) as (one, two):
            two.engine.begin("lost")
            watcher = one.feed.join()
            await messages_until(one.feed, watcher, lambda m: bool(rows(m, "arrived")))
            await two.peers.close()
            told = await messages_until(
                one.feed, watcher, lambda m: any(o.get("silent") == [2] for o in m)
            )
            (snapshot,) = [one for one in told if one["kind"] == "snapshot"]
            assert snapshot["unfinished"] == []
            await two.peers.start()
            told = await messages_until(
                one.feed, watcher, lambda m: any(o.get("silent") == [] for o in m)
            )
            assert [row["id"] for row in rows(told, "arrived")] == ["lost"]
            one.feed.leave(watcher)
