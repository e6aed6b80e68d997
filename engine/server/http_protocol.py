"""HTTP/1.1 connections: uvicorn's protocol over httptools, with the bounds that it lacks.

httptools collects a request's line and headers however long they are, and waits for them for as
long as the client likes; both happen before there is a request that the application could refuse.
Here a head has a largest size and a time, a connection has so many requests in flight, and the
server so many connections. Knows no routes.
"""

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from engine.server.errors import ApiError

_MAX_PIPELINED = 16
"""Requests that a connection may send before it has had the answer to the one before."""
_DRAIN_S = 2.0
"""How long the rest of a message is taken in whose answer has gone out already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one connection, and all of them together, may take up."""

    max_head_bytes: int
    head_timeout_s: float
    max_connections: int | None = None


class BoundedProtocol(HttpToolsProtocol):
    """One connection; see the file's docstring for what it adds."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._is_in_head = True
        self._num_head_bytes = 0
        self._is_whole = True
        """Whether all of the last message has arrived."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        most = self._limits.max_connections
        if most is not None and len(self.connections) > most:
            self._refuse(
                ApiError(503, "the server has no connection to spare", code="too_many_connections")
            )
            return
        self._await(self._limits.head_timeout_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_in_head:
            if self._num_head_bytes == 0 and self._timer is None:
                self._await(self._limits.head_timeout_s, self._head_is_late)
            self._num_head_bytes += len(data)
        super().data_received(data)
        # One read is at most 256 KiB, so what is held meanwhile is bounded too. A head that is
        # complete has been counted exactly, by the application's own guard.
        if self._is_in_head and self._num_head_bytes > self._limits.max_head_bytes:
            self._refuse(head_too_large(self._limits.max_head_bytes))

    def on_headers_complete(self) -> None:
        self._is_in_head = self._is_whole = False
        self._num_head_bytes = 0
        self._await(None)
        if len(self.pipeline) >= _MAX_PIPELINED:
            self.transport.close()
            return
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = self._is_whole = True
        if self.cycle is not None and self.cycle.response_complete:
            self._await(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Nobody counts or times what still comes of a message that has been answered.
        if not self._is_whole and not self.transport.is_closing():
            self._await(_DRAIN_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _head_is_late(self) -> None:
        if self._num_head_bytes == 0:  # it has said nothing, so there is nothing to answer
            self.transport.close()
        else:
            self._refuse(ApiError(408, "the request's headers took too long to arrive"))

    def _await(self, delay_s: float | None, call: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if call is None else self.loop.call_later(delay_s, call)  # type: ignore[arg-type]

    def _refuse(self, error: ApiError) -> None:
        """Answer outside of the application, and hang up."""
        self._await(None)
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else it would land in an answer
            body = msgspec.json.encode(error.body())
            head = [STATUS_LINE[error.status]]
            head += [b"%s: %s\r\n" % header for header in self.server_state.default_headers]
            head.append(b"content-type: application/json\r\nconnection: close\r\n")
            head.append(b"content-length: %d\r\n\r\n" % len(body))
            self.transport.write(b"".join([*head, body]))
        self.transport.close()


def bounded_protocol(limits: ConnectionLimits) -> Any:
    """The protocol as uvicorn's `http` setting takes it."""
    return functools.partial(BoundedProtocol, limits=limits)


def head_too_large(max_head_bytes: int) -> ApiError:
    """The answer to a head of more bytes than are allowed."""
    return ApiError(
        431,
        f"the request's line and headers have more than {max_head_bytes} bytes",
        code="headers_too_large",
    )
