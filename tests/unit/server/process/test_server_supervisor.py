"""Processes of several frontends: how they are replaced, how the server ends. No real process."""

import asyncio
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import ConfigError, EngineStartError
from engine.server.cluster.peers import Peers
from engine.server.cluster.queue_board import QueueBoard
from engine.server.config import ServerConfig
from engine.server.process import stop_signals
from engine.server.process import supervisor as module
from engine.server.process.serve import run_server
from engine.server.process.supervisor import Supervisor
from tests.waiting import PATIENCE_S, until


class FakeFrontend:
    """A process that ends when it is told to."""

    ended_by: tuple[int, ...] = (signal.SIGTERM, signal.SIGKILL)

    def __init__(self, *_: Any, **__: Any) -> None:
        self._end = threading.Event()
        self.exit_code: int | None = None

    def wait(self) -> int:
        assert self._end.wait(PATIENCE_S)
        assert self.exit_code is not None
        return self.exit_code

    def send_signal(self, number: int) -> None:
        if number in self.ended_by and self.exit_code is None:
            self.exit_code = -number
            self._end.set()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class FakeClient:
    """A core that does not come up."""

    error: Exception

    def __init__(self, *_: Any, **__: Any) -> None:
        self.core = SimpleNamespace(directory="", pid=1, death_read=0, is_dead=False)
        self.was_shut_down = self.was_killed = False

    def wait_ready(self) -> None:
        raise self.error

    def kill(self) -> None:
        self.was_killed = True

    def shutdown(self) -> None:
        self.was_shut_down = True


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    monkeypatch.setattr(module, "SyncMPClient", FakeClient)
    monkeypatch.setattr(module, "SpawnedProcess", FakeFrontend)
    monkeypatch.setattr(module, "configure", lambda *_, **__: None)
    with socket.socket() as listener:
        return Supervisor(ServerConfig(api_server_count=2), {}, listener)


def client_of(supervisor: Supervisor) -> FakeClient:
    client: Any = supervisor._client
    assert isinstance(client, FakeClient)
    return client


@pytest.mark.parametrize(
    ("error", "told"),
    [(EngineStartError("no memory"), "no memory"), (KeyError("ours"), "KeyError('ours')")],
)
def test_whatever_keeps_the_core_from_coming_up_is_told_and_ends_the_server(
    supervisor: Supervisor, error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        module.logger, "error", lambda text, *values, **_: lines.append(text % values)
    )
    monkeypatch.setattr(FakeClient, "error", error, raising=False)
    code = asyncio.run(asyncio.wait_for(supervisor.run(), 10))
    assert code == 1
    assert lines == [f"the engine did not start: {told}"]
    assert client_of(supervisor).was_shut_down
    assert not client_of(supervisor).was_killed, "it has ended by itself"


