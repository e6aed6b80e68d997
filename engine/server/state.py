"""What all routes share: the engine, the settings, and how far its life has got.

Knows when requests are taken. Does not know HTTP's forms.
"""

import enum
import time

from fastapi import Request

from engine.api.async_llm import AsyncLLM
from engine.server.admission import Admission
from engine.server.auth import ApiKeys
from engine.server.config import ServerConfig
from engine.server.errors import ApiError


class Phase(enum.Enum):
    """How far the server's life has got."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    DEAD = "dead"


class ServerState:
    """One per process; routes get it through `server_of`."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig, keys: ApiKeys | None = None) -> None:
        self.engine = engine
        self.config = config
        self.keys = keys or ApiKeys()
        self.phase = Phase.STARTING
        self.num_serving = 0
        """HTTP requests that are being answered, but for streams without an end."""
        self.admission = Admission(engine, config)
        self.started_unix_s = int(time.time())
        if config.served_model_name:
            engine.labelled_name = config.served_model_name[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may use; the first is the one that answers carry."""
        return self.config.served_model_name or (self.engine.model_name,)

    def require_ready(self) -> None:
        """Refuse where the engine cannot take requests.

        Raises:
            ApiError: 503, with Retry-After where waiting helps.
        """
        if self.phase is Phase.STARTING:
            raise ApiError(
                503,
                "the engine is still starting; try again in a moment",
                code="engine_starting",
                headers={"Retry-After": "2"},
            )
        if self.phase is Phase.STOPPING:
            raise ApiError(
                503,
                "the server is shutting down and takes no more requests",
                code="shutting_down",
                headers={"Retry-After": "5"},
            )
        if self.phase is Phase.DEAD:
            raise ApiError(503, "the engine has died", code="engine_dead")

    def check_model(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            ApiError: 404, the name is not served.
        """
        if name is None or name == "":
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; there is {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )
        return name


def server_of(request: Request) -> ServerState:
    """The state of the server that a request came to."""
    state: ServerState = request.app.state.server
    return state
