"""Methods that routes need not spell out: HEAD wherever there is GET, OPTIONS everywhere, and 405.

Innermost of all middleware: what is answered here has been counted, and let in. Knows routes' paths
and methods; not what they do.
"""

from collections.abc import Callable

from fastapi import FastAPI, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.http.errors import ApiError
from engine.server.http.route_names import RouteNames, route_path


class MethodsMiddleware:
    """Hands on what a route has, and answers the rest.

    Starlette names in `Allow` only what the first route of a path has.
    """

    def __init__(self, app: ASGIApp, *, names: Callable[[], RouteNames]) -> None:
        self.app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method, methods = scope["method"], self._names().methods(route_path(scope))
        if not methods:
            await self.app(scope, receive, send)
        elif method == "HEAD" and "HEAD" in methods:
            await self.app({**scope, "method": "GET"}, *_without_body(receive, send))
        elif method == "OPTIONS":
            await Response(status_code=204, headers=_allow(methods))(scope, receive, send)
        elif method in methods:
            await self.app(scope, receive, send)
        else:
            error = ApiError(
                405,
                f"this path has no method {method}; it has {_listed(methods)}",
                code="method_not_allowed",
                headers=_allow(methods),
            )
            await error.response()(scope, receive, send)


def add_methods(app: FastAPI, names: Callable[[], RouteNames]) -> None:
    """Complete the methods of an application's routes; to be added before all other middleware."""
    app.add_middleware(MethodsMiddleware, names=names)


def _without_body(receive: Receive, send: Send) -> tuple[Receive, Send]:
    """ASGI's two sides for an answer whose head is all that is wanted: it ends there, also where
    the body would be a stream without an end."""
    is_complete = False

    async def receive_until_sent() -> Message:
        return {"type": "http.disconnect"} if is_complete else await receive()

    async def send_head(message: Message) -> None:
        nonlocal is_complete
        if is_complete:
            return
        if message["type"] == "http.response.start":
            await send(message)
            is_complete = True
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await send(message)

    return receive_until_sent, send_head


def _allow(methods: frozenset[str]) -> dict[str, str]:
    return {"Allow": _listed(methods)}


def _listed(methods: frozenset[str]) -> str:
    return ", ".join(sorted(methods))
