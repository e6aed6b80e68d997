"""Several frontends over one core: starts them, watches them, and ends them.

    supervisor ── owns ──▶ core ◀── attach ── frontend 1, 2, …   (one listening socket for all)

A frontend that dies is replaced, and its requests end in the core; when the core dies, all end.
When the supervisor dies, even by SIGKILL, everything goes with it. Knows processes; no HTTP.
"""

import asyncio
import dataclasses
import signal
import socket
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import msgspec

from engine.api.run_dir import make_run_dir
from engine.config import EngineConfig
from engine.errors import EngineDeadError, IsinglassError
from engine.log import configure, get_logger
from engine.server.config import ServerConfig
from engine.server.queue_board import QueueBoard
from engine.transport.core_process import CoreProcess
from engine.transport.interrupts import children_outlive_sigterm
from engine.transport.mp_client import SyncMPClient
from engine.transport.process import SpawnedProcess
from engine.types.attachment import CoreAttachment
from instrumentation import NULL

logger = get_logger(__name__)

_FRONTEND_MAIN = "engine.server.frontend_process:run_frontend"
_MAX_RESTARTS, _RESTART_WINDOW_S = 5, 60.0
"""More deaths of frontends than that in the window are not bad luck: the server ends."""
_NUMS_PER_CLIENT, _NUMS_PER_LIFE = 1 << 44, 1 << 32
"""Numbers of requests: each life of each frontend has a range of its own, all below 2**53."""


class Supervisor:
    """One core and its frontends."""

    def __init__(
        self, config: ServerConfig, engine_arguments: dict[str, Any], listener: socket.socket
    ) -> None:
        self._began_ns = time.monotonic_ns()
        self._config = config
        self._engine_arguments = engine_arguments
        self._listener = listener
        engine_config = EngineConfig.from_kwargs(**engine_arguments)
        process, observability = engine_config.process, engine_config.observability
        configure(
            process.log_level,
            role="supervisor",
            own_process=False,
            log_format=observability.log_format,
        )
        trace_dir = observability.trace_dir
        self._run_dir = None if trace_dir is None else make_run_dir(trace_dir)
        num_frontends = config.api_server_count
        with children_outlive_sigterm():  # the core; frontends take it
            self._client = SyncMPClient(
                lambda: CoreProcess(
                    engine_config, run_dir=self._run_dir, obs=NULL, num_frontends=num_frontends
                ),
                timeout_s=process.engine_ready_timeout_s,
            )
        self._core = cast(CoreProcess, self._client.core)  # as we have made it
        self._threads = ThreadPoolExecutor(num_frontends + 1, thread_name_prefix="waiting")
        self._frontends: dict[int, SpawnedProcess] = {}
        self._lives: dict[int, int] = dict.fromkeys(range(1, num_frontends + 1), 0)
        self._deaths_s: deque[float] = deque()
        self._exit_codes: list[int] = []
        self._board: QueueBoard | None = None
        self._is_ready = False
        self._is_stopping = False

    async def run(self) -> int:
        """Serve until a signal, the core's death or too many of the frontends'; the exit code.

        Raises:
            EngineStartError: a frontend's process cannot be started.
            OSError: the file that the frontends share cannot be made.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(number, self._stop)
        ready = loop.run_in_executor(self._threads, self._client.wait_ready)
        try:
            if self._config.limits_queue:
                self._board = QueueBoard(self._core.directory, len(self._lives))
            for index in self._lives:
                self._start(index)
            watching = asyncio.gather(*[self._watch(index) for index in self._lives])
            first: list[asyncio.Future[Any]] = [ready, watching]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not watching.done() and not self._is_stopping:
                error = ready.exception()
                self._is_ready = error is None
                if error is not None:
                    is_known = isinstance(error, IsinglassError)
                    logger.error(
                        "the engine did not start: %s",
                        error if is_known else repr(error),
                        exc_info=None if is_known else error,
                    )
                    self._exit_codes.append(1)
                    self._stop()
            await watching
            return max(self._exit_codes)
        finally:
            for process in self._frontends.values():
                process.kill()
            if not ready.done():
                self._client.kill()  # it is starting, and takes no request to stop
            await asyncio.to_thread(self._client.shutdown)
            await asyncio.gather(ready, return_exceptions=True)
            self._threads.shutdown(wait=False)

    def _start(self, index: int) -> None:
        life = self._lives[index]
        self._lives[index] += 1
        attachment = CoreAttachment(
            directory=self._core.directory,
            client_index=index,
            first_request_num=index * _NUMS_PER_CLIENT + life * _NUMS_PER_LIFE,
            core_pid=self._core.pid,
            began_ns=self._began_ns,
            death_fd=self._core.death_read,
            counts_steps=index == 1,
            life=life,
            run_dir=self._run_dir,
        )
        self._frontends[index] = SpawnedProcess(
            _FRONTEND_MAIN,
            {
                "config": dataclasses.asdict(self._config),
                "engine_arguments": self._engine_arguments,
                "attachment": msgspec.to_builtins(attachment),
                "listener_fd": self._listener.fileno(),
            },
            name=f"ApiServer_{index}",
            private_dir=self._core.directory,
            pass_fds=(self._listener.fileno(), self._core.death_read),
        )

    async def _watch(self, index: int) -> None:
        """Wait for a frontend's end, and replace it where it was not asked for."""
        loop = asyncio.get_running_loop()
        while True:
            code = await loop.run_in_executor(self._threads, self._frontends[index].wait)
            assert code is not None
            if self._is_stopping or self._core.is_dead or not self._may_restart():
                was_asked = self._is_stopping and code == -signal.SIGTERM  # before it could heed it
                self._exit_codes.append(0 if was_asked else 128 - code if code < 0 else code)
                return
            logger.error(
                "frontend %d died (%s); its requests are lost, another one takes its place",
                index,
                f"killed by signal {-code}" if code < 0 else f"exit code {code}",
            )
            if self._board is not None:
                self._board.clear(index)
            try:
                self._client.detach_client(index)
            except EngineDeadError:
                self._exit_codes.append(1)
                return
            self._start(index)

    def _may_restart(self) -> bool:
        if not self._is_ready:  # it has said why, and the next one would say the same
            self._stop()
            return False
        now_s = time.monotonic()
        self._deaths_s.append(now_s)
        while self._deaths_s[0] < now_s - _RESTART_WINDOW_S:
            self._deaths_s.popleft()
        if len(self._deaths_s) <= _MAX_RESTARTS:
            return True
        logger.error("frontends die again and again; the server ends")
        self._stop()
        return False

    def _stop(self) -> None:
        """Ask the frontends to end; asked a second time, they end at once.

        By SIGTERM always: a terminal's SIGINT reaches them too, and they leave it to us.
        """
        self._is_stopping = True
        for process in self._frontends.values():
            process.send_signal(signal.SIGTERM)
