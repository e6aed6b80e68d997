"""What a request must pass before it gets to a route: its key, its size, its pace.

Pure ASGI, and out of the way once the request has been read: nothing here touches an answer. Knows
paths that are open to everybody; knows nothing of what routes do.
"""

import asyncio
import time
from collections.abc import Iterable, Set

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.config import ServerConfig
from engine.server.http.connection import head_too_large
from engine.server.http.errors import ApiError
from engine.server.http.route_names import METRICS_PATHS, route_path
from engine.server.http.served import Served

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})
"""Asked by load balancers and by people who want to know what is here: they say nothing of users,
and need no key ever."""
PAGES = frozenset({"/docs", "/openapi.json"})
"""What browsers open, which cannot send a key with that, beside the live page. The pages are the
same for everybody; the live one asks for the key and sends it when it fetches what it shows."""

_ENDLESS = "/live/events"
"""A stream that lasts as long as somebody looks; the server's end does not wait for it."""

_MIN_BYTES_PER_S = 1024
"""Pace at which a body has to come once the time-out is up."""
_DRAIN_S = 1.0
"""How long what is left of a refused body is taken in, so that its sender hears the answer: a
connection that is closed with bytes unread is reset."""


class GuardMiddleware:
    """Refuses, in this order: heads that are too long (431), strangers (401), bodies that are too
    large (413) or too slow (408); and counts the requests that are being served."""

    def __init__(self, app: ASGIApp, *, state: Served, pages: Set[str] = frozenset()) -> None:
        self.app = app
        self._state = state
        self._keys = state.keys
        self._max_head_bytes = state.config.max_header_bytes
        self._max_body_bytes = state.config.max_body_bytes
        self._timeout_s = state.config.timeout_read_s
        self._open = OPEN_PATHS | PAGES | pages
        if not state.config.guard_metrics:
            self._open |= METRICS_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = scope["headers"]
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _answer(refusal, scope, receive, send)
            return
        if _has_body(headers):
            receive = _BoundedBody(receive, self._max_body_bytes, self._timeout_s)
        if route_path(scope) == _ENDLESS:
            await self.app(scope, receive, send)
            return
        self._state.num_serving += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._state.num_serving -= 1

    def _refusal(self, scope: Scope, headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
        num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        authorization = content_length = None
        for name, value in headers:
            num_bytes += len(name) + len(value) + len(": \r\n")
            if name == b"authorization" and authorization is None:
                authorization = value
            elif name == b"content-length":
                content_length = value
        if num_bytes > self._max_head_bytes:
            return head_too_large(self._max_head_bytes)
        if route_path(scope) not in self._open and not self._keys.accept(authorization):
            return unauthorized(has_key=authorization is not None)
        if _exceeds(content_length, self._max_body_bytes):
            return _too_large(self._max_body_bytes)
        return None


class _Cors(CORSMiddleware):
    """Starlette's, which refuses a preflight in the form of our errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        text = f"{bytes(response.body).decode()}; --allowed-origins, -methods and -headers decide"
        refusal = ApiError(400, text, code="cors_refused").response()
        for name, value in response.headers.items():
            refusal.headers.setdefault(name, value)
        return refusal


class _BoundedBody:
    """ASGI's receive, which counts what comes and waits only so long for it."""

    __slots__ = ("_deadline_s", "_is_whole", "_left", "_limit", "_receive")

    def __init__(self, receive: Receive, limit: int, timeout_s: float) -> None:
        self._receive = receive
        self._limit = self._left = limit
        self._deadline_s = time.monotonic() + timeout_s
        self._is_whole = False

    async def __call__(self) -> Message:
        if self._is_whole:  # whoever still asks waits for the client to leave
            return await self._receive()
        late = None
        try:
            async with asyncio.timeout(max(0.0, self._deadline_s - time.monotonic())):
                message = await self._receive()
        except TimeoutError as error:
            late = error
        if late is not None:
            self._is_whole = True
            raise HTTPException(408, "the request's body took too long to arrive") from late
        if message["type"] != "http.request":
            return message
        num_bytes = len(message.get("body", b""))
        self._left -= num_bytes
        self._deadline_s += num_bytes / _MIN_BYTES_PER_S
        self._is_whole = not message.get("more_body", False)
        if self._left < 0:
            if not self._is_whole:
                await _drain(self._receive)
            self._is_whole = True
            raise HTTPException(413, _too_large(self._limit).message)
        return message


def add_guards(app: FastAPI, state: Served, *, pages: Set[str]) -> None:
    """Put the guard before the routes and, if browsers are to be let in, CORS before the guard, so
    that preflights need no key and scripts may read refusals too. `pages` need no key either."""
    app.add_middleware(GuardMiddleware, state=state, pages=pages)
    config: ServerConfig = state.config
    if config.allowed_origins:
        app.add_middleware(
            _Cors,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )


def unauthorized(*, has_key: bool) -> ApiError:
    """The answer to a request that needs a key."""
    return ApiError(
        401,
        "the API key is not one of this server's"
        if has_key
        else "an API key is needed, as the header 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the request's body has more than {limit} bytes; send less, or raise --max-body-bytes",
        code="request_too_large",
    )


def _exceeds(content_length: bytes | None, limit: int) -> bool:
    """Whether a body says of itself that it is too long. What it says is not relied on."""
    return (
        content_length is not None
        and content_length.isdigit()
        and (len(content_length) > 18 or int(content_length) > limit)
    )


def _has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)


async def _answer(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request whose body nobody has read."""
    response = error.response()
    await send(
        {"type": "http.response.start", "status": error.status, "headers": response.raw_headers}
    )
    has_body = _has_body(scope["headers"]) and not _waits_for_permission(scope["headers"])
    if has_body:
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        await _drain(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    else:
        await send({"type": "http.response.body", "body": response.body, "more_body": False})


def _waits_for_permission(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the client sends its body only when it has been told to."""
    return any(name == b"expect" for name, _ in headers)


async def _drain(receive: Receive) -> None:
    """Let the rest of a body come, unread, for a moment."""
    try:
        async with asyncio.timeout(_DRAIN_S):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        return