def test_a_frontend_that_cannot_be_spawned_is_what_is_raised(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise EngineStartError("too many open files")

    monkeypatch.setattr(module, "SpawnedProcess", fail)
    monkeypatch.setattr(FakeClient, "wait_ready", lambda _: None)
    with pytest.raises(EngineStartError, match="too many open files"):
        asyncio.run(supervisor.run())
    assert client_of(supervisor).was_shut_down


def test_what_waited_at_a_frontend_that_died_waits_no_more(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lives: list[tuple[int, int, str | None]] = []

    class DyingFrontend(FakeFrontend):
        """The first dies, all others stay."""

        num_started = 0

        def __init__(self, _: str, arguments: dict[str, Any], **__: Any) -> None:
            super().__init__()
            attachment = arguments["attachment"]
            lives.append(
                (attachment["client_index"], attachment["life"], attachment.get("run_dir"))
            )
            type(self).num_started += 1
            self.dies = self.num_started == 1

        def wait(self) -> int:
            while self.dies:
                if supervisor._is_ready:
                    return -signal.SIGKILL
                time.sleep(0.001)
            return super().wait()

    detached: list[int] = []
    monkeypatch.setattr(module, "SpawnedProcess", DyingFrontend)
    monkeypatch.setattr(
        FakeClient, "detach_client", lambda _, index: detached.append(index), raising=False
    )
    supervisor._core.directory = str(tmp_path)
    supervisor._run_dir = "runs/first"
    supervisor._config = ServerConfig(api_server_count=2, max_num_queued_reqs=4)
    monkeypatch.setattr(FakeClient, "wait_ready", lambda _: None)
    board, made = QueueBoard(str(tmp_path), 2), []
    for index in (1, 2):
        board.row(index)[0] = 3

    def make_board(*arguments: Any) -> QueueBoard:
        assert not made, "a restart opens no file: it might find none free"
        made.append(QueueBoard(*arguments))
        return made[0]

    monkeypatch.setattr(module, "QueueBoard", make_board)

    async def run() -> int:
        running = asyncio.create_task(supervisor.run())
        await until(lambda: DyingFrontend.num_started >= 3 or running.done())
        supervisor._stop()
        return await running

    assert asyncio.run(run()) == 0
    assert detached == [1]
    # Whether that is still being recorded, only the others know.
    assert lives == [(1, 0, "runs/first"), (2, 0, "runs/first"), (1, 1, None)]
    assert (board.others(2), board.others(1)) == ((0, 0), (3, 0))


# -- the end ---------------------------------------------------------------------------------------


class StoppedFrontend(FakeFrontend):
    """One that does not get on, and heeds nothing."""

    ended_by = (signal.SIGKILL,)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is waited for is waited for briefly."""
    monkeypatch.setattr(module, "_END_S", 0.2)
    monkeypatch.setattr(module, "_HURRY_S", 0.05)
    monkeypatch.setattr(stop_signals, "_SAME_SIGNAL_S", 0.05)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_frontend_that_does_not_end_is_killed(
    num_signals: int, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = iter([FakeFrontend(), StoppedFrontend()])
    monkeypatch.setattr(module, "SpawnedProcess", lambda *_, **__: next(made))
    monkeypatch.setattr(FakeClient, "wait_ready", lambda _: None)
    timeout_s = 0.0 if num_signals == 1 else 2 * PATIENCE_S
    supervisor._config = ServerConfig(api_server_count=2, shutdown_timeout=timeout_s)

    async def run() -> int:
        running = asyncio.create_task(supervisor.run())
        await until(lambda: supervisor._is_ready)
        began_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        if num_signals == 2:
            await until(supervisor._signals.first.is_set)
            await asyncio.sleep(2 * stop_signals._SAME_SIGNAL_S)
            assert not running.done()
            os.kill(os.getpid(), signal.SIGINT)
        code = await asyncio.wait_for(running, PATIENCE_S)
        assert num_signals == 2 or time.monotonic() - began_s >= module._END_S
        return code

    assert asyncio.run(run()) == (0 if num_signals == 1 else 128 + signal.SIGINT)
    assert client_of(supervisor).was_killed == (num_signals == 2)
    assert client_of(supervisor).was_shut_down


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("heeds", [True, False])
def test_a_signal_gives_a_start_up(
    heeds: bool, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = threading.Event()
    monkeypatch.setattr(module, "SpawnedProcess", FakeFrontend if heeds else StoppedFrontend)
    monkeypatch.setattr(FakeClient, "wait_ready", lambda _: given_up.wait(PATIENCE_S))
    monkeypatch.setattr(FakeClient, "kill", lambda _: given_up.set())
    supervisor._config = ServerConfig(api_server_count=2, shutdown_timeout=0.0)

    async def run() -> int:
        running = asyncio.create_task(supervisor.run())
        await until(lambda: len(supervisor._frontends) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(running, PATIENCE_S / 2)

    assert asyncio.run(run()) == 0
    assert given_up.is_set()
    assert client_of(supervisor).was_shut_down


# -- replacements that do not start ----------------------------------------------------------------


def test_a_replacement_that_does_not_start_is_tried_again_while_others_serve(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    num_started, lines = 0, []

    class FailingFrontend(FakeFrontend):
        """The first serves, all others end by themselves once the core is up."""

        def __init__(self, *_: Any, **__: Any) -> None:
            nonlocal num_started
            num_started += 1
            super().__init__()
            if num_started in (4, 5):
                raise OSError("no process to be had")
            self.fails = num_started > 1

        def wait(self) -> int:
            while self.fails:
                if supervisor._is_ready:
                    self.exit_code = 1
                    return 1
                time.sleep(0.001)
            return super().wait()

    monkeypatch.setattr(module, "SpawnedProcess", FailingFrontend)
    monkeypatch.setattr(module, "_DELAYS_S", (0, 0.02))
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    monkeypatch.setattr(
        module.logger, "error", lambda text, *values, **_: lines.append(text % values)
    )
    monkeypatch.setattr(FakeClient, "wait_ready", lambda _: None)
    monkeypatch.setattr(FakeClient, "detach_client", lambda *_: None, raising=False)
    supervisor._peers = Peers(str(tmp_path), 0, 2)
    serves = True

    async def is_ready() -> bool:
        return serves

    async def run() -> int:
        nonlocal serves
        first = Peers(str(tmp_path), 1, 2)
        first.answerers["is_ready"] = is_ready
        await first.start()
        running = asyncio.create_task(supervisor.run())
        await until(lambda: num_started >= 3 * module._MAX_RESTARTS or running.done())
        assert not running.done()
        serves = False  # from now on each counts
        code = await asyncio.wait_for(running, PATIENCE_S)
        await first.close()
        return code

    assert asyncio.run(run()) == 1
    assert "again and again" in lines.pop()
    retries = [line for line in lines if "the others serve meanwhile" in line]
    assert len(retries) >= 3 * module._MAX_RESTARTS - 2
    assert retries[0].startswith("frontend 2 does not stay up (exit code 1)")
    assert "no process to be had" in retries[2]
    assert sum("its requests are lost" in line for line in lines) == module._MAX_RESTARTS


def test_one_port_of_metrics_is_not_for_several_frontends() -> None:
    with pytest.raises(ConfigError, match="scrape /metrics"):
        run_server(ServerConfig(api_server_count=2), {"metrics_port": 0})
