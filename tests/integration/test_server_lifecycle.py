"""The life and the end of a server process: signals, deaths, failures, and what each leaves behind.

Every case is a real process with a real core and a request that is being answered when it happens.
"""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.cli.main import main
from tests.support.scripts import is_running, socket_folders
from tests.support.server_facts import processes
from tests.support.server_process import (
    ROOT,
    SMALL_FLAGS,
    ServerProcess,
    folder_for_servers,
    free_port,
)
from tests.waiting import PATIENCE_S, wait_until

LONG = {"prompt": "On and on", "max_tokens": 30_000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def private_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of each test's own: a server of other tests may live in the session's."""
    with folder_for_servers(monkeypatch) as folder:
        yield folder


class Client(threading.Thread):
    """Sends one request, and keeps what comes."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        super().__init__(daemon=True)
        self._url = f"{server.url}/v1/completions"
        self._body = LONG | {"stream": True} | fields
        self.events: list[str] = []
        self.status = 0
        self.headers: Any = None
        self.is_complete = False
        """Whether the answer ended as HTTP wants it."""
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=PATIENCE_S) as response:
                self.status, self.headers = response.status_code, response.headers
                for line in response.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
            self.is_complete = True
        except httpx.HTTPError as error:
            self.error = error

    def wait_for_tokens(self) -> "Client":
        wait_until(lambda: len(self.events) > 3, f"no tokens: {self.error}")
        return self

    def finish(self) -> "Client":
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self

    @property
    def last_error(self) -> dict[str, Any]:
        """The error event at the stream's end, which `[DONE]` follows."""
        assert self.is_complete, self.error
        assert self.events[-1] == "[DONE]"
        error: dict[str, Any] = json.loads(self.events[-2])["error"]
        return error


@contextlib.contextmanager
def running(model: Path, *flags: str, **options: Any) -> Iterator[ServerProcess]:
    """A server that ends by itself in the block; nothing of it may be left behind that."""
    with ServerProcess(str(model), *SMALL_FLAGS, *flags, **options) as server:
        yield server
        assert server.process.poll() is not None, "the test did not end it"


def assert_nothing_left(core_pids: list[int], temporary: Path) -> None:
    wait_until(lambda: not any(map(is_running, core_pids)), "an orphan core")
    wait_until(lambda: not socket_folders(temporary), "a socket folder is left")


def wait_for_end(server: ServerProcess) -> int:
    try:
        return server.process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it goes on:\n{server.log()}") from None


def ask(server: ServerProcess) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/completions", json=LONG | {"max_tokens": 1}, timeout=PATIENCE_S
    )


@pytest.mark.usefixtures("heeded_hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_running_requests_end_and_new_ones_are_refused(
    text_llama: Path, private_temporary_folder: Path, tmp_path: Path, number: int
) -> None:
    """To the whole group, as service managers and terminals do: the core must not take it."""
    with running(text_llama, "--trace-dir", str(tmp_path / "runs")) as server:
        pids = server.children()
        client = Client(server, max_tokens=1500).wait_for_tokens()
        watcher = threading.Thread(
            target=lambda: httpx.get(f"{server.url}/live/events", timeout=PATIENCE_S), daemon=True
        )
        watcher.start()  # a page that is looked at must not hold the end up
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(f"{server.url}/health", timeout=PATIENCE_S)
        os.killpg(server.process.pid, number)
        wait_until(lambda: server.health() == 503, "it is still healthy")
        refused = ask(server)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "shutting_down"
        assert wait_for_end(server) == 0
        client.finish()
        watcher.join(PATIENCE_S)
        assert client.is_complete, client.error
        assert client.events[-1] == "[DONE]"
        last = json.loads(client.events[-2])
        assert last["choices"][0]["finish_reason"] == "length"
        assert "Traceback" not in server.log()
    assert_nothing_left(pids, private_temporary_folder)
    (run,) = (tmp_path / "runs").iterdir()
    read = subprocess.run(
        [sys.executable, "-m", "engine.cli.main", "trace", "summary", "--json", str(run)],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert read.returncode == 0, "3 would be: a journal was cut off"


@pytest.mark.slow
def test_requests_are_cut_off_when_time_is_up(
    text_llama: Path, private_temporary_folder: Path
) -> None:
    with running(text_llama, "--shutdown-timeout", "0.5") as server:
        pids = server.children()
        streaming = Client(server).wait_for_tokens()
        whole = Client(server, stream=False)
        time.sleep(0.2)
        began_s = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert wait_for_end(server) == 0
        assert time.monotonic() - began_s > 0.5
        error = streaming.finish().last_error
        assert (error["code"], error["type"]) == ("shutting_down", "service_unavailable_error")
        assert "0.5 s" in error["message"]
        assert whole.finish().status == 503
        assert json.loads(whole.events[0])["error"]["code"] == "shutting_down"
        assert "Traceback" not in server.log()
    assert_nothing_left(pids, private_temporary_folder)


@pytest.mark.usefixtures("heeded_hangups")
def test_a_second_signal_ends_at_once(text_llama: Path, private_temporary_folder: Path) -> None:
    """It would wait for the request, which is cut off long after we have lost patience."""
    with running(text_llama, "--shutdown-timeout", str(2 * PATIENCE_S)) as server:
        pids = server.children()
        client = Client(server).wait_for_tokens()
        os.killpg(server.process.pid, signal.SIGHUP)  # a terminal that was closed: all get it
        server.process.send_signal(signal.SIGTERM)  # right behind it: the same, once more
        wait_until(lambda: "shutting down" in server.log(), "the first signal is ignored")
        time.sleep(0.8)
        num_events = len(client.events)
        wait_until(lambda: len(client.events) > num_events, "the core has taken the signal")
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert wait_for_end(server) == 128 + signal.SIGINT
        client.finish()
        assert "Traceback" not in server.log()
    assert_nothing_left(pids, private_temporary_folder)


def test_a_server_under_nohup_outlives_its_terminal(
    text_llama: Path, private_temporary_folder: Path
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what `nohup` does
    with running(text_llama) as server:
        client = Client(server, max_tokens=300).wait_for_tokens()
        os.killpg(server.process.pid, signal.SIGHUP)
        client.finish()
        assert client.is_complete, client.error
        assert ask(server).status_code == 200
        assert "shutting down" not in server.log()
        assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True], ids=["", "hangs"])
