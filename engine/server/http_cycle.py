"""One exchange with a client of HTTP/1.0, which knows no chunks and closes unless told otherwise.

Knows how the end of an answer is told (RFC 9112, sections 6.3 and 9.3). Knows no connections.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class OldCycle(RequestResponseCycle):
    """uvicorn's, made one of these by `of`.

    An answer without a Content-Length ends with its connection. One with it leaves the connection
    open where the client has asked for that.
    """

    is_half_closed = False
    """The client sends no more, and perhaps is no more: nothing that it could skip may be sent to
    find out. Who waits for it to leave is told that it has; who just answers, answers."""
    _is_read = _ends_with_connection = False

    @classmethod
    def of(cls, cycle: RequestResponseCycle) -> "OldCycle":
        """The same exchange, before it has begun."""
        cycle.__class__ = cls
        assert isinstance(cycle, cls)
        cycle.waiting_for_100_continue = False  # such a client would take it for the answer
        return cycle

    def half_close(self) -> None:
        """The client's side has been closed."""
        self.is_half_closed = True
        self.message_event.set()

    async def receive(self) -> Any:
        """As uvicorn's; see `is_half_closed`."""
        if self._is_read and self.is_half_closed:
            return {"type": "http.disconnect"}
        message = await super().receive()
        if message["type"] == "http.request":
            if self._is_read:
                return {"type": "http.disconnect"}
            self._is_read = not message["more_body"]
        return message

    async def send(self, message: Any) -> None:
        """As uvicorn's, but for the frame."""
        if message["type"] == "http.response.start" and not self.response_started:
            message = self._framed(message)
        elif self._ends_with_connection:
            self.expected_content_length = len(message.get("body", b""))  # as long as it is
        await super().send(message)

    def _framed(self, start: dict[str, Any]) -> dict[str, Any]:
        headers = [
            one for one in start.get("headers", ()) if one[0].lower() != b"transfer-encoding"
        ]
        if not any(name.lower() == b"content-length" for name, _ in headers):
            self.chunked_encoding = False
            self._ends_with_connection = True
        elif self._wants_to_stay():
            self.keep_alive = True
            headers.append((b"connection", b"keep-alive"))
        return {**start, "headers": headers}

    def _wants_to_stay(self) -> bool:
        options = b",".join(value for name, value in self.scope["headers"] if name == b"connection")
        return b"keep-alive" in [one.strip() for one in options.lower().split(b",")]
