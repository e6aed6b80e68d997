"""Several frontends over one core: starts them, watches them, and ends them.

    supervisor ── owns ──▶ core ◀── attach ── frontend 1, 2, …   (one listening socket for all)

A frontend that dies is replaced, and its requests end in the core; when the core dies, all end. One
that does not come up again is tried at longer and longer intervals while the others serve.
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
from engine.server.cluster.peers import Peers
from engine.server.cluster.queue_board import QueueBoard
from engine.server.config import ServerConfig
from engine.server.process.stop_signals import StopSignals
from engine.transport.core_process import CoreProcess
from engine.transport.interrupts import children_outlive_sigterm
from engine.transport.mp_client import SyncMPClient
from engine.transport.process import SpawnedProcess
from engine.types.attachment import CoreAttachment
from instrumentation import NULL

logger = get_logger(__name__)

_FRONTEND_MAIN = "engine.server.process.frontend_process:run_frontend"
_MAX_RESTARTS, _RESTART_WINDOW_S = 5, 60.0
"""More deaths of frontends than that in the window are not bad luck: the server ends."""
_DELAYS_S = (1, 2, 4, 8, 16, 32, 60)
"""Before a frontend that did not stay up, while others serve, is tried again: the first time, the
second, …"""
_POLL_S = 0.2
_END_S = 9.0
"""How long frontends get beyond `shutdown_timeout` to flush what they have and to end."""
_HURRY_S = 1.0
"""How long they get from a second signal on."""
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
        self._peers = Peers(self._core.directory, 0, num_frontends)
        self._threads = ThreadPoolExecutor(num_frontends + 1, thread_name_prefix="waiting")
        self._frontends: dict[int, SpawnedProcess] = {}
        self._lives: dict[int, int] = dict.fromkeys(range(1, num_frontends + 1), 0)
        self._deaths_s: deque[float] = deque()
        self._exit_codes: list[int] = []
        self._board: QueueBoard | None = None
        self._is_ready = False
        self._stopping = asyncio.Event()
        self._has_killed = False

    async def run(self) -> int:
        """Serve until a signal, the core's death or too many of the frontends'; the exit code.

        That is 128 and the signal's number where a second one has cut everything off.

        Raises:
            EngineStartError: a frontend's process cannot be started.
            OSError: the file that the frontends share cannot be made.
        """
        loop = asyncio.get_running_loop()
        self._signals = StopSignals()
        ending = [asyncio.create_task(one) for one in (self._heed_signals(), self._hurry())]
        ready = loop.run_in_executor(self._threads, self._client.wait_ready)
        try:
            if self._config.limits_queue:
                self._board = QueueBoard(self._core.directory, len(self._lives))
            for index in self._lives:
                self._start(index)
            watching = asyncio.gather(*[self._watch(index) for index in self._lives])
            first: list[asyncio.Future[Any]] = [ready, watching]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not watching.done() and not self._stopping.is_set():
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
            if self._core.is_dead and not self._stopping.is_set():
                logger.error("%s", self._core.death())
        finally:
            for process in self._frontends.values():
                process.kill()
            if not ready.done():
                self._client.kill()  # it is starting, and takes no request to stop
            await asyncio.to_thread(self._client.shutdown)
            await asyncio.gather(ready, return_exceptions=True)
            self._threads.shutdown(wait=False)
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
        is_forced = self._signals.second.is_set()
        return 128 + self._signals.number if is_forced else max(self._exit_codes)

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
            run_dir=None if life else self._run_dir,  # it may have ended; `catch_up` sees
        )
        self._frontends[index] = SpawnedProcess(
            _FRONTEND_MAIN,
            {
                "config": dataclasses.asdict(self._config),
                "engine_arguments": self._engine_arguments,
                "attachment": msgspec.to_builtins(attachment),
                "listener_fd": self._listener.fileno(),
            },
            name=attachment.title,
            private_dir=self._core.directory,
            pass_fds=(self._listener.fileno(), self._core.death_read),
        )

    async def _watch(self, index: int) -> None:
        """Wait for a frontend's end, and replace it where it was not asked for."""
        loop = asyncio.get_running_loop()
        num_failures = 0
        while True:
            began_s = time.monotonic()
            code = await loop.run_in_executor(self._threads, self._frontends[index].wait)
            assert code is not None
            is_brief = time.monotonic() - began_s < _RESTART_WINDOW_S
            # By itself, and has said why: as likely as not the next one would, too.
            has_failed = is_brief and code > 0 and await self._is_served_by_others()
            num_failures = num_failures + 1 if has_failed else 0
            if self._is_over or not (has_failed or self._may_restart()):
                self._exit_codes.append(self._exit_code(code))
                return
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            if not has_failed:
                logger.error(
                    "frontend %d died (%s); its requests are lost, another one takes its place",
                    index,
                    how,
                )
            if self._board is not None:
                self._board.clear(index)
            try:
                self._client.detach_client(index)
            except EngineDeadError:
                self._exit_codes.append(1)
                return
            num_failures = await self._replace(index, num_failures, how)
            if self._is_over:
                self._exit_codes.append(0 if self._stopping.is_set() else 1)
                return

    async def _replace(self, index: int, num_failures: int, how: str) -> int:
        """Start a frontend's next life, unless the end comes first; behind failures, with patience.

        Args:
            how: the last failure.

        Returns: the failures until now.
        """
        while True:
            if num_failures:
                delay_s = _DELAYS_S[min(num_failures, len(_DELAYS_S)) - 1]
                logger.error(
                    "frontend %d does not stay up (%s); it is tried again in %d s, and the others "
                    "serve meanwhile",
                    index,
                    how,
                    delay_s,
                )
                until_s = time.monotonic() + delay_s
                while time.monotonic() < until_s and not self._is_over:
                    await asyncio.sleep(_POLL_S)
            if self._is_over:
                return num_failures
            try:
                self._start(index)
            except (OSError, RuntimeError) as error:  # no process, or no thread, to be had
                num_failures, how = num_failures + 1, str(error)
            else:
                return num_failures

    @property
    def _is_over(self) -> bool:
        """Whether nobody is to be replaced any more."""
        return self._stopping.is_set() or self._core.is_dead

    async def _is_served_by_others(self) -> bool:
        """Whether any frontend takes requests, once one of them has ended."""
        if not self._is_ready or self._is_over:
            return False
        return any((await self._peers.ask("is_ready")).by_index.values())

    def _exit_code(self, code: int) -> int:
        """What a frontend's end means for the server's."""
        asked_by = {signal.SIGTERM} | ({signal.SIGKILL} if self._has_killed else set())
        if self._stopping.is_set() and -code in asked_by:  # before it could heed it, or too late
            return 0
        return 128 - code if code < 0 else code

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

    async def _heed_signals(self) -> None:
        await self._signals.first.wait()
        self._stop()

    def _stop(self) -> None:
        """Ask the frontends to end, once."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._ask_frontends_to_end()

    def _ask_frontends_to_end(self) -> None:
        """By SIGTERM always: a terminal's SIGINT reaches them too, and they leave it to us."""
        for process in self._frontends.values():
            process.send_signal(signal.SIGTERM)

    async def _hurry(self) -> None:
        """From the moment on that the end is asked for: see to it that it comes."""
        await self._stopping.wait()
        try:
            async with asyncio.timeout(self._config.shutdown_timeout + _END_S):
                await self._signals.second.wait()
        except TimeoutError:
            self._kill_frontends()
            await self._signals.second.wait()
        self._ask_frontends_to_end()
        await asyncio.sleep(_HURRY_S)
        self._kill_frontends()
        self._client.kill()

    def _kill_frontends(self) -> None:
        for index, process in self._frontends.items():
            if process.exit_code is None:
                logger.warning("frontend %d does not end; it is killed", index)
                self._has_killed = True
                process.send_signal(signal.SIGKILL)
