"""`GET /load`: how much the server has to do, for those who spread requests over several.

Counts exchanges that generate, waiting or running, as vLLM's route of the same name does. Knows no
engine: what `/metrics` says of sequences is more than this.
"""

from typing import Any

from fastapi import APIRouter, Request

from engine.server.admin.debug import answered
from engine.server.cluster.peers import Peers
from engine.server.state import ServerState, server_of

router = APIRouter()


@router.get("/load")
async def show_load(request: Request) -> dict[str, Any]:
    """Requests for completions and chats that have arrived and not ended; of several frontends, all
    that answer are asked."""
    server = server_of(request)
    own = num_generating(server)
    if server.peers is None:
        return {"server_load": own}
    others = await server.peers.ask("load")
    told = {server.peers.index: own, **others.by_index}
    return {"server_load": sum(told.values()), "frontends": answered(told, others.silent)}


def num_generating(server: ServerState) -> int:
    """This frontend's requests for completions and chats that are under way."""
    return sum(one.generates for one in server.observation.in_flight.values())


def answer_peers(peers: Peers, server: ServerState) -> None:
    """Let the other frontends ask for what this one has to do."""

    async def load() -> int:
        return num_generating(server)

    peers.answerers["load"] = load
