"""Steering a running engine over HTTP: profiles, recordings, prefix cache; and what is in force.

Knows which call is made and what its failure means to a client. No path comes from a client, ever:
the server's settings say where files go, and answers name them.
"""

import asyncio
import re
from collections.abc import Coroutine, Mapping
from dataclasses import asdict
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from engine.errors import ConfigError, EngineDeadError, IsinglassError
from engine.log import get_logger
from engine.server.http.errors import ApiError
from engine.server.http.json_body import JsonRoute
from engine.server.state import ServerState, server_of
from engine.version import __version__
from instrumentation import ProfileStatus
from instrumentation.audit import audit

CALL_TIMEOUT_S = 30.0
"""How long the engine core gets to answer; one that hangs must not collect callers."""

logger = get_logger(__name__)
router = APIRouter(tags=["control"], route_class=JsonRoute)
T = TypeVar("T")

_SECRET = re.compile(r"^(ssl_|api_key)|password|secret")
_Limit = Annotated[int, Field(strict=True, ge=1, le=1 << 50)]


class ProfileRequest(BaseModel):
    """What a profile is to hold."""

    model_config = ConfigDict(extra="forbid")

    max_steps: _Limit | None = Field(
        default=None,
        description="Steps after which it ends by itself; default: --profiler-max-steps.",
    )
    max_bytes: _Limit | None = Field(
        default=None, description="Size at which it ends by itself; default: --profiler-max-bytes."
    )
    with_stack: bool = Field(
        default=False, description="Python's calls too, which slows steps down."
    )
    record_shapes: bool = Field(default=False, description="The operators' shapes too.")


async def ask_engine(request: Request, call: Coroutine[Any, Any, T]) -> T:
    """Make one call to the engine core, one at a time; one that gets no answer stays the only one,
    since its thread cannot be had back.

    Raises:
        ApiError: 409, it cannot be done now; 503, the engine is not there; 504, it does not answer.
    """
    server = server_of(request)
    before = server.control_call
    if before is not None and not before.done():
        call.close()
        raise ApiError(
            409,
            "another call to the engine core is under way; if that lasts, the core hangs",
            headers={"Retry-After": "1"},
        )
    task = server.control_call = asyncio.create_task(call, name="control call")
    done, _ = await asyncio.wait([task], timeout=CALL_TIMEOUT_S)
    if not done:
        task.add_done_callback(_look_at)
        raise ApiError(
            504, f"the engine core has not answered within {CALL_TIMEOUT_S:g} s; it may hang"
        )
    try:
        return task.result()
    except (ConfigError, EngineDeadError):
        raise
    except IsinglassError as error:
        raise ApiError(409, str(error)) from error


def _look_at(task: "asyncio.Task[Any]") -> None:
    """Take the result of a call that nobody waits for any more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("a call to the engine core that took too long has failed: %s", error)


def ready_server(request: Request) -> ServerState:
    """The server, whose engine is up.

    Raises:
        ApiError: 503, it is not.
    """
    server = server_of(request)
    server.require_ready()
    return server


@router.post("/start_profile")
async def start_profile(request: Request, options: ProfileRequest | None = None) -> dict[str, Any]:
    """Profile with torch from the next step on, in every worker. 409: one is running already."""
    engine = ready_server(request).engine
    wanted = (options or ProfileRequest()).model_dump()
    return _profiles(await ask_engine(request, engine.start_profile(**wanted)))


@router.post("/stop_profile")
async def stop_profile(request: Request) -> dict[str, Any]:
    """End the profiles; their files are written while steps go on. 409: none is running."""
    engine = ready_server(request).engine
    return _profiles(await ask_engine(request, engine.stop_profile()))


@router.get("/profile_status")
async def profile_status(request: Request) -> dict[str, Any]:
    """How far each worker's last profile is."""
    engine = ready_server(request).engine
    return _profiles(await ask_engine(request, engine.profile_status()))


@router.post("/start_trace")
async def start_trace(request: Request) -> dict[str, Any]:
    """Record every step and request from now on, into a new run folder below --trace-dir (runs
    in the server's folder without it); of several frontends, all that answer write their part into
    it. 409: a recording is being written already."""
    recording = ready_server(request).recording
    try:
        return await ask_engine(request, recording.start())
    except ConfigError as error:  # no setting of this client's
        raise ApiError(500, str(error)) from error


@router.post("/stop_trace")
async def stop_trace(request: Request) -> dict[str, Any]:
    """End the recording; `isinglass trace summary RUN_DIR` reads it. 409: there is none."""
    told = await ask_engine(request, ready_server(request).recording.stop())
    if told is None:
        raise ApiError(409, "nothing is being recorded; /start_trace begins a recording")
    return told


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> dict[str, Any]:
    """Forget all cached prefixes. 409, and nothing done, while requests are running."""
    engine = ready_server(request).engine
    if not await ask_engine(request, engine.reset_prefix_cache()):
        raise ApiError(409, "requests are running, whose blocks are in use; try again without any")
    return {"reset": True}


@router.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """What is in force: settings by group, what start-up decided, and what is being observed."""
    server = server_of(request)
    engine = server.engine
    llm_engine = getattr(engine, "llm_engine", None)
    is_tracing = None if llm_engine is None else llm_engine.tracer.is_on
    settings = {group: shown(values) for group, values in engine.config.to_dict().items()}
    return {
        "version": __version__,
        "phase": server.phase.value,
        "started_unix_s": server.started_unix_s,
        "models": list(server.model_names),
        "settings": settings | {"server": shown(asdict(server.config))},
        "ready": None if llm_engine is None else msgspec.structs.asdict(llm_engine.ready),
        "observability": [
            {"option": line.option, "state": str(line.state), "detail": hide_password(line.detail)}
            for line in audit(engine.config.observability, is_tracing=is_tracing, has_server=True)
        ],
    }


def shown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that anybody with a key may see: of secrets, and where they lie, whether they are
    set."""
    return {
        name: ("set" if value else None) if _SECRET.search(name) else hide_password(value)
        for name, value in settings.items()
    }


def hide_password(value: Any) -> Any:
    """A text whose addresses name no user and no password."""
    if not isinstance(value, str) or "@" not in value or "://" not in value:
        return value
    return " ".join(_without_user(word) for word in value.split(" "))


def _without_user(word: str) -> str:
    try:
        parts = urlsplit(word)
    except ValueError:
        return "***"
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _profiles(statuses: list[ProfileStatus]) -> dict[str, Any]:
    return {"profiles": [msgspec.to_builtins(status) for status in statuses]}
