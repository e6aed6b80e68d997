"""The life of a server process, from its first socket to its last request.

    STARTING ── engine is up ──▶ READY ── signal ──▶ STOPPING ── all answered, or time-out ──▶ end
        └── signal, or the engine does not start ─────┐     └── second signal: at once ─────────┤
                                  READY ── engine dies ──▶ DEAD ── running answers end ──────────┘

Listens at once; the engine starts behind it. Whoever takes a dead frontend's place listens once it
can answer: meanwhile the others take what comes. Knows signals and the order of the end: no more
admissions, running requests to their end or the time-out, engine, connections, process.
"""

import asyncio
import contextlib
import gc
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from engine.api.async_llm import AsyncLLM
from engine.errors import ConfigError, EngineDeadError, IsinglassError
from engine.log import configure, get_logger
from engine.server.app import make_app
from engine.server.cluster.metrics_share import MetricsShare
from engine.server.config import ServerConfig
from engine.server.http.auth import load_api_keys, warn_of_readers
from engine.server.http.connection import ConnectionLimits, bounded_protocol
from engine.server.http.errors import ApiError
from engine.server.http.listening import listening, raise_file_limit, tls_context
from engine.server.http.served import Phase
from engine.server.openai.tools.chat_templates import ChatTemplates
from engine.server.process.announce import announce
from engine.server.process.stop_signals import StopSignals
from engine.server.process.threads import event_loop
from engine.server.state import ServerState

logger = get_logger(__name__)

_POLL_S = 0.02
_DEATH_LINGER_S = 2.0
"""How long a server whose engine has died goes on to say so, and to show its metrics."""
_FLUSH_S = 5.0
"""How long answers that are complete, or failed, may take to reach their clients at the end."""
_CONNECTIONS_S = 2
"""How long connections get to close, once everything has been answered."""


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: the life of the engine decides."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_server(config: ServerConfig, engine_arguments: dict[str, Any]) -> int:
    """Serve until a signal or the engine's death; returns the exit code.

    0: ended by a signal (requests that were cut off at the time-out included), or after it where
    the engine had died and keep_alive_on_engine_death is set. 1: the engine did not start, or
    died. 128 and the signal's number: a second signal cut everything off.

    Raises:
        ConfigError: a wrong setting, or an address that cannot be listened at.
    """
    engine = AsyncLLM(**engine_arguments)  # checks the settings, before anybody is let in
    check_settings(config)
    if config.api_server_count > 1 and engine.config.observability.metrics_port is not None:
        raise ConfigError(
            "metrics_port is one process's, and api_server_count is "
            f"{config.api_server_count}; leave it out and scrape /metrics, which has the metrics "
            "of all."
        )
    with listening(config) as listener:
        if config.api_server_count > 1:
            from engine.server.process.supervisor import Supervisor

            with event_loop() as runner:
                return runner.run(Supervisor(config, engine_arguments, listener).run())
        return run_frontend(config, engine, listener)


def check_settings(config: ServerConfig) -> None:
    """Look at all that settings name, before a core is started for minutes.

    Raises:
        ConfigError: a file cannot be read, a parser is not known, or what asks for keys has none.
    """
    if not load_api_keys(config) and config.guard_metrics:
        raise ConfigError("guard_metrics needs api_key or api_key_file: without keys all is open.")
    tls_context(config)
    ChatTemplates(config)


def run_frontend(config: ServerConfig, engine: AsyncLLM, listener: socket.socket) -> int:
    """Serve at a socket, with an engine that has not been started; see `run_server`."""
    settings = engine.config
    configure(
        settings.process.log_level,
        role="server" if engine.attachment is None else f"server {engine.attachment.client_index}",
        own_process=False,
        log_format=settings.observability.log_format,
    )
    if engine.attachment is None or engine.attachment.is_first:
        warn_of_readers(config)
    state = ServerState(engine, config, load_api_keys(config))
    with event_loop() as runner:
        return runner.run(_Life(state, listener).run())


