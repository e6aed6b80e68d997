"""The processes of several frontends: how the server ends when they do not come up. No process."""

import asyncio
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import ConfigError, EngineStartError
from engine.server import supervisor as module
from engine.server.config import ServerConfig
from engine.server.queue_board import QueueBoard
from engine.server.serve import run_server
from engine.server.supervisor import Supervisor


class FakeFrontend:
    """A process that ends when it is told to."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._end = threading.Event()

    def wait(self) -> int:
        assert self._end.wait(10)
        return -signal.SIGTERM

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGTERM
        self._end.set()

    def kill(self) -> None:
        self._end.set()


class FakeClient:
    """A core that does not come up."""

    error: Exception

    def __init__(self, *_: Any, **__: Any) -> None:
        self.core = SimpleNamespace(directory="", pid=1, death_read=0, is_dead=False)
        self.was_shut_down = False

    def wait_ready(self) -> None:
        raise self.error

    def kill(self) -> None:
        raise AssertionError("it has ended by itself")

    def shutdown(self) -> None:
        self.was_shut_down = True


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    monkeypatch.setattr(module, "SyncMPClient", FakeClient)
    monkeypatch.setattr(module, "SpawnedProcess", FakeFrontend)
    monkeypatch.setattr(module, "configure", lambda *_, **__: None)
    with socket.socket() as listener:
        return Supervisor(ServerConfig(api_server_count=2), {}, listener)


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
    assert supervisor._client.was_shut_down  # type: ignore[attr-defined]


def test_a_frontend_that_cannot_be_spawned_is_what_is_raised(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise EngineStartError("too many open files")

    monkeypatch.setattr(module, "SpawnedProcess", fail)
    monkeypatch.setattr(FakeClient, "wait_ready", lambda _: None)
    monkeypatch.setattr(FakeClient, "kill", lambda _: None)
    with pytest.raises(EngineStartError, match="too many open files"):
        asyncio.run(supervisor.run())
    assert supervisor._client.was_shut_down  # type: ignore[attr-defined]


def test_what_waited_at_a_frontend_that_died_waits_no_more(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lives: list[tuple[int, int]] = []

    class DyingFrontend(FakeFrontend):
        """The first dies, all others stay."""

        num_started = 0

        def __init__(self, _: str, arguments: dict[str, Any], **__: Any) -> None:
            super().__init__()
            lives.append((arguments["attachment"]["client_index"], arguments["attachment"]["life"]))
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
    supervisor._client.core.directory = str(tmp_path)  # type: ignore[union-attr]
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
        async with asyncio.timeout(10):
            while DyingFrontend.num_started < 3 and not running.done():
                await asyncio.sleep(0.01)
        supervisor._stop()
        return await running

    assert asyncio.run(run()) == 0
    assert detached == [1]
    assert lives == [(1, 0), (2, 0), (1, 1)]
    assert (board.others(2), board.others(1)) == ((0, 0), (3, 0))


def test_one_port_of_metrics_is_not_for_several_frontends() -> None:
    with pytest.raises(ConfigError, match="scrape /metrics"):
        run_server(ServerConfig(api_server_count=2), {"metrics_port": 0})
