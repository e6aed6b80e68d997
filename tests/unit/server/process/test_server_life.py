"""The life of a server over an engine that is none: what is heeded while others take their time."""

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine import AsyncLLM
from engine.errors import EngineDeadError, EngineStartError
from engine.server.config import ServerConfig
from engine.server.http.served import Phase
from engine.server.process import serve
from engine.server.process.stop_signals import ended_by_signals
from engine.server.state import ServerState
from engine.types.attachment import CoreAttachment
from tests.waiting import PATIENCE_S


class FakeLLM(AsyncLLM):
    """Comes up at once, and then answers nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        self.is_asked = asyncio.Event()
        self.death: asyncio.Future[EngineDeadError] = loop.create_future()
        self.answer: asyncio.Future[None] = loop.create_future()

    async def start(self) -> None:
        pass

    async def wait_for_death(self) -> EngineDeadError:
        return await self.death

    async def shutdown(self) -> None:
        pass

    async def warm_up_structured_outputs(self) -> None:
        self.is_asked.set()
        await self.answer


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of an engine that could be announced, and nobody waits for clients."""
    monkeypatch.setattr(serve, "announce", lambda *_: None)
    monkeypatch.setattr(serve, "_DEATH_LINGER_S", 0.01)


def live(test: Callable[[FakeLLM, ServerState], Awaitable[int]]) -> None:
    """Run a test's coroutine beside a server's life, whose exit code it returns."""

    async def run() -> None:
        llm = FakeLLM()
        state = ServerState(llm, ServerConfig(warm_up_structured_outputs=True))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            life = asyncio.create_task(serve._Life(state, listener).run())
            try:
                async with asyncio.timeout(PATIENCE_S):
                    code = await test(llm, state)
                await asyncio.wait([life], timeout=PATIENCE_S)
                assert life.done()
                assert life.result() == code
            finally:
                llm.answer.cancel()  # lest a life that waits for it hangs
                life.cancel()
                gc.unfreeze()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with serve.event_loop() as runner:
        runner.run(run())


async def ask_to_stop(llm: FakeLLM, state: ServerState) -> int:
    assert state.phase is Phase.READY
    assert gc.get_freeze_count() > 1000, "collections look at what came after the start alone"
    os.kill(os.getpid(), signal.SIGTERM)
    return 0


async def die(llm: FakeLLM, state: ServerState) -> int:
    llm.death.set_result(EngineDeadError("killed by signal 9"))
    return 1


ENDS = pytest.mark.parametrize("end", [ask_to_stop, die])


@ENDS
def test_the_end_does_not_wait_for_a_core_that_is_silent(end: Any) -> None:
    async def test(llm: FakeLLM, state: ServerState) -> int:
        await llm.is_asked.wait()
        code: int = await end(llm, state)
        return code

    live(test)


@ENDS
def test_neither_readiness_nor_the_end_waits_for_other_frontends(
    end: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(llm: FakeLLM, state: ServerState) -> int:
        is_asked = asyncio.Event()

        async def catch_up() -> None:
            is_asked.set()
            await llm.answer

        monkeypatch.setattr(state.recording, "catch_up", catch_up)
        await is_asked.wait()
        code: int = await end(llm, state)
        assert not llm.is_asked.is_set()
        return code

    live(test)


def attachment_of(folder: Path, *, life: int) -> CoreAttachment:
    """To a core that has been started fifty seconds ago."""
    return CoreAttachment(
        directory=str(folder),
        client_index=1,
        first_request_num=0,
        core_pid=1,
        began_ns=time.monotonic_ns() - 50_000_000_000,
        death_fd=-1,
        life=life,
    )


@pytest.mark.parametrize(("life", "least_s", "most_s"), [(0, 50, 50 + PATIENCE_S), (1, 0, 50)])
def test_a_replacement_counts_its_start_from_its_own_beginning(
    life: int, least_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[float] = []
    monkeypatch.setattr(serve, "announce", lambda *given: told.append(given[2]))

    async def test(llm: FakeLLM, state: ServerState) -> int:
        llm.attachment = attachment_of(tmp_path, life=life)
        await llm.is_asked.wait()
        return await ask_to_stop(llm, state)

    live(test)
    assert least_s <= told[0] < most_s


def test_a_replacement_listens_once_it_can_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What comes before that is for the others, at the same socket."""
    may_start = asyncio.Event()

    async def start(self: FakeLLM) -> None:
        await may_start.wait()

    monkeypatch.setattr(FakeLLM, "start", start)

    async def test(llm: FakeLLM, state: ServerState) -> int:
        llm.attachment = attachment_of(tmp_path, life=1)
        served: list[object] = []
        serve_http = serve._Server.serve

        async def note(self: serve._Server, sockets: list[socket.socket]) -> None:
            served.append(sockets)
            await serve_http(self, sockets)

        monkeypatch.setattr(serve._Server, "serve", note)
        await asyncio.sleep(0.1)
        assert (state.phase, served) == (Phase.STARTING, [])
        may_start.set()
        await llm.is_asked.wait()
        while not served:
            await asyncio.sleep(0)
        return await ask_to_stop(llm, state)

    live(test)


def test_a_replacement_that_is_not_wanted_any_more_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends = asyncio.Event()

    async def start(self: FakeLLM) -> None:
        await ends.wait()
        raise EngineStartError("turned away")

    monkeypatch.setattr(FakeLLM, "start", start)
    monkeypatch.setattr(FakeLLM, "kill", lambda _: ends.set())

    async def test(llm: FakeLLM, state: ServerState) -> int:
        llm.attachment = attachment_of(tmp_path, life=1)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    live(test)


def test_a_warm_up_that_fails_is_told_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    async def test(llm: FakeLLM, state: ServerState) -> int:
        await llm.is_asked.wait()
        llm.answer.set_exception(RuntimeError("no compiler"))
        while "no compiler" not in caplog.text:
            await asyncio.sleep(0)
        return await ask_to_stop(llm, state)

    caplog.set_level(logging.ERROR, "isinglass")
    root = logging.getLogger("isinglass")
    root.addHandler(caplog.handler)
    try:
        live(test)
    finally:
        root.removeHandler(caplog.handler)


@pytest.mark.usefixtures("heeded_hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_before_there_is_a_loop_a_signal_ends_the_process_in_order(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, ended_by_signals():
        signal.raise_signal(number)
    assert ended.value.code == 0
    assert signal.getsignal(number) is before


def test_what_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
