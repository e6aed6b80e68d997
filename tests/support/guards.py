"""What guards see of a server."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from engine.server.config import ServerConfig
from engine.server.http.auth import ApiKeys


def make_state(keys: Iterable[str] = (), **settings: Any) -> Any:
    config = ServerConfig.from_kwargs(**settings)
    return SimpleNamespace(config=config, keys=ApiKeys(keys), num_serving=0)
