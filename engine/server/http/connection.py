"""HTTP/1.1 connections: uvicorn's protocol over httptools, with the bounds that it lacks.

httptools collects a request's line and headers however long they are, and waits for them for as
long as the client likes; both happen before there is a request that the application could refuse.
Here a head has a largest size and a time, a connection has so many requests in flight, and the
server so many connections. A client that closes its side has left. Knows no routes.
"""

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import httptools
import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from engine.server.http.cycle import CurrentHeaders, Http10Cycle
from engine.server.http.errors import ApiError

_MAX_PIPELINED = 16
"""Requests that are taken in before the one that is being answered has been."""
_PART_BYTES = 1024
"""At most so much is parsed at once, but for bodies of known length: the pipeline can be full only
between two parts, and an empty request has 18 bytes."""
_DRAIN_S = 2.0
"""How long the rest of a message is taken in whose answer has gone out already."""
_NOTHING = memoryview(b"")


class Refused(Protocol):
    """Told of each request that is refused before it is one; may add headers to its answer."""

    def __call__(
        self,
        error: ApiError,
        client: tuple[str, int] | None,
        *,
        begin_ns: int,
        num_bytes: int,
    ) -> None:
        """Since when it has been coming, and how long the answer's body is."""


Left = Callable[[Scope], None]
"""Told of each request whose client left while those before it were being answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one connection, and all of them together, may take up."""

    max_head_bytes: int
    head_timeout_s: float
    max_connections: int | None = None


