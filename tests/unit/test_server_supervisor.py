"""The processes of several frontends: how the server ends when they do not come up. No process."""

import asyncio
import signal
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import ConfigError, EngineStartError
from engine.server import supervisor as module
from engine.server.config import ServerConfig
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


def test_one_port_of_metrics_is_not_for_several_frontends() -> None:
    with pytest.raises(ConfigError, match="scrape /metrics"):
        run_server(ServerConfig(api_server_count=2), {"metrics_port": 0})
