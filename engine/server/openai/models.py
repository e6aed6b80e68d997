"""`GET /v1/models`: which names may be used."""

from typing import Any

from fastapi import APIRouter, Request

from engine.server.openai.protocol.common import ErrorResponse
from engine.server.openai.protocol.models import ModelCard, ModelList
from engine.server.state import ServerState, server_of

router = APIRouter()


@router.get("/v1/models", response_model=ModelList)
@router.get("/v1/models/", response_model=ModelList, include_in_schema=False)
async def list_models(request: Request) -> dict[str, Any]:
    """All names under which the model is served."""
    state = server_of(request)
    return {"object": "list", "data": [_card(state, name) for name in state.model_names]}


@router.get(
    "/v1/models/{model:path}",
    response_model=ModelCard,
    responses={404: {"model": ErrorResponse, "description": "The model is not served here."}},
)
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """One of them."""
    state = server_of(request)
    return _card(state, state.check_model(model))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started_unix_s,
        "owned_by": "isinglass",
        "root": state.engine.model_name,
        "parent": None,
        "max_model_len": state.engine.config.model.max_model_len,
        "permission": [],
    }