class _Life:
    """One server's life; `run` is all of it."""

    def __init__(self, state: ServerState, listener: socket.socket) -> None:
        self._state = state
        self._engine = state.engine
        self._listener = listener
        self._app = make_app(state)
        self._http = _Server(_uvicorn_config(state, self._app))
        self._began_ns = time.monotonic_ns()
        self._has_started = asyncio.Event()

    async def run(self) -> int:
        """Serve until the end; returns the exit code."""
        self._signals = StopSignals()
        if (peers := self._state.peers) is not None:
            peers.answerers["is_ready"] = self._is_ready
            await peers.start()
        serving = asyncio.create_task(self._listen(), name="http")
        work = asyncio.create_task(self._serve(), name="life")
        share: MetricsShare | None = self._state.metrics_page.share
        sharing = None if share is None else asyncio.create_task(share.publish(), name="share")
        code = 1
        try:
            await asyncio.wait([serving, work], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                code = work.result()
            else:
                logger.error("the HTTP server ended by itself: %r", serving.exception())
                work.cancel()
        finally:
            # Whatever has happened: no core may be left, nor anybody who waits for an answer.
            self._state.phase = Phase.STOPPING if code == 0 else self._state.phase
            await self._close(serving, work)
            if sharing is not None:
                sharing.cancel()
                await asyncio.gather(sharing, return_exceptions=True)
            if peers is not None:
                await peers.close()
        forced = self._signals.second.is_set()
        return 128 + self._signals.number if forced else code

    async def _listen(self) -> None:
        attachment = self._engine.attachment
        if attachment is not None and attachment.life:
            await self._has_started.wait()
        await self._http.serve(sockets=[self._listener])

    async def _is_ready(self) -> bool:
        return self._state.phase is Phase.READY

    async def _serve(self) -> int:
        """From the engine's start to the last answer."""
        if not await self._start():
            return 0 if self._signals.first.is_set() else 1
        attachment = self._engine.attachment
        is_first = attachment is None or attachment.counts_steps
        if is_first:  # of several, one speaks for all
            began_ns = self._began_ns
            if attachment is not None and not attachment.life:  # a replacement began by itself
                began_ns = attachment.began_ns
            announce(self._state, self._listener, (time.monotonic_ns() - began_ns) / 1e9)
        death = asyncio.create_task(self._engine.wait_for_death(), name="death")
        stop = asyncio.create_task(self._signals.first.wait(), name="stop")
        settling = asyncio.create_task(self._settle(is_first), name="settling")
        try:
            await asyncio.wait([death, stop], return_when=asyncio.FIRST_COMPLETED)
            if not stop.done():
                return await self._outlive(death.result(), stop)
            self._state.phase = Phase.STOPPING
            await self._drain()
            return 0
        finally:
            tasks = (death, stop, settling)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _settle(self, is_first: bool) -> None:
        """Ask other processes for what requests need not wait for, however long they take."""
        try:
            await self._state.recording.catch_up()
            if is_first and self._state.config.warm_up_structured_outputs:
                await self._engine.warm_up_structured_outputs()
        except EngineDeadError:  # who waits for the death tells of it
            logger.debug("the engine died before the server had settled")
        except Exception:
            logger.exception(
                "what is done once the server is ready has failed; it serves all the same"
            )

    async def _start(self) -> bool:
        """Bring the engine up; False if it does not come up, or is not wanted any more."""
        start = asyncio.create_task(self._engine.start(), name="start")
        stop = asyncio.create_task(self._signals.first.wait(), name="stop")
        await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if self._signals.first.is_set():
            logger.info("stopped during the start")
            self._state.phase = Phase.STOPPING
            self._engine.kill()
            await asyncio.gather(start, return_exceptions=True)
            return False
        error = start.exception()
        if error is None:
            gc.collect()
            gc.freeze()  # what lives as long as the server is not looked through again and again
            self._state.phase = Phase.READY
            self._has_started.set()
            return True
        self._state.phase = Phase.DEAD
        if isinstance(error, IsinglassError):
            logger.error("the engine did not start: %s", error)
        else:
            logger.error("the engine did not start: %r", error, exc_info=error)
        return False

    async def _outlive(self, death: Exception, stop: "asyncio.Task[bool]") -> int:
        """The engine has died: its streams end by themselves, with an error."""
        self._state.phase = Phase.DEAD
        logger.error("%s", death)
        if self._state.config.keep_alive_on_engine_death:
            logger.info("requests get 503 from now on, until a signal ends the server")
            await stop
            return 0
        await self._wait_until_answered(_FLUSH_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop, _DEATH_LINGER_S)
        return 1

    async def _drain(self) -> None:
        """Let running requests end; fail those that are left when time is up."""
        timeout_s = self._state.config.shutdown_timeout
        if self._state.num_serving:
            logger.info(
                "shutting down: %d running requests get %g s", self._state.num_serving, timeout_s
            )
        if await self._wait_until_answered(timeout_s) or self._signals.second.is_set():
            return
        logger.warning("%d requests are cut off after %g s", self._state.num_serving, timeout_s)
        error = ApiError(
            503,
            f"the server is shutting down and has cut the request off after {timeout_s:g} s",
            code="shutting_down",
        )
        await self._wait_until_answered(_FLUSH_S, failing=error)

    async def _wait_until_answered(
        self, timeout_s: float, *, failing: Exception | None = None
    ) -> bool:
        """Wait until no request is being answered; False when time is up, or at a second signal."""
        deadline = time.monotonic() + timeout_s
        while self._state.num_serving or self._engine.num_unfinished:
            if failing is not None:  # again and again, since some may just be on their way in
                self._engine.fail_unfinished(failing)
            if time.monotonic() >= deadline or self._signals.second.is_set():
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _close(self, serving: "asyncio.Task[None]", work: "asyncio.Task[int]") -> None:
        """Engine first, then the connections; a second signal makes short work of both."""
        hurry = asyncio.create_task(self._end_at_second_signal(), name="second signal")
        try:
            await asyncio.gather(work, return_exceptions=True)
            await self._engine.shutdown()
        finally:
            # What is cancelled now are streams without an end, and clients that do not read.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            self._http.should_exit = True
            if not self._http.started:  # nor will it, where the start has failed
                serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            self._state.metrics_page.close()
            hurry.cancel()

    async def _end_at_second_signal(self) -> None:
        await self._signals.second.wait()
        logger.warning("second signal: ending at once")
        self._engine.kill()
        self._http.config.timeout_graceful_shutdown = 0
        self._http.force_exit = self._http.should_exit = True


def _uvicorn_config(state: ServerState, app: FastAPI) -> uvicorn.Config:
    config, context = state.config, tls_context(state.config)
    logs = logging.getLogger("uvicorn.error")
    logs.parent = logging.getLogger("isinglass")  # through our handler, in our form
    logs.setLevel(logging.ERROR)
    limits = ConnectionLimits(
        max_head_bytes=config.max_header_bytes,
        head_timeout_s=config.timeout_read_s,
        max_connections=min(raise_file_limit(), config.max_connections or 1 << 30),
    )
    return uvicorn.Config(
        app,
        http=bounded_protocol(limits, state.observation.refuse, state.observation.leave),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=config.root_path,
        timeout_keep_alive=config.timeout_keep_alive_s,
        timeout_graceful_shutdown=_CONNECTIONS_S,
        ssl_context_factory=None if context is None else lambda *_: context,
    )
