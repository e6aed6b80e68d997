"""What goes wrong, as clients of OpenAI's API know it: `{"error": {message, type, param, code}}`.

Knows HTTP statuses and the engine's error tree. What is not known is a 500 that says nothing of
the inside; the log says the rest.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from engine.errors import (
    ConfigError,
    EngineDeadError,
    ModelError,
    ProfilerError,
    QueueFullError,
    RequestError,
)
from engine.log import get_logger
from engine.server.http.route_names import RouteNames, route_path

logger = get_logger(__name__)

_KIND = re.compile(r"(?:str|int|float|bool|dict|list)\b")
"""What pydantic puts behind a field's name to say which of several types it has tried."""

CLIENT_LEFT_STATUS = 499
"""What is recorded for a client that left before its answer; it does not get it any more."""

_TYPE_OF_STATUS = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""Types of errors that are neither `invalid_request_error`, as a 404 of OpenAI's is too, nor
`server_error`."""

_MAX_SHOWN = 256
_CODE_OF_STATUS = {408: "request_timeout", 413: "request_too_large"}
"""Codes of errors that come as Starlette's, which have none."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: what was wrong, what is allowed, what to do.
        param: the field of the request that it is about.
        code: a word for programs, such as model_not_found.
        headers: such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the answer, or of an error event in a stream."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPE_OF_STATUS.get(
                    self.status, "server_error" if self.status >= 500 else "invalid_request_error"
                ),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error, of whatever class."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        wait = {"Retry-After": str(error.retry_after_s)}
        return ApiError(429, str(error), code="queue_full", headers=wait)
    if isinstance(error, RequestError | ConfigError | ProfilerError):
        param, code = getattr(error, "param", None), getattr(error, "code", None)
        return ApiError(400, str(error), param=param, code=code)
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine has died and cannot serve requests", code="engine_dead")
    if isinstance(error, ModelError):
        return ApiError(400, str(error))
    logger.error("a request failed: %r", error, exc_info=error)
    return ApiError(500, "the server failed to handle the request; its log says why")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error of a route in OpenAI's form."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    async def handle_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return _no_route(request).response()
        return ApiError(
            error.status_code,
            str(error.detail),
            code=_CODE_OF_STATUS.get(error.status_code),
            headers=error.headers,
        ).response()

    async def handle_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return validation_error(error).response()

    async def handle_leaving(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_LEFT_STATUS)  # in the middle of its own request

    app.add_exception_handler(ClientDisconnect, handle_leaving)
    app.add_exception_handler(HTTPException, handle_http)
    app.add_exception_handler(RequestValidationError, handle_validation)
    app.add_exception_handler(Exception, handle)
    for kind in (ApiError, RequestError, ConfigError, ProfilerError, EngineDeadError, ModelError):
        app.add_exception_handler(kind, handle)


def _no_route(request: Request) -> ApiError:
    """The answer to a path that no route has."""
    path, server = route_path(request.scope), request.app.state.server
    said = f"there is no route {request.method} {path[:_MAX_SHOWN]}"
    routes_off: RouteNames | None = server.routes_off
    names: Callable[[], RouteNames] | None = server.route_names
    if routes_off is not None and routes_off.methods(path):
        said += ": the server runs with --no-enable-debug-routes"
    elif names is not None and (near := names().nearest(path)) is not None:
        said += f"; did you mean {near}?"
    return ApiError(404, said, code="route_not_found")


def validation_error(error: RequestValidationError) -> ApiError:
    """The first complaint about a body, with the field's name; nothing of what was sent."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    place = list(itertools.takewhile(lambda part: not _KIND.match(part), place))
    param = ".".join(place)[:200] or None
    message = first["msg"].removeprefix("Value error, ")
    contradicting = getattr(first.get("ctx", {}).get("error"), "field", None)
    if contradicting is not None:  # a field that is wrong beside others: the message names it
        return ApiError(400, message, param=contradicting)
    return ApiError(400, f"{param}: {message}" if param else message, param=param)