class _Flow(FlowControl):
    """uvicorn's, with a reason of ours not to read."""

    is_held = False

    def hold(self) -> None:
        """Read nothing until `release`, whoever asks."""
        self.pause_reading()
        self.is_held = True

    def release(self) -> None:
        self.is_held = False
        self.resume_reading()

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """One connection; see the file's docstring for what it adds."""

    flow: _Flow

    def __init__(
        self,
        *arguments: Any,
        limits: ConnectionLimits,
        refused: Refused | None = None,
        left: Left | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._refused = refused
        self._left = left
        self._is_in_head = True
        self._has_begun = False
        """Whether the first bytes of the head that is awaited have come: else nobody is late."""
        self._num_bare_bytes = 0
        """Since the last whole head, or the last part of a body: of what has no other bound."""
        self._num_body_bytes = 0
        self._is_whole = True
        """Whether all of the last message has arrived."""
        self._ignores_upgrade = False
        """Whether the head asks for another protocol, and has a body: it is parsed again without
        asking, since the parser would take the body for that protocol's."""
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._held = _NOTHING
        """What has been read, and is not parsed before there is room in the pipeline."""
        self._refusal: ApiError | None = None
        """What the client is told when all before it has been answered."""
        self._begin_ns = time.monotonic_ns()
        """When the last message began, else the connection."""

    @property
    def _is_answered(self) -> bool:
        """Whether every request that was taken in has been."""
        return self.cycle is None or self.cycle.response_complete

    # -- the connection ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow = _Flow(self.transport)
        most = self._limits.max_connections
        if most is not None and len(self.connections) > most:
            self._refuse(
                ApiError(503, "the server has no connection to spare", code="too_many_connections")
            )
            return
        self._await(self._limits.head_timeout_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        self._held = _NOTHING
        running = self._running
        if running is not None and not running.response_complete:
            # uvicorn tells the last of a pipeline, which is not the one that is being answered.
            running.disconnected = True
            running.message_event.set()
            if self._left is not None:
                for cycle, _ in reversed(self.pipeline):
                    self._left(cycle.scope)
        self.pipeline.clear()
        super().connection_lost(exc)

    # -- what comes in -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.transport.is_closing():
            return
        self._held = memoryview(self._held.tobytes() + data) if self._held else memoryview(data)
        self._parse()

    def _parse(self) -> None:
        """Parse what has been read, until the pipeline is full."""
        while self._held and len(self.pipeline) < _MAX_PIPELINED:
            part = self._held
            if len(part) > _PART_BYTES:
                part = part[: self._num_wanted()]
            self._held = self._held[len(part) :]
            if self._is_in_head and self._timer is None:
                self._await(self._limits.head_timeout_s, self._head_is_late)
            self._num_bare_bytes += len(part)
            self._feed(part)
            if self._refusal is not None or self.transport.is_closing():
                return
            # Whole heads are for the application's guard, which counts them exactly.
            if self._num_bare_bytes > self._limits.max_head_bytes:
                self._refuse(head_too_large(self._limits.max_head_bytes))
                return
        if self._held:
            self.flow.hold()
        elif self._has_begun and self._timer is None:
            self._await(self._limits.head_timeout_s, self._head_is_late)

    def _num_wanted(self) -> int:
        """How much is parsed next: of a body that says how long it is, all that is left."""
        if not self._is_whole:
            for name, value in self.headers:
                if name == b"content-length":
                    return max(_PART_BYTES, int(value) - self._num_body_bytes)
        return _PART_BYTES

    def _feed(self, part: memoryview) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade as upgrade:
            rest = part[upgrade.args[0] :].tobytes() + self._held.tobytes()
            if self._ignores_upgrade:
                rest = self._head_without_upgrade() + rest
                # The old one takes nothing any more if that request was the connection's last.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
            self._ignores_upgrade = False
            self._num_bare_bytes = 0
            self._held = memoryview(rest)
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "what came is no request of HTTP/1.1", code="bad_request"))

    def _head_without_upgrade(self) -> bytes:
        """The head once more, for the parser to read what follows as the body that it is."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        self._has_begun = True
        self._begin_ns = time.monotonic_ns()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            names = {name for name, _ in self.headers}
            has_body = b"content-length" in names or b"transfer-encoding" in names
            self._ignores_upgrade = has_body and b"upgrade" in names
            if self._ignores_upgrade:
                return
        self._is_in_head = self._is_whole = self._has_begun = False
        self._num_bare_bytes = self._num_body_bytes = 0
        self._await(None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bare_bytes = 0
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._ignores_upgrade:
            return
        self._is_in_head = self._is_whole = True
        self._num_bare_bytes = 0
        if self._is_answered:
            self._await(None)
        super().on_message_complete()

    # -- what goes out -----------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] != "1.1":
            app = Http10Cycle(cycle, app)
        self._running = cycle
        cycle.default_headers = CurrentHeaders(self.server_state)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._held:
            self.flow.release()
            self._parse()
        if not self._is_answered:
            return
        if self._refusal is not None:
            self._hang_up(self._refusal)
        elif not self._is_whole:  # nobody counts or times what still comes of it
            self._await(_DRAIN_S, self.transport.close)

    # -- refusals ----------------------------------------------------------------------------------

    def _head_is_late(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # it may have come: we do not look
            self._await(self._limits.head_timeout_s, self._head_is_late)
        elif self._has_begun:
            message = "the request's headers took too long to arrive"
            self._refuse(ApiError(408, message, code="request_timeout"))
        elif self._is_answered:  # it has said nothing, so there is nothing to answer
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Take no more from this client, and tell it why behind the answers that it waits for."""
        self._await(None)
        self._held = _NOTHING
        if self.transport.is_closing():
            return
        if not self._is_whole and not self._is_answered:
            if self.cycle is self._running:
                # Behind the first steps of the application, which may have come with these bytes.
                self.flow.hold()
                self.loop.call_soon(self._abandon, error)
                return
            assert self._running is not None
            self.pipeline.popleft()  # of the one that has no end, nobody has been told
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running
        self._refusal = error
        if self._refused is not None:
            num_bytes = len(_body(error))
            self._refused(error, self.client, begin_ns=self._begin_ns, num_bytes=num_bytes)
        if self._is_answered:
            self._hang_up(error)

    def _abandon(self, error: ApiError) -> None:
        """Give up in the middle of a body: who reads it is told that the client has left."""
        if self.transport.is_closing():
            return
        if self.cycle.response_started:
            self._hang_up(None)
        else:
            state = self.cycle.scope["state"]
            state["answered"] = error.status, len(_body(error))
            if "shown_id" in state:
                error.headers["X-Request-Id"] = state["shown_id"]
            self._hang_up(error)

    def _hang_up(self, error: ApiError | None) -> None:
        """Answer outside of the application, and close."""
        if error is not None:
            body = _body(error)
            head = [STATUS_LINE[error.status]]
            head += [b"%s: %s\r\n" % header for header in self.server_state.default_headers]
            head += [b"%s: %s\r\n" % (a.encode(), b.encode()) for a, b in error.headers.items()]
            head.append(b"content-type: application/json\r\nconnection: close\r\n")
            head.append(b"content-length: %d\r\n\r\n" % len(body))
            self.transport.write(b"".join([*head, body]))
        self.transport.close()

    def _await(self, delay_s: float | None, call: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if call is None else self.loop.call_later(delay_s, call)  # type: ignore[arg-type]


def bounded_protocol(
    limits: ConnectionLimits, refused: Refused | None = None, left: Left | None = None
) -> Any:
    """The protocol as uvicorn's `http` setting takes it."""
    return functools.partial(BoundedProtocol, limits=limits, refused=refused, left=left)


def _body(error: ApiError) -> bytes:
    return msgspec.json.encode(error.body())


def head_too_large(max_head_bytes: int) -> ApiError:
    """The answer to a head of more bytes than are allowed."""
    return ApiError(
        431,
        f"the request's line and headers have more than {max_head_bytes} bytes",
        code="headers_too_large",
    )