@pytest.mark.parametrize("num_frontends", [1, 2])
def test_a_signal_during_the_start(
    num_frontends: int, hangs: bool, text_llama: Path, private_temporary_folder: Path
) -> None:
    count = f"--api-server-count={num_frontends}"
    with running(text_llama, count, wait=False) as server:
        wait_until(lambda: server.health() == 503, "it does not listen before it is ready")
        refused = ask(server)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_starting")
        assert int(refused.headers["retry-after"]) > 0
        wait_until(lambda: "EngineCore" in processes(server), "no core")
        pids = server.children()
        if hangs:  # as a load of minutes does
            os.kill(processes(server)["EngineCore"], signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert wait_for_end(server) == 0
        assert "Traceback" not in server.log()
    assert_nothing_left(pids, private_temporary_folder)


@pytest.mark.slow
def test_a_model_that_is_not_there(tmp_path: Path, private_temporary_folder: Path) -> None:
    with ServerProcess(str(tmp_path / "nothing"), wait=False) as server:
        assert wait_for_end(server) == 1
        log = server.log()
        assert "the engine did not start" in log
        assert str(tmp_path / "nothing") in log
        assert "Traceback" not in log
        with pytest.raises(ConnectionRefusedError):
            http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S).connect()
    assert_nothing_left([], private_temporary_folder)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-model-len", "0"], "max_model_len must be at least 1"),
        (["--api-key-file", "/nonexistent/keys"], "cannot be read"),
        (["--ssl-certfile", "/nonexistent/c", "--ssl-keyfile", "/nonexistent/k"], "TLS"),
        (["--ssl-keyfile", "/nonexistent/k"], "go together"),
        (["--host", "no.such.host.invalid"], "cannot listen at"),
        (["--chat-template", "/nonexistent/template"], "chat_template"),
        (["--tool-call-parser", "hermess"], "tool_call_parser must be one of auto, none"),
        (["--device", "tpu"], "device must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_wrong_settings_fail_before_anything_is_started(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == 1
    error = capsys.readouterr().err
    assert re.match(rf"isinglass: error: .*{re.escape(message)}", error), error
    assert error.count("\n") == 1


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert f"cannot listen at 127.0.0.1:{port}" in error
    assert "Use another --port" in error


def test_standard_streams_that_are_closed_or_full(text_llama: Path) -> None:
    server = ServerProcess(wait=False)  # for its way to ask for health
    server.port = free_port()
    command = [sys.executable, "-m", "engine.cli.main", "serve", str(text_llama)]
    command += [*SMALL_FLAGS, "--port", str(server.port)]
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@" <&- >&- 2>/dev/full', "sh", *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        wait_until(lambda: server.health() == 200, "it does not come up")
        answer = ask(server)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 1)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def test_an_http_server_that_fails_leaves_nothing(
    text_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn raises while the engine starts; the fixture of all tests looks for what is left."""

    async def fail(self: Any, sockets: Any = None) -> None:
        await asyncio.sleep(0.7)
        raise OSError("no more sockets")

    monkeypatch.setattr("engine.server.process.serve._Server.serve", fail)
    over = threading.Event()
    thread = threading.Thread(target=over.wait)  # of the program that calls, which goes on
    thread.start()
    try:
        assert main(["serve", str(text_llama), *SMALL_FLAGS, "--port", "0"]) == 1
    finally:
        over.set()
