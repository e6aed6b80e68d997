"""Clients that behave, and clients that do not, by the hundred on one event loop.

Each is a connection of its own on a raw socket, so that it can stop reading, reset, or send what no
HTTP library would. Knows HTTP/1.1 and server-sent events as bytes; knows nothing of the server but
its address.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

PROMPTS = (
    "The sea is",
    "Once upon a time there was a lighthouse keeper who",
    "def fibonacci(n):",
    "The three most important inventions of all time are",
    "Q: Why is the sky blue? A:",
    "In 1815 the volcano Tambora",
    "My grandmother's recipe for soup begins with",
    "To be, or not to be, that is the question: ",
)
LENGTHS = (6, 20, 45)
ANSWER_WITHIN_S = 240.0
"""How long a client that behaves waits; many times what an answer takes on two busy cores."""

Expected = dict[tuple[str, int], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What came over a connection until it ended."""

    status: int
    body: bytes
    is_complete: bool
    """Whether the body ended as HTTP wants it, not by a connection that broke."""

    @property
    def events(self) -> list[str]:
        """The data of its server-sent events."""
        text = self.body.decode()
        return [one.removeprefix("data: ") for one in text.split("\n\n") if one]


@dataclasses.dataclass(slots=True)
class LoadState:
    """What a load has done, and what went wrong in it."""

    expected: Expected
    num_by_kind: Counter[str] = dataclasses.field(default_factory=Counter)
    num_tokens: int = 0
    num_merged_events: int = 0
    """Events that held more than one token: their reader was slow."""
    first_token_s: list[float] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    def check(self, condition: bool, complaint: str) -> None:
        """Remember a failure; the load goes on."""
        if not condition:
            self.failures.append(complaint)


class Wire:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self.received = bytearray()

    @classmethod
    async def open(cls, port: int, *, receive_buffer_bytes: int | None = None) -> "Wire":
        """Connect to a port of 127.0.0.1."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    async def send(self, data: bytes) -> None:
        """Send it all."""
        await self._loop.sock_sendall(self.sock, data)

    async def read_some(self) -> bool:
        """Wait for more; False at the end of what comes."""
        data = await self._loop.sock_recv(self.sock, 1 << 16)
        self.received += data
        return bool(data)

    async def read_answer(self) -> Answer:
        """Read until the server closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            while await self.read_some():
                pass
        return parse_answer(bytes(self.received))

    def reset(self) -> None:
        """Close the connection so that the other side gets a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    async def __aenter__(self) -> "Wire":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sock.close()


def parse_answer(received: bytes) -> Answer:
    """Take an HTTP/1.1 answer apart that was followed by the end of the connection."""
    head, separator, rest = received.partition(b"\r\n\r\n")
    if not separator:
        return Answer(0, b"", False)
    lines = head.lower().split(b"\r\n")
    status = int(lines[0].split()[1])
    if b"transfer-encoding: chunked" not in lines:
        lengths = [int(line.split()[1]) for line in lines if line.startswith(b"content-length:")]
        return Answer(status, rest, is_complete=lengths == [len(rest)])
    body = bytearray()
    while True:
        size, separator, rest = rest.partition(b"\r\n")
        num_bytes = int(size, 16) if separator else 0
        if not separator or len(rest) < num_bytes + 2:
            return Answer(status, bytes(body), False)
        if num_bytes == 0:
            return Answer(status, bytes(body), True)
        body += rest[:num_bytes]
        rest = rest[num_bytes + 2 :]


def http_request(body: bytes, *, path: str = "/v1/completions", headers: str = "") -> bytes:
    """A POST whose connection is closed behind the answer."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n{headers}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def completion(prompt: str, num_tokens: int, **fields: Any) -> bytes:
    """A greedy, streamed completion of exactly so many tokens."""
    fields = {"stream": True, "stream_options": {"include_usage": True}} | fields
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }
    return http_request(json.dumps(body).encode())


