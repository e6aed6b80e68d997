"""A server of `isinglass serve` as a process of its own, for tests that talk HTTP to it.

Knows how it is started, when it is ready and how it is stopped. Knows no route but `/health`.

with ServerProcess(str(tiny_llama), *SMALL_FLAGS) as server:
    httpx.get(f"{server.url}/v1/models")
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]

SMALL_FLAGS = (
    "--kv-cache-memory-bytes",
    str(32 << 20),
    "--max-num-batched-tokens",
    "256",
)
"""Settings for a tiny model that comes up in a moment."""


@contextlib.contextmanager
def folder_for_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of a test's own, so short that sockets can be made below it."""
    folder = Path(tempfile.mkdtemp(prefix="server-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class ServerProcess:
    """Context manager: a running server on a free port of 127.0.0.1.

    Args:
        flags: what follows `isinglass serve`: a model, if not the embedded one, and options.
        env: added to the environment, in which numerical libraries have one thread.
        wait: return only once `/health` says 200; otherwise as soon as the process runs.
        scheme: of `url`; what `/health` is asked by is always plain HTTP.

    Attributes:
        url: `http://127.0.0.1:PORT`, without a slash.
        port: where it listens.
        process: the server, leader of a process group of its own.
    """

    def __init__(
        self,
        *flags: str,
        env: dict[str, str] | None = None,
        wait: bool = True,
        scheme: str = "http",
    ) -> None:
        self._flags = flags
        self._env = env or {}
        self._wait = wait
        self._scheme = scheme
        self.port = 0
        self.process: subprocess.Popen[bytes]
        self._log_path: Path

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def start(self) -> "ServerProcess":
        """Start it; see `wait`."""
        self.port = free_port()
        descriptor, name = tempfile.mkstemp(prefix="server-", suffix=".log")
        self._log_path = Path(name)
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        try:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "engine.cli.main", "serve"),
                    *(() if "--uds" in self._flags else ("--port", str(self.port))),
                    "--no-warm-up-structured-outputs",  # seconds of a processor, for each server
                    *self._flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                env=environment | self._env,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        if self._wait:
            try:
                self.wait_healthy()
            except BaseException:
                self.kill()
                raise
        return self

    def wait_healthy(self) -> None:
        """Wait until `/health` says 200; fail with the log when it does not, or the server ends."""

        def is_settled() -> bool:
            return self.health() == 200 or self.process.poll() is not None

        wait_until(is_settled, "not healthy")
        assert self.process.poll() is None, f"the server ended:\n{self.log()}"

    def health(self) -> int:
        """Status of `/health`; 0 while nothing answers."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/health", timeout=PATIENCE_S
            ) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def log(self) -> str:
        """All that the server and its core have written so far."""
        return self._log_path.read_text(errors="replace")

    def children(self) -> list[int]:
        """Process ids of the running children: the engine core, and more frontends."""
        found: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*"):
            found += [int(pid) for pid in (task / "children").read_text().split()]
        return found

    def stop(self) -> int:
        """What a service manager does: SIGTERM, and wait for the end. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            log = self.log()
            self.kill()
            raise AssertionError(f"the server did not end:\n{log}") from None

    def kill(self) -> None:
        """End the whole process group at once; harmless when it has ended."""
        with contextlib.suppress(ProcessLookupError):  # nobody is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> "ServerProcess":
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.stop()
        finally:
            self.kill()
            if error is not None:
                error.add_note(f"the server's log:\n{self.log()[-4000:]}")
            self._log_path.unlink()


def free_port() -> int:
    """A port of 127.0.0.1 at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def stream_lines(response: Any) -> list[str]:
    """The data of each event of a server-sent stream, from a response of httpx."""
    return [line[len("data: ") :] for line in response.iter_lines() if line.startswith("data: ")]
