"""Connections at their edges, over real sockets: heads without an end, silence, garbage, crowds."""

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.exceptions import HTTPException

from engine.server.config import ServerConfig
from engine.server.http_protocol import ConnectionLimits, bounded_protocol
from engine.server.middleware import GuardMiddleware
from tests.unit.test_server_guards import make_state

MAX_HEAD, TIMEOUT_S = 8192, 0.5


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body and says how long it was; /early answers without reading, /slow takes time."""
    num_bytes, status = 0, 200
    try:
        while scope["path"] != "/early":
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if not message.get("more_body", False):
                break
    except HTTPException as error:
        status = error.status_code
    if scope["path"] == "/slow":
        await asyncio.sleep(TIMEOUT_S * 2)
    body = json.dumps({"length": num_bytes}).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(**settings: Any) -> Iterator[tuple[str, int]]:
    """The application behind guard and protocol, in a thread with a loop of its own."""
    limits = ConnectionLimits(
        max_head_bytes=MAX_HEAD,
        head_timeout_s=TIMEOUT_S,
        max_connections=settings.pop("max_connections", None),
    )
    state = make_state(max_header_bytes=MAX_HEAD, max_body_bytes=1 << 16, **settings)
    server = uvicorn.Server(
        uvicorn.Config(
            GuardMiddleware(application, state=state),
            http=bounded_protocol(limits),
            loop="uvloop",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=ServerConfig().timeout_keep_alive_s,
            timeout_graceful_shutdown=1,
        )
    )
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with serving() as where:
        yield where


def receive_all(connection: socket.socket) -> bytes:
    """What comes until the other side closes; the connection's time-out fails the test."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        received += b"<reset>"
    return received


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=8 * TIMEOUT_S + 5)


def answers_of(received: bytes) -> list[tuple[int, Any]]:
    """Status and JSON of each answer, all with a Content-Length."""
    answers = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        (length,) = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
        answers.append((int(head.split()[1]), json.loads(rest[:length])))
        received = rest[length:]
    return answers


@pytest.mark.parametrize(
    "start", [b"GET /", b"GET / HTTP/1.1\r\nx-padding: ", b"POST / HTTP/1.1\r\n"]
)
def test_a_head_without_an_end_is_cut_off(address: tuple[str, int], start: bytes) -> None:
    sent = 0
    with connect(address) as connection:
        connection.sendall(start)
        try:
            while sent < 64 << 20:
                line = b"a" * 4000
                connection.sendall(line + (b": b\r\n" if start.endswith(b"\n") else b""))
                sent += len(line)
        except OSError:
            pass  # as it should be
        received = receive_all(connection)
    assert sent < 32 << 20
    if b"<reset>" not in received:
        ((status, answer),) = answers_of(received)
        assert (status, answer["error"]["code"]) == (431, "headers_too_large")


def test_a_head_that_is_a_little_too_long_is_told_so(address: tuple[str, int]) -> None:
    for parts in (1, 20):
        head = b"GET / HTTP/1.1\r\nhost: x\r\npadding: " + b"y" * MAX_HEAD + b"\r\n\r\n"
        with connect(address) as connection:
            for at in range(0, len(head), -(-len(head) // parts)):
                connection.sendall(head[at : at + -(-len(head) // parts)])
                time.sleep(0.01)
            connection.shutdown(socket.SHUT_WR)
            assert answers_of(receive_all(connection))[0][0] == 431


@pytest.mark.parametrize("start", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\n"])
def test_who_says_nothing_or_stops_halfway_is_left(address: tuple[str, int], start: bytes) -> None:
    with connect(address) as connection:
        connection.sendall(start)
        began = time.monotonic()
        received = receive_all(connection)
        assert 0.5 * TIMEOUT_S < time.monotonic() - began < 6 * TIMEOUT_S
    assert [status for status, _ in answers_of(received)] == ([408] if start else [])


def test_a_drip_of_headers_does_not_extend_the_time(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        began = time.monotonic()
        try:
            for number in range(100):
                connection.sendall(b"x-%d: y\r\n" % number)
                time.sleep(TIMEOUT_S / 10)
        except OSError:
            pass  # as it should be
        assert time.monotonic() - began < 6 * TIMEOUT_S


def test_a_second_request_of_a_connection_is_timed_as_well(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        connection.sendall(b"GET / HTTP/1.1\r\nhos")
        assert answers_of(receive_all(connection))[0][0] == 408


def test_an_answer_that_takes_long_is_not_cut_off(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answers_of(receive_all(connection)) == [(200, {"length": 0})]


def test_what_is_not_http_gets_an_error_of_the_usual_form(address: tuple[str, int]) -> None:
    generator = random.Random(3)
    for garbage in (b"\x16\x03\x01\x02\x00" + generator.randbytes(500), b"HELO there\r\n\r\n"):
        with connect(address) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            ((status, answer),) = answers_of(receive_all(connection))
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_a_refused_body_leaves_the_connection_usable(address: tuple[str, int]) -> None:
    size = (1 << 16) + 1
    with connect(address) as connection:
        for _ in range(2):
            connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
            connection.sendall(b"x" * size)
            received = b""
            while b"}}" not in received:
                received += connection.recv(65536)
            assert answers_of(received)[0][0] == 413
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answers_of(receive_all(connection)) == [(200, {"length": 0})]


def test_a_chunked_body_is_counted_as_it_comes(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            for _ in range(1000):
                connection.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            connection.sendall(b"0\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # as it may be
        received = receive_all(connection)
    assert received.endswith(b"<reset>") or answers_of(received)[0][0] == 413


def test_permission_to_send_too_much_is_not_given(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n"
            b"expect: 100-continue\r\n\r\n"
        )
        received = connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 413")


def test_pipelined_requests_are_answered_in_order(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        many = [
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % n + b"x" * n
            for n in range(8)
        ]
        connection.sendall(
            b"".join(many) + b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        answers = answers_of(receive_all(connection))
    assert answers == [(200, {"length": n}) for n in [*range(8), 0]]


def test_a_flood_of_pipelined_requests_ends_the_connection(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n" * 10_000)
        assert len(receive_all(connection)) < 10_000


def test_too_many_connections_are_told_so_and_the_others_go_on() -> None:
    with serving(max_connections=3) as address:
        held = [connect(address) for _ in range(3)]
        for one in held:
            one.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200 OK" in one.recv(65536)
        with connect(address) as extra:
            ((status, answer),) = answers_of(receive_all(extra))
            assert (status, answer["error"]["code"]) == (503, "too_many_connections")
        held.pop().close()
        time.sleep(0.1)
        with connect(address) as extra:
            extra.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert answers_of(receive_all(extra))[0][0] == 200
        for one in held:
            one.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert answers_of(receive_all(one))[0][0] == 200
            one.close()


def test_a_body_that_nobody_waits_for_does_not_hold_the_connection() -> None:
    with serving() as address, connect(address) as connection:
        connection.sendall(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        began = time.monotonic()
        try:
            while time.monotonic() - began < 20:
                connection.sendall(b"x")
                time.sleep(0.2)
        except OSError:
            pass  # as it should be
        assert time.monotonic() - began < 10
