"""Bodies of requests: JSON by the book, or a 400 that says where it is not.

Knows bytes and media types. What fields a body has is for pydantic to check, in `protocol`.
"""

import codecs
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

from engine.server.http.errors import ApiError

_JSON_TYPES = ("application/json", "text/json")
MAX_CONTAINERS = 100_000
"""Lists and objects in one body: each is looked at by every collection of garbage while it lives.
A conversation of the most messages that are allowed has a few for each of them."""


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
        is_required = self.body_field.field_info.is_required()

        async def decode_and_handle(request: Request) -> Response:
            body = await request.body()
            if not body and not is_required:
                return await handle(request)
            request.state.num_body_bytes = len(body)
            decoded = decode_json(body, request.headers.get("content-type"))
            self.check(decoded, request)
            return await handle(_Decoded(request.scope, request.receive, decoded))

        return decode_and_handle

    def check(self, body: dict[str, Any], request: Request) -> None:
        """Refuse a decoded body before FastAPI looks into it, by raising `ApiError`."""


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
    """The value of a body; a byte order mark in front of it is passed over (RFC 8259, 8.1).

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
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body:
        raise ApiError(400, "the body is empty; it must be a JSON object", code="invalid_json")
    try:
        value = _decode(body)
    except RecursionError:
        raise ApiError(400, "the body is nested too deep", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def _decode(body: bytes) -> Any:
    """The value of a body, made and counted without a collection of garbage.

    Collections while millions of lists come up would take ten times as long as the lists do.

    Raises:
        ApiError: 400, there are too many lists and objects.
        RecursionError, msgspec.DecodeError, ValueError: it is not JSON.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        num_before = gc.get_count()[0]
        value = msgspec.json.decode(body)
        num_containers = gc.get_count()[0] - num_before  # what a collection would look at
        if num_containers > MAX_CONTAINERS:
            del value  # before the next collection, not after it
            raise ApiError(
                400,
                f"the body has {num_containers} lists and objects; at most {MAX_CONTAINERS} are "
                "allowed",
                code="invalid_json",
            )
        return value
    finally:
        if was_enabled:
            gc.enable()


def json_response(value: Any) -> Response:
    """An answer of JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")
