"""One of several frontends: the process that a supervisor starts."""

import socket
import sys
from typing import Any

import msgspec

from engine.api.async_llm import AsyncLLM
from engine.server.config import ServerConfig
from engine.server.process.serve import run_frontend as serve_frontend
from engine.server.process.threads import leave
from engine.types.attachment import CoreAttachment


def run_frontend(
    *,
    config: dict[str, Any],
    engine_arguments: dict[str, Any],
    attachment: dict[str, Any],
    listener_fd: int,
) -> None:
    """Entry point of the spawned process: attach to the core, serve, end the process."""
    engine = AsyncLLM(attachment=msgspec.convert(attachment, CoreAttachment), **engine_arguments)
    listener = socket.socket(fileno=listener_fd)
    code = serve_frontend(ServerConfig.from_kwargs(**config), engine, listener)
    sys.exit(leave(code))