class Visitor:
    """Comes again and again, each time in another way, until it is told to stop.

    Args:
        port: of the server.
        state: where it writes down what it saw.
        seed: of its choices.
    """

    def __init__(self, port: int, state: LoadState, seed: int) -> None:
        self._port = port
        self._state = state
        self._chance = random.Random(seed)
        self._ways: dict[Callable[[], Awaitable[None]], int] = {
            self._behave: 10,
            self._read_slowly: 2,
            self._leave: 4,
            self._reset: 2,
            self._stall_and_leave: 1,
            self._send_garbage: 4,
        }

    async def visit_until(self, deadline_s: float) -> None:
        """Visit until then, and until each way has been gone by anybody; no visit is cut off."""
        await asyncio.sleep(self._chance.random())
        while time.monotonic() < deadline_s or len(self._state.num_by_kind) < len(self._ways):
            (way,) = self._chance.choices([*self._ways], [*self._ways.values()])
            kind = way.__name__.lstrip("_")
            try:
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    await way()
            except TimeoutError:
                self._state.failures.append(f"{kind}: nothing for {ANSWER_WITHIN_S:g} s")
            except OSError as error:
                self._state.failures.append(f"{kind}: {error!r}")
            self._state.num_by_kind[kind] += 1

    def _choice(self) -> tuple[str, int]:
        return self._chance.choice(PROMPTS), self._chance.choice(LENGTHS)

    async def _behave(self) -> None:
        prompt, num_tokens = self._choice()
        streams = self._chance.random() < 0.8
        async with await Wire.open(self._port) as wire:
            began_s = time.monotonic()
            await wire.send(completion(prompt, num_tokens, **({} if streams else WHOLE)))
            if streams and await wire.read_some():
                self._state.first_token_s.append(time.monotonic() - began_s)
            answer = await wire.read_answer()
        (self._check_stream if streams else self._check_whole)(answer, prompt, num_tokens)

    async def _read_slowly(self) -> None:
        """Stop reading with hardly any room to receive, and read the rest all the same."""
        prompt, num_tokens = self._choice()
        async with await Wire.open(self._port, receive_buffer_bytes=2048) as wire:
            await wire.send(completion(prompt, num_tokens, logprobs=5))
            await wire.read_some()
            await asyncio.sleep(self._chance.uniform(0.2, 3.0))
            answer = await wire.read_answer()
        self._check_stream(answer, prompt, num_tokens)

    async def _leave(self) -> None:
        """Close the connection at any point, most often in the middle of an answer."""
        prompt, num_tokens = self._choice()
        async with await Wire.open(self._port) as wire:
            await wire.send(completion(prompt, num_tokens, n=2, temperature=1))
            await self._read_for_a_while(wire)

    async def _reset(self) -> None:
        prompt, num_tokens = self._choice()
        async with await Wire.open(self._port) as wire:
            await wire.send(completion(prompt, num_tokens))
            await self._read_for_a_while(wire)
            wire.reset()

    async def _stall_and_leave(self) -> None:
        prompt, _ = self._choice()
        async with await Wire.open(self._port, receive_buffer_bytes=2048) as wire:
            await wire.send(completion(prompt, 60, logprobs=5, n=2, temperature=1))
            await asyncio.sleep(self._chance.uniform(0.5, 3.0))
            if self._chance.random() < 0.5:
                wire.reset()

    async def _read_for_a_while(self, wire: Wire) -> None:
        how_long_s = self._chance.choice((0.0, 0.001, 0.02, 0.2, 1.0, 3.0))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(how_long_s):
                while await wire.read_some():
                    pass

    async def _send_garbage(self) -> None:
        name, allowed, data = self._chance.choice(GARBAGE)
        async with await Wire.open(self._port) as wire:
            # Its answer may come, and the connection end, before the server has read it all.
            with contextlib.suppress(ConnectionError):
                await wire.send(data)
            if not allowed:
                return
            answer = await wire.read_answer()
        told = f"{name}: {answer.status} {answer.body[:200]!r}"
        self._state.check(answer.status in allowed, told)
        if answer.status:
            self._state.check(b'"error"' in answer.body and answer.is_complete, told)

    def _check_stream(self, answer: Answer, prompt: str, num_tokens: int) -> None:
        check, told = self._state.check, f"{prompt!r} {num_tokens}: {answer.status}"
        if answer.status != 200 or not answer.is_complete:
            check(False, f"{told} {answer.is_complete=} {answer.body[-300:]!r}")
            return
        *events, last = answer.events
        check(last == "[DONE]", f"{told} ends with {last}")
        documents = [json.loads(one) for one in events]
        errors = [one for one in documents if "error" in one]
        if errors:
            check(False, f"{told} {errors}")
            return
        choices = [one["choices"][0] for one in documents if one["choices"]]
        reasons = [one["finish_reason"] for one in choices if one["finish_reason"]]
        check(reasons == ["length"], f"{told} {reasons}")
        self._check_text("".join(one["text"] for one in choices), prompt, num_tokens)
        usage = documents[-1]["usage"]
        check(usage["completion_tokens"] == num_tokens, f"{told} {usage}")
        self._state.num_tokens += usage["completion_tokens"]
        self._state.num_merged_events += sum(
            len(one["logprobs"]["tokens"]) > 1 for one in choices if one.get("logprobs")
        )

    def _check_whole(self, answer: Answer, prompt: str, num_tokens: int) -> None:
        told = f"{prompt!r} {num_tokens}: {answer.status} {answer.body[:300]!r}"
        if answer.status != 200 or not answer.is_complete:
            self._state.check(False, told)
            return
        document = json.loads(answer.body)
        self._check_text(document["choices"][0]["text"], prompt, num_tokens)
        self._state.check(document["usage"]["completion_tokens"] == num_tokens, told)
        self._state.num_tokens += num_tokens

    def _check_text(self, text: str, prompt: str, num_tokens: int) -> None:
        expected = self._state.expected.get((prompt, num_tokens), text)
        told = f"{prompt!r} {num_tokens}: {text!r} is not {expected!r}"
        self._state.check(text == expected, told)


