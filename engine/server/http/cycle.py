"""How uvicorn's answers are put right: their date, and their end for a client of HTTP/1.0, which
knows no chunks and closes unless told otherwise.

Knows how the end of an answer is told (RFC 9112, sections 6.3 and 9.3). Knows no connections.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState


class CurrentHeaders:
    """uvicorn's headers of every answer when it begins, not when its request came: the date."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def __add__(self, others: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        return self._state.default_headers + others


class Http10Cycle:
    """An application in front of another one, which puts uvicorn's answers into HTTP/1.0's form.

    An answer without a Content-Length ends with its connection. One with it leaves the connection
    open where the client has asked for that.
    """

    def __init__(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._cycle = cycle
        self._app = app
        self._ends_with_connection = False
        cycle.waiting_for_100_continue = False  # such a client would take it for the answer
        cycle.keep_alive = self._wants_to_stay()

    @property
    def disconnected(self) -> bool:
        """As uvicorn's: whether what is sent is dropped."""
        return self._cycle.disconnected

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, self.send)

    async def send(self, message: Any) -> None:
        """As uvicorn's, but for the frame."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            message = self._framed(message)
        elif self._ends_with_connection and not cycle.disconnected:
            # By ourselves: uvicorn sends a body in chunks, or of the length that it was told.
            cycle.transport.write(message.get("body", b""))
            message = {**message, "body": b""}
        await cycle.send(message)

    def _framed(self, start: dict[str, Any]) -> dict[str, Any]:
        cycle = self._cycle
        headers = [
            one for one in start.get("headers", ()) if one[0].lower() != b"transfer-encoding"
        ]
        if not any(name.lower() == b"content-length" for name, _ in headers):
            cycle.chunked_encoding = cycle.keep_alive = False
            self._ends_with_connection = cycle.scope["method"] != "HEAD"
        elif cycle.keep_alive:
            headers.append((b"connection", b"keep-alive"))
        return {**start, "headers": headers}

    def _wants_to_stay(self) -> bool:
        headers = self._cycle.scope["headers"]
        options = b",".join(value for name, value in headers if name == b"connection")
        return b"keep-alive" in [one.strip() for one in options.lower().split(b",")]
