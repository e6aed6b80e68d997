"""A server that speaks just enough of OpenAI's API over real sockets, and misbehaves on demand.

Knows HTTP/1.1 with chunked bodies and a script per request. Does not know the load generator. It
runs in a thread with an event loop of its own, so that neither side's work delays the other's
clock readings more than any process would.
"""

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.waiting import PATIENCE_S


@dataclass(slots=True)
class Exchange:
    """One request, and what the script may answer with."""

    number: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    arrived_ns: int = field(default_factory=time.perf_counter_ns)
    sent_ns: list[int] = field(default_factory=list)
    """When each piece of output was begun to be sent, as far as the script says which these are."""

    async def start(self, status: str = "200 OK", kind: str = "text/event-stream") -> None:
        """Send the head of a chunked answer."""
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        await self._write(head.encode())

    async def send(self, data: bytes) -> None:
        """Send a piece of the body, as one chunk of the transfer encoding."""
        await self._write(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, document: Any) -> None:
        """Send one event."""
        await self.send(event_bytes(document))

    async def output(self, data: bytes) -> None:
        """Send a piece of output, and note when."""
        self.sent_ns.append(time.perf_counter_ns())
        await self.send(data)

    async def end(self) -> None:
        """End the body; the connection stays open for the next request."""
        await self._write(b"0\r\n\r\n")

    async def answer(self, status: str, document: Any, *headers: str) -> None:
        """Send a whole JSON answer."""
        body = json.dumps(document).encode()
        lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", *headers]
        lines += [f"Content-Length: {len(body)}", "", ""]
        await self._write("\r\n".join(lines).encode() + body)

    async def reset(self) -> None:
        """Break the connection the hard way, with RST."""
        connection = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def _write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


Script = Callable[[Exchange], Awaitable[None]]


@dataclass(slots=True)
class FakeServer:
    """The running server: where it is, and what it has seen."""

    script: Script
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    """Completions and chat requests, in order of arrival."""
    num_connections: int = 0
    health: list[int] = field(default_factory=lambda: [200])
    """Statuses that `/health` answers, the last one for good."""

    async def serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer the requests of one connection until it ends."""
        self.num_connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    await self._serve_request(reader, writer)
        finally:
            writer.close()

    async def _serve_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        path = head[0].split()[1]
        exchange = Exchange(
            len(self.exchanges), path, headers, json.loads(raw) if raw else {}, writer
        )
        if path == "/health":
            status = self.health.pop(0) if len(self.health) > 1 else self.health[0]
            await exchange.answer(f"{status} X", {})
        elif path == "/v1/models":
            await exchange.answer("200 OK", {"data": [{"id": "fake-model"}]})
        else:
            self.exchanges.append(exchange)
            await self.script(exchange)


def event_bytes(document: Any) -> bytes:
    """The bytes of one event; text is sent as it is."""
    text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def text_chunk(
    text: str, *, chat: bool = False, finish_reason: str | None = None
) -> dict[str, Any]:
    """A chunk of a stream with this much text."""
    content: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
    return {"choices": [{"index": 0, "finish_reason": finish_reason, **content}]}


def usage_chunk(prompt_tokens: int, completion_tokens: int, **details: Any) -> dict[str, Any]:
    """The chunk that ends a stream with `include_usage`."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, **details}
    return {"choices": [], "usage": usage}


def steady(*, ttft_s: float, itl_s: float, tokens_per_chunk: int = 1) -> Script:
    """A script that makes `max_tokens` tokens at a fixed pace, by the clock."""

    async def script(exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        chat = exchange.path.endswith("/chat/completions")
        num_tokens = exchange.body["max_completion_tokens" if chat else "max_tokens"]
        began = loop.time()
        await exchange.start()
        if chat:
            role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            await exchange.event(role)
        for number in range(num_tokens // tokens_per_chunk):
            await asyncio.sleep(max(0.0, began + ttft_s + number * itl_s - loop.time()))
            await exchange.output(event_bytes(text_chunk(" word" * tokens_per_chunk, chat=chat)))
        await exchange.event(text_chunk("", chat=chat, finish_reason="length"))
        await exchange.event(usage_chunk(7, num_tokens))
        await exchange.event("[DONE]")
        await exchange.end()

    return script


@contextlib.contextmanager
def fake_server(script: Script) -> Iterator[FakeServer]:
    """Run the server on a free port until the block ends."""
    server = FakeServer(script)
    loop = asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        listener = await asyncio.start_server(server.serve_connection, "127.0.0.1", 0, backlog=512)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        listener.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_until_complete(asyncio.sleep(0))  # transports close one turn later
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(PATIENCE_S)
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
