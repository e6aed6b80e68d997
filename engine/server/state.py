"""What all routes share: the engine, the settings, and how far its life has got.

Knows when requests are taken. Does not know HTTP's forms.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import Request

from engine.api.async_llm import AsyncLLM
from engine.server.cluster.admission import Admission
from engine.server.cluster.metrics_page import MetricsPage
from engine.server.cluster.peers import Peers
from engine.server.cluster.recording import ServerRecording
from engine.server.config import ServerConfig
from engine.server.http.auth import ApiKeys
from engine.server.http.errors import ApiError
from engine.server.http.observe import Observation
from engine.server.http.route_names import RouteNames
from engine.server.http.served import Phase
from engine.server.openai.tools.chat_templates import ChatTemplates


class ServerState:
    """One per process; routes get it through `server_of`.

    Attributes:
        observation: what has been seen of requests; `make_app` puts it here.
        metrics_page: where scrapes read from; `add_metrics` puts it here.
        control_call: the last call to the engine core that steers it.
        route_names: of all that is served; `make_app` puts it here.
        routes_off: those that the settings have turned off.
        flight_record: the last that was written.
        flight_record_until_s: until then it is the answer to whoever asks for one.
    """

    observation: Observation
    metrics_page: MetricsPage
    control_call: asyncio.Task[Any] | None = None
    route_names: Callable[[], RouteNames] | None = None
    routes_off: RouteNames | None = None
    flight_record: Path | None = None
    flight_record_until_s: float = 0.0

    def __init__(self, engine: AsyncLLM, config: ServerConfig, keys: ApiKeys | None = None) -> None:
        self.engine = engine
        self.config = config
        self.keys = keys or ApiKeys()
        self.phase = Phase.STARTING
        self.num_serving = 0
        """HTTP requests that are being answered, but for streams without an end."""
        self.admission = Admission(engine, config)
        self.chat_templates = ChatTemplates(config)
        self.peers: Peers | None = None
        """The other frontends, where there are several."""
        attachment = engine.attachment
        if attachment is not None:
            self.peers = Peers(
                attachment.directory, attachment.client_index, config.api_server_count
            )
        self.recording = ServerRecording(engine, self.peers)
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
