"""Is the engine there: `/health`, `/ping`, `/version`."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.server.http.served import Phase
from engine.server.state import server_of
from engine.version import __version__

router = APIRouter()

_UNREADY: dict[int | str, dict[str, Any]] = {
    503: {
        "description": "Starting, stopping or dead.",
        "content": {"application/json": {"example": {"status": "starting"}}},
    }
}


@router.get("/health", responses=_UNREADY)
async def health(request: Request) -> Response:
    """200 when requests are served, else 503 with the reason."""
    phase = server_of(request).phase
    return JSONResponse({"status": phase.value}, status_code=200 if phase is Phase.READY else 503)


@router.get("/ping", responses=_UNREADY)
@router.post("/ping", responses=_UNREADY)
async def ping(request: Request) -> Response:
    """The same, under the name that SageMaker asks for."""
    return await health(request)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of the server."""
    return {"version": __version__}
