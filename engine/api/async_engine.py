"""An engine on an event loop: how it comes up, where it may be used, how it ends.

Knows tasks, threads and the host that they open and close. Knows no request.
"""

import asyncio
import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from engine.api.async_views import AsyncViews
from engine.api.engine_host import EngineHost
from engine.api.output_handler import OutputHandler
from engine.api.text_threads import TextThreads
from engine.checkpoint.locate import EMBEDDED_MODEL
from engine.config import EngineConfig
from engine.errors import EngineDeadError, EventLoopError, IsinglassError
from engine.frontend.llm_engine import LLMEngine
from engine.transport import factory
from engine.transport.async_mp_client import AsyncMPClient
from engine.transport.client import EngineCoreClient
from engine.transport.interrupts import children_outlive_sigterm
from engine.types.attachment import CoreAttachment
from instrumentation import Metric, SinkName
from instrumentation.metrics.engine import Exporter

_SPARE_S = 5.0
"""What closing may take at the end of the interpreter, besides the core's time to stop."""


class AsyncEngine(AsyncViews):
    """What of `AsyncLLM` brings the engine up and down, each once; dropped, it ends by itself.

    Args:
        config: the settings.
        attachment: where another process's core is; None: the engine has a core of its own.

    Raises:
        IsinglassError: the settings ask for a core in this process.
    """

    llm_engine: LLMEngine

    def __init__(
        self,
        config: EngineConfig,
        *,
        attachment: CoreAttachment | None = None,
    ) -> None:
        self.labelled_name: str | None = None
        """The model's name in metrics, set before the start; the model's own if None."""
        self.attachment = attachment
        """Where the core is, where another process owns it."""
        self._config = config
        if not self._config.process.enable_multiprocessing:
            raise IsinglassError(
                "AsyncLLM runs its core in a process of its own: leave enable_multiprocessing out."
            )
        self.metric_sources: list[Callable[[], list[Metric]]] = []
        """What snapshots hold besides the engine's own metrics, such as a server's."""
        self.metric_exporters: list[tuple[SinkName, Exporter]] = []
        """Whose errors and drops the engine's metrics count, such as a server's scrapes."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._is_shut_down = False
        self._host: EngineHost | None = None
        self._handler: OutputHandler | None = None
        self._unready_client: AsyncMPClient | None = None
        self._is_killed = False
        self._text_threads = TextThreads()
        self._remains: _Remains | None = None

    async def start(self) -> None:
        """Bring the engine up, once; later calls wait for the first.

        A call that is cancelled leaves the start to go on, until `kill` ends it.

        Raises:
            ModelError, ConfigError, EngineStartError: why it does not come up.
            EngineDeadError: it has died since, or has been shut down.
            EventLoopError: it was started on another event loop.
        """
        await self._started()
        self._raise_if_dead()

    @property
    def is_running(self) -> bool:
        """Whether requests are taken: started, neither dead nor shut down."""
        return self._handler is not None and self._handler.dead_error is None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why a started engine serves no requests any more; None while that is not so."""
        return None if self._handler is None else self._handler.dead_error

    async def wait_for_death(self) -> EngineDeadError:
        """Wait until the engine has died, or has been shut down; returns why."""
        await self._started()
        assert self._handler is not None
        return await self._handler.wait()

    @property
    def config(self) -> EngineConfig:
        """The settings in force; once started, with what the core settled on."""
        return self.llm_engine.config if self._handler is not None else self._config

    @property
    def model_name(self) -> str:
        """The model as it was asked for; the embedded one's own name without that."""
        return self._config.model.model or EMBEDDED_MODEL

    async def shutdown(self) -> None:
        """Stop the engine for good, and leave nothing behind; streams end with EngineDeadError.

        Raises:
            EventLoopError: it was started on another event loop, which is still open.
        """
        if self._loop is not None and not self._loop.is_closed():
            self._check_loop()
        self._is_shut_down = True
        if self._remains is not None:
            self._remains.detach()
        if self._loop is None:  # nothing has been started
            return
        if self._stopping is None or self._stopping.cancelled():
            self._stopping = asyncio.create_task(self._stop(), name="stop engine")
        await asyncio.shield(self._stopping)

    def kill(self) -> None:
        """End the core at once; a start under way fails. `shutdown` has still to be awaited.

        A core that belongs to another process is left alone.
        """
        self._is_killed = True
        if self._unready_client is not None:
            self._unready_client.kill()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except asyncio.CancelledError:  # nobody will leave the block
            self.kill()
            await self.shutdown()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    @property
    def _engine(self) -> LLMEngine:
        return self._views.llm_engine

    async def _started(self) -> None:
        """Wait for the start, which the first call begins."""
        if self._starting is None:
            if self._is_shut_down:
                raise EngineDeadError("the engine has been shut down; make a new AsyncLLM.")
            self._loop = asyncio.get_running_loop()
            self._starting = asyncio.create_task(self._start(), name="start engine")
        self._check_loop()
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        attachment = self.attachment
        make: Callable[..., EngineCoreClient] = factory.make_async_mp_client
        if attachment is not None:
            make = functools.partial(factory.attach_client, attachment)
        self._host = EngineHost(
            self._config,
            attachment=attachment,
            labelled_name=self.labelled_name,
            metric_sources=self.metric_sources,
            metric_exporters=self.metric_exporters,
        )
        # Off the loop, which meanwhile serves whoever asks how far the start is.
        start = functools.partial(self._host.start, functools.partial(self._make_client, make))
        try:
            self.llm_engine = await asyncio.to_thread(start)
        except asyncio.CancelledError:  # the loop ends, and only there could it have been used
            self.kill()
            raise
        self._begin_views(self._host)
        self._handler = OutputHandler(self.llm_engine)
        if not self._is_shut_down:
            self._remains = _Remains(self, self._host, self._handler, self._text_threads)

    async def _stop(self) -> None:
        if self._starting is not None and self._loop is asyncio.get_running_loop():
            await asyncio.gather(self._starting, return_exceptions=True)
        self._text_threads.close()
        if self._host is not None:
            await _close(self._host, self._handler)

    def _make_client(
        self, make: Callable[..., EngineCoreClient], *args: Any, **kwargs: Any
    ) -> EngineCoreClient:
        """Make the client, and remember it before its core is up, so that `kill` can end it."""
        with children_outlive_sigterm():
            client = make(*args, **kwargs)
        assert isinstance(client, AsyncMPClient)
        self._unready_client = client
        if self._is_killed:
            client.kill()
        return client

    def _raise_if_dead(self) -> None:
        if self.dead_error is not None:
            # Raised many times: each would leave the frames that it came through in it.
            raise self.dead_error.with_traceback(None)

    def _check_loop(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            raise EventLoopError(
                "this AsyncLLM was started on another event loop and can be awaited only there: "
                "run all its life in one asyncio.run, or make an AsyncLLM for this loop; from "
                "another thread, use asyncio.run_coroutine_threadsafe with its loop. Once its loop "
                "is closed, shutdown() may be awaited on any."
            )


class _Remains:
    """What is to be closed of an engine that nobody has shut down, and does not hold the engine.

    Make it on the engine's event loop.
    """

    def __init__(
        self, engine: AsyncEngine, host: EngineHost, handler: OutputHandler, texts: TextThreads
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._host, self._handler, self._texts = host, handler, texts
        self._timeout_s = engine.config.process.engine_shutdown_timeout_s + _SPARE_S
        self._finalizer = weakref.finalize(engine, self._close_dropped)
        self._finalizer.atexit = False
        # Behind what the core's client registered, and so before it at the end of the interpreter.
        atexit.register(self._close_at_exit)

    def detach(self) -> None:
        """Leave closing to somebody else."""
        self._finalizer.detach()
        atexit.unregister(self._close_at_exit)

    def _close_dropped(self) -> None:
        """On the loop, which knows the engine; without one, the core's own finaliser has to do."""
        if self._host.is_foreign:
            return
        atexit.unregister(self._close_at_exit)
        self._texts.close()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(
                lambda: self._loop.create_task(_close(self._host, self._handler))
            )

    def _close_at_exit(self) -> None:
        """While modules are whole; the loop may be running in a thread that ends with us."""
        if self._host.is_foreign:
            return
        self._finalizer.detach()
        self._texts.close()
        if not self._loop.is_running():
            self._host.shutdown()
            return
        closing = asyncio.run_coroutine_threadsafe(_close(self._host, self._handler), self._loop)
        with contextlib.suppress(TimeoutError):  # it is stuck; the core's own finaliser comes next
            closing.result(self._timeout_s)


async def _close(host: EngineHost, handler: OutputHandler | None) -> None:
    if handler is not None:
        await handler.stop()
    # A thread of its own: those that the loop lends may all be busy for longer.
    thread = ThreadPoolExecutor(1, thread_name_prefix="shutdown")
    try:
        closing = asyncio.get_running_loop().run_in_executor(thread, host.shutdown)
    except RuntimeError:  # no thread begins any more at the end of the interpreter
        host.shutdown()
    else:
        await closing
    finally:
        thread.shutdown(wait=False)
