"""Bodies of requests: JSON by the book, or a 400 that says where it is not.

Knows bytes and media types. What fields a body has is for pydantic to check, in `protocol`.
"""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

from engine.server.errors import ApiError
from engine.server.limits import check_lengths
from engine.server.state import server_of

_JSON_TYPES = ("application/json", "text/json")


class JsonRoute(APIRoute):
    """A route whose body is decoded strictly before FastAPI sees it.

    Refused are NaN, infinities, lone surrogates, numbers out of range, nesting without an end and
    whatever else JSON does not have, of which Python's own decoder lets some pass.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def decode_and_handle(request: Request) -> Response:
            body = await request.body()
            request.state.num_body_bytes = len(body)
            decoded = decode_json(body, request.headers.get("content-type"))
            check_lengths(decoded, server_of(request))
            return await handle(_Decoded(request.scope, request.receive, decoded))

        return decode_and_handle


class _Decoded(Request):
    """A request whose body has been read and decoded."""

    def __init__(self, scope: Any, receive: Any, decoded: Any) -> None:
        super().__init__(scope, receive)
        self._decoded = decoded

    async def body(self) -> bytes:
        return b"{}"  # something, so that FastAPI asks for its JSON

    async def json(self) -> Any:
        return self._decoded


def decode_json(body: bytes, content_type: str | None) -> Any:
    """The value of a body.

    Raises:
        ApiError: 415 for another media type, 400 for what is not JSON.
    """
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind not in _JSON_TYPES and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            415,
            f"the body must be application/json, got {kind or 'no Content-Type'}"[:200],
            code="unsupported_media_type",
        )
    if not body:
        raise ApiError(400, "the body is empty; it must be a JSON object", code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise ApiError(400, "the body is nested too deep", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def json_response(value: Any) -> Response:
    """An answer of JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")
