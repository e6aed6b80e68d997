"""What the connection knows of the server behind it: how far its life has got, and its settings."""

import enum
from typing import Protocol

from engine.api.async_llm import AsyncLLM
from engine.server.config import ServerConfig
from engine.server.http.auth import ApiKeys


class Phase(enum.Enum):
    """How far the server's life has got."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    DEAD = "dead"


class Served(Protocol):
    """The part of `ServerState` that this room needs."""

    engine: AsyncLLM
    config: ServerConfig
    keys: ApiKeys
    phase: Phase
    num_serving: int
    """HTTP requests that are being answered, but for streams without an end."""
