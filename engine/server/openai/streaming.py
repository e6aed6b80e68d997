"""From the engine's streams to one HTTP answer: server-sent events, or one JSON document.

Knows ASGI, the order in which things may go wrong, and that a client may leave or stall. Does not
know what is in an event: that is a `Writer`'s business.

The answer begins with the engine's first output, so that what goes wrong before it has a status of
its own. A client that stalls holds up its own answer only: the engine's outputs are merged
meanwhile (see `RequestStream`), so that no more is kept than the text it has not got.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from engine.errors import EngineDeadError
from engine.frontend.output_stream import RequestStream
from engine.log import get_logger
from engine.server.http.errors import CLIENT_LEFT_STATUS, ApiError, as_api_error
from engine.server.http.served import Phase
from engine.server.openai.sampling import in_api_words
from engine.server.openai.usage import Usage
from engine.server.state import ServerState
from engine.types.outputs import RequestOutput

logger = get_logger(__name__)

DONE = b"data: [DONE]\n\n"

_OUTCOMES = {
    "engine_dead": "engine_error",
    "engine_error": "engine_error",
    "shutting_down": "cancelled",
    "generation_refused": "client_error",
}
"""What became of a stream that ended with an error event, by the event's code."""

_encode = msgspec.json.encode
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


class Writer(Protocol):
    """Makes the events of one HTTP request."""

    usage: Usage

    def write(self, number: int, output: RequestOutput) -> bytes:
        """Events for an output of prompt `number`; maybe none."""
        ...

    def end(self) -> bytes:
        """Events behind the last output, before the one that says that it was the last."""
        ...


class Collector(Protocol):
    """Makes one document of the final outputs of one HTTP request."""

    usage: Usage

    def add(self, number: int, output: RequestOutput) -> None:
        """Take the only output of prompt `number`."""
        ...

    def document(self) -> dict[str, Any]:
        """The answer."""
        ...


class ClientLeftError(Exception):
    """Nobody reads the answer any more."""


class GenerationError(Exception):
    """The engine could not go on with a request, and lives on."""

    def __init__(self, output: RequestOutput) -> None:
        super().__init__(output.error or "the engine could not go on with the request")
        self.is_clients_fault = output.error_kind == "input"


def event(value: Any) -> bytes:
    """A server-sent event with a JSON document."""
    return b"data: " + _encode(value) + b"\n\n"


class GenerationResponse(Response):
    """The answer to a request for generation; aborts what runs when it ends, however it ends.

    Args:
        state: of the server.
        streams: one for each prompt, submitted already.
        usage: what has been counted in the end.
        names: the body's names of fields, by the engine's, where they differ.
    """

    def __init__(
        self,
        state: ServerState,
        streams: Sequence[RequestStream],
        usage: Usage,
        names: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._state = state
        self._streams = streams
        self._usage = usage
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; see ASGI."""
        watcher = asyncio.create_task(self._watch(receive), name="watch client")
        try:
            await self._answer(scope, send)
        except ClientLeftError:
            _note(scope, "disconnected")
            await self._fail(scope, receive, send, None)
        except Exception as error:
            await self._fail(scope, receive, send, self._explain(error))
        finally:
            watcher.cancel()
            for stream in self._streams:
                stream.close()
            scope.setdefault("state", {})["num_output_tokens"] = self._usage.completion_tokens

    async def _answer(self, scope: Scope, send: Send) -> None:
        raise NotImplementedError

    async def _fail(
        self, scope: Scope, receive: Receive, send: Send, error: ApiError | None
    ) -> None:
        """Answer with an error, or with nothing if the client has left."""
        if error is None:
            await Response(status_code=CLIENT_LEFT_STATUS)(scope, receive, send)
        else:
            await error.response()(scope, receive, send)

    async def _watch(self, receive: Receive) -> None:
        """Wait until the client leaves, and end the streams then."""
        message: Message = {}
        while message.get("type") != "http.disconnect":
            message = await receive()
        for stream in self._streams:
            stream.fail(ClientLeftError())

    async def _gather(self, send: Send) -> None:
        """Read all streams to their end; the first that fails ends the others."""
        if len(self._streams) == 1:
            await self._read(0, self._streams[0], send)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for number, stream in enumerate(self._streams):
                    group.create_task(self._read(number, stream, send))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _read(self, number: int, stream: RequestStream, send: Send) -> None:
        raise NotImplementedError

    def _explain(self, error: Exception) -> ApiError:
        if isinstance(error, GenerationError):
            if error.is_clients_fault:
                said = in_api_words(str(error), self._names)
                param, *_ = said.split()  # the core refuses forms alone, and names them first
                return ApiError(400, said, param=param, code="generation_refused")
            logger.error("the engine could not go on with a request: %s", error)
            return ApiError(500, str(error), code="engine_error")
        if isinstance(error, EngineDeadError) and self._state.phase is Phase.STOPPING:
            return ApiError(
                503,
                "the server was shut down before the answer was complete",
                code="shutting_down",
            )
        return as_api_error(error)


class EventStream(GenerationResponse):
    """An answer of server-sent events, ended by `[DONE]`."""

    def __init__(
        self,
        state: ServerState,
        streams: Sequence[RequestStream],
        writer: Writer,
        names: Mapping[str, str],
    ) -> None:
        super().__init__(state, streams, writer.usage, names)
        self._writer = writer
        self._num_open = len(streams)
        self._last = b""
        self._has_begun = False
        self._beginning = asyncio.Lock()

    async def _answer(self, scope: Scope, send: Send) -> None:
        await self._gather(send)
        await self._begin(send)
        await _send_body(send, self._last + self._writer.end() + DONE, more=False)

    async def _read(self, number: int, stream: RequestStream, send: Send) -> None:
        write = self._writer.write
        async for output in stream:
            if output.error is not None:
                raise GenerationError(output)
            events = write(number, output)
            if output.finished:
                self._num_open -= 1
                if self._num_open == 0:
                    self._last = events  # leaves together with the end
                    return
            if events:
                if not self._has_begun:
                    await self._begin(send)
                await send({"type": "http.response.body", "body": events, "more_body": True})

    async def _begin(self, send: Send) -> None:
        async with self._beginning:
            if not self._has_begun:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS}
                )
                self._has_begun = True

    async def _fail(
        self, scope: Scope, receive: Receive, send: Send, error: ApiError | None
    ) -> None:
        if not self._has_begun:
            await super()._fail(scope, receive, send, error)
        elif error is None:
            await _send_body(send, b"", more=False)
        else:
            _note(scope, _OUTCOMES.get(error.code or "", "server_error"))
            await _send_body(send, event(error.body()) + DONE, more=False)


class WholeAnswer(GenerationResponse):
    """An answer in one JSON document."""

    def __init__(
        self,
        state: ServerState,
        streams: Sequence[RequestStream],
        collector: Collector,
        names: Mapping[str, str],
    ) -> None:
        super().__init__(state, streams, collector.usage, names)
        self._collector = collector

    async def _answer(self, scope: Scope, send: Send) -> None:
        await self._gather(send)
        body = _encode(self._collector.document())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_body(send, body, more=False)

    async def _read(self, number: int, stream: RequestStream, send: Send) -> None:
        async for output in stream:
            if output.error is not None:
                raise GenerationError(output)
            if output.finished:
                self._collector.add(number, output)


def _note(scope: Scope, outcome: str) -> None:
    """For whoever counts requests: the status does not say how this one ended."""
    scope.setdefault("state", {})["outcome"] = outcome


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
