"""What passes between a client and the application in one exchange, and what is noted of it.

A part of a stream costs a few additions. Knows ASGI's messages; knows no metric's name.
"""

from collections.abc import Awaitable, Callable

from starlette.types import Message, Receive, Send

from engine.server.http.exchange import ExchangeState
from instrumentation.metrics.server import ServerMetrics


class Wire:
    """ASGI's receive and send, and what is noted of what passes.

    Args:
        clock: in nanoseconds.
        shows_id: put the request's id into the answer's head.
    """

    __slots__ = ("_exchange", "_metrics", "_now", "_receive", "_send", "_shows_id")

    def __init__(
        self,
        exchange: ExchangeState,
        receive: Receive,
        send: Send,
        metrics: ServerMetrics,
        *,
        clock: Callable[[], int],
        shows_id: bool,
    ) -> None:
        self._exchange = exchange
        self._receive = receive
        self._send = send
        self._metrics = metrics
        self._now = clock
        self._shows_id = shows_id

    async def receive(self) -> Message:
        """Count the body, and note that the client has left, if that is what comes."""
        message = await self._receive()
        if message["type"] == "http.request":
            self._exchange.num_request_bytes += len(message.get("body", b""))
        elif message["type"] == "http.disconnect" and not self._exchange.is_complete:
            self._exchange.has_left = True
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Count, and hand on: no coroutine of our own for parts of a stream."""
        exchange = self._exchange
        if message["type"] != "http.response.body":
            if message["type"] == "http.response.start":
                self._note_start(message)
            return self._send(message)
        num_bytes = len(message.get("body", b""))
        if num_bytes:
            if not exchange.first_byte_ns:
                exchange.first_byte_ns = self._now()
            exchange.num_bytes += num_bytes
            self._metrics.num_response_bytes[exchange.route] += num_bytes
        if not message.get("more_body", False):
            return self._send_last(message)
        exchange.num_chunks += 1
        self._metrics.num_chunks += 1
        return self._send(message)

    def _note_start(self, message: Message) -> None:
        exchange = self._exchange
        exchange.status = message["status"]
        if self._shows_id:
            own = (b"x-request-id", exchange.request_id.encode("ascii"))
            others = [one for one in message.get("headers", ()) if one[0] != own[0]]
            message["headers"] = [*others, own]

    async def _send_last(self, message: Message) -> None:
        self._exchange.has_left |= self._is_cut_off()
        await self._send(message)
        self._exchange.is_complete = not self._exchange.has_left
        self._exchange.end_ns = self._now()

    def close(self) -> None:
        """The application is done."""
        exchange = self._exchange
        if not exchange.is_complete:
            exchange.has_left |= self._is_cut_off()

    def _is_cut_off(self) -> bool:
        """uvicorn drops what it cannot deliver and tells only those who wait to receive, which an
        application that just answers does not."""
        return bool(getattr(getattr(self._send, "__self__", None), "disconnected", False))