WHOLE = {"stream": False, "stream_options": None}

_CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_CLOSED = frozenset({0})
"""No answer: the connection has just ended."""
GARBAGE: tuple[tuple[str, frozenset[int], bytes], ...] = (
    ("nothing at all", frozenset(), b""),
    ("half a request line", frozenset(), b"POST /v1/comp"),
    ("half a head, left open", frozenset({408}), b"POST /v1/completions HTTP/1.1\r\nHost: te"),
    ("half a body", frozenset(), http_request(b'{"prompt": "a"}')[:-5]),
    ("half a body, left open", frozenset({408}), http_request(b'{"prompt": "a"}')[:-5]),
    ("no HTTP", frozenset({400}), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200),
    ("another protocol", frozenset({400}), b"EHLO example.org\r\n\r\n"),
    ("invalid JSON", frozenset({400}), http_request(b'{"prompt": "a", ')),
    ("no object", frozenset({400}), http_request(b"[1, 2, 3]")),
    ("wrong UTF-8", frozenset({400}), http_request(b'{"prompt": "\xff\xfe\xc3"}')),
    ("NaN", frozenset({400}), http_request(b'{"prompt": "a", "temperature": NaN}')),
    ("deep JSON", frozenset({400}), http_request(b'{"prompt": ' + b"[" * 20_000)),
    ("a field of another type", frozenset({400}), http_request(b'{"prompt": {"a": 1}}')),
    ("less than no tokens", frozenset({400}), http_request(b'{"prompt": "a", "max_tokens": -5}')),
    (
        "huge headers",
        frozenset({431}),
        http_request(b"{}", headers="".join(f"X-{n}: {'x' * 900}\r\n" for n in range(200))),
    ),
    (
        "one endless header",
        frozenset({431}),
        b"GET / HTTP/1.1\r\nHost: test\r\nX: " + b"x" * 300_000,
    ),
    (
        "a body that says it is too long",
        frozenset({413}),
        http_request(b"x" * 10, headers="Expect: 100-continue\r\n").replace(
            b"Content-Length: 10", b"Content-Length: 99999999999"
        ),
    ),
    (
        "an endless body",
        frozenset({413}) | _CLOSED,
        _CHUNKED + b"8000\r\n" + (b"[" * 0x8000 + b"\r\n8000\r\n") * 20,
    ),
    ("a chunk without a size", frozenset({400}) | _CLOSED, _CHUNKED + b"zz\r\nabc\r\n"),
    ("no such path", frozenset({404}), http_request(b"{}", path="/v2/everything")),
    ("a path outside", frozenset({404}), http_request(b"{}", path="/../../etc/passwd")),
)
"""Name, statuses of the answer (none: its sender does not wait for one), and what is sent."""


async def expected_texts(port: int) -> Expected:
    """What a server answers to each of the prompts, asked all at once."""

    async def ask(prompt: str, num_tokens: int) -> str:
        async with await Wire.open(port) as wire:
            await wire.send(completion(prompt, num_tokens, **WHOLE))
            answer = await wire.read_answer()
        assert answer.status == 200, answer
        document = json.loads(answer.body)
        assert document["usage"]["completion_tokens"] == num_tokens
        text: str = document["choices"][0]["text"]
        return text

    keys = [(prompt, num_tokens) for prompt in PROMPTS for num_tokens in LENGTHS]
    texts = await asyncio.gather(*[ask(*key) for key in keys])
    return dict(zip(keys, texts, strict=True))


async def run_load(
    port: int, expected: Expected, *, num_visitors: int, seconds: float, seed: int = 0
) -> LoadState:
    """Send visitors of all kinds for so long; returns when the last one has left."""
    state = LoadState(expected)
    deadline_s = time.monotonic() + seconds
    visitors = [Visitor(port, state, seed * 100_000 + number) for number in range(num_visitors)]
    await asyncio.gather(*[visitor.visit_until(deadline_s) for visitor in visitors])
    return state
