"""One server process from its first socket to its last request.

Listens at once; the engine starts behind it. Knows signals and the order of the end: no more
admissions, running requests to their end or the time-out, engine, process.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from engine.api.async_llm import AsyncLLM
from engine.errors import ConfigError, IsinglassError
from engine.log import get_logger
from engine.server.app import make_app
from engine.server.config import ServerConfig
from engine.server.state import Phase, ServerState

logger = get_logger(__name__)

_POLL_S = 0.05


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: the life of the engine decides."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_server(config: ServerConfig, engine_arguments: dict[str, Any]) -> int:
    """Serve until a signal or the engine's death; returns the exit code.

    Raises:
        ConfigError: a wrong setting, or an address that cannot be listened at.
    """
    engine = AsyncLLM(**engine_arguments)
    listener = listen(config)
    with uvicorn_loop() as runner:
        return runner.run(_serve(ServerState(engine, config), listener))


def uvicorn_loop() -> "asyncio.Runner":
    """An event loop of uvloop's making."""
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the address is taken, or cannot be listened at.
    """
    try:
        if config.uds is not None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(config.uds)
        else:
            family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
            listener = socket.socket(family)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        where = config.uds or f"{config.host}:{config.port}"
        raise ConfigError(f"cannot listen at {where}: {error}") from error
    return listener


async def _serve(state: ServerState, listener: socket.socket) -> int:
    config, engine = state.config, state.engine
    server = _Server(
        uvicorn.Config(
            make_app(state),
            http="httptools",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            root_path=config.root_path,
            timeout_keep_alive=config.timeout_keep_alive_s,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            ssl_ca_certs=config.ssl_ca_certs,
        )
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    code = 0
    try:
        await engine.start()
        state.phase = Phase.READY
        logger.info("ready at %s", listener.getsockname())
        death = asyncio.create_task(engine.wait_for_death())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([death, stopping], return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            state.phase, code = Phase.DEAD, 1
        else:
            state.phase = Phase.STOPPING
    except IsinglassError as error:
        logger.error("the engine did not start: %s", error)
        state.phase, code = Phase.DEAD, 1
    finally:
        await engine.shutdown()
        server.should_exit = True
        await serving
    return code
