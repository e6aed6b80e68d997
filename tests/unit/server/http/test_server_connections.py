"""Connections at their edges, over real sockets: heads without an end, silence, garbage, crowds."""

import asyncio
import email.utils
import json
import random
import re
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
from engine.server.http.connection import BoundedProtocol, ConnectionLimits, bounded_protocol
from engine.server.http.errors import ApiError
from engine.server.http.middleware import GuardMiddleware
from tests.support.guards import make_state
from tests.waiting import PATIENCE_S, wait_until

MAX_HEAD = 8192
TIMEOUT_S = 0.5
"""That a head may take, where that is the point."""


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
        head_timeout_s=settings.pop("head_timeout_s", PATIENCE_S),
        max_connections=settings.pop("max_connections", None),
    )
    app = settings.pop("app", application)
    refused, left = settings.pop("refused", None), settings.pop("left", None)
    state = make_state(max_header_bytes=MAX_HEAD, max_body_bytes=1 << 16, **settings)
    server = uvicorn.Server(
        uvicorn.Config(
            GuardMiddleware(app, state=state),
            http=bounded_protocol(limits, refused, left),
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
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with serving() as where:
        yield where


@pytest.fixture(scope="module")
def hasty_address() -> Iterator[tuple[str, int]]:
    """Of one that waits for a head no longer than `TIMEOUT_S`."""
    with serving(head_timeout_s=TIMEOUT_S) as where:
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
    return socket.create_connection(address, timeout=PATIENCE_S)


def is_cut_off(connection: socket.socket, drops: list[bytes]) -> bool:
    """Send them one by one; whether the other side hangs up before the last of them."""
    try:
        for drop in drops:
            connection.sendall(drop)
            time.sleep(TIMEOUT_S / 10)
    except OSError:
        return True
    return False


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
def test_who_says_nothing_or_stops_halfway_is_left(
    hasty_address: tuple[str, int], start: bytes
) -> None:
    began_s = time.monotonic()
    with connect(hasty_address) as connection:
        connection.sendall(start)
        received = receive_all(connection)
    assert time.monotonic() - began_s > TIMEOUT_S
    assert [status for status, _ in answers_of(received)] == ([408] if start else [])


def test_a_drip_of_headers_does_not_extend_the_time(hasty_address: tuple[str, int]) -> None:
    with connect(hasty_address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        assert is_cut_off(connection, [b"x-%d: y\r\n" % number for number in range(100)])


def test_a_second_request_of_a_connection_is_timed_as_well(hasty_address: tuple[str, int]) -> None:
    with connect(hasty_address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        connection.sendall(b"GET / HTTP/1.1\r\nhos")
        assert answers_of(receive_all(connection))[0][0] == 408


def test_an_answer_that_takes_long_is_not_cut_off(hasty_address: tuple[str, int]) -> None:
    with connect(hasty_address) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answers_of(receive_all(connection)) == [(200, {"length": 0})]


def test_an_answer_has_the_date_of_its_own_begin() -> None:
    async def late(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(2.5)  # the date that is sent is up to a second old
        await application(scope, receive, send)

    with serving(app=late) as address, connect(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        sent_s = time.time()
        (date,) = re.findall(rb"\r\ndate: ([^\r]+)\r\n", receive_all(connection))
    assert email.utils.parsedate_to_datetime(date.decode()).timestamp() > sent_s


def test_what_is_not_http_gets_an_error_of_the_usual_form(address: tuple[str, int]) -> None:
    generator = random.Random(3)
    for garbage in (b"\x16\x03\x01\x02\x00" + generator.randbytes(500), b"HELO there\r\n\r\n"):
        with connect(address) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            ((status, answer),) = answers_of(receive_all(connection))
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert answer["error"]["code"] == "bad_request"


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


def test_a_flood_of_pipelined_requests_is_answered_to_its_last(address: tuple[str, int]) -> None:
    number = 10_000
    with connect(address) as connection:
        flood = b"GET /early HTTP/1.1\r\nhost: x\r\n\r\n" * (number - 1)
        last = b"GET /early HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        sender = threading.Thread(target=connection.sendall, args=[flood + last])
        sender.start()
        received = receive_all(connection)
        sender.join()
    assert received.count(b"200 OK") == number
    assert received.endswith(b"}")


def test_of_a_pipeline_no_more_is_taken_in_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    made, received = BoundedProtocol.on_headers_complete, BoundedProtocol.data_received
    num_queued, num_held = [], []

    def count_queued(self: Any) -> None:
        made(self)
        num_queued.append(len(self.pipeline))

    def count_held(self: Any, data: bytes) -> None:
        received(self, data)
        num_held.append(len(self._held))

    monkeypatch.setattr(BoundedProtocol, "on_headers_complete", count_queued)
    monkeypatch.setattr(BoundedProtocol, "data_received", count_held)

    async def take_a_moment(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.001)
        await application({"path": "/early"}, receive, send)

    for size, number in ((10, 200), (8000, 200)):
        num_queued.clear()
        num_held.clear()
        flood = b"GET / HTTP/1.1\r\nx: %s\r\n\r\n" % (b"y" * size) * number
        with serving(app=take_a_moment) as address, connect(address) as connection:
            sender = threading.Thread(target=connection.sendall, args=[flood])
            sender.start()
            answers = b""
            while answers.count(b"200 OK") < number:
                answers += connection.recv(65536)
            sender.join()
        assert len(num_queued) == number
        assert 16 <= max(num_queued) < 16 + 1024 / (21 + size)
        assert max(num_held) <= 2 * 256 << 10, "two reads"
    assert max(num_held) > 32 << 10


def test_while_a_pipeline_waits_nobody_is_late(hasty_address: tuple[str, int]) -> None:
    """What has come of a head is not read on for longer than a head may take."""
    with connect(hasty_address) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nhost: xyz\r\n\r\n")
        connection.sendall(b"GET /early HTTP/1.1\r\nhost: xyz\r\n\r\n" * 200)
        received = b""
        while received.count(b"200 OK") < 201:
            received += connection.recv(65536)
    assert b"408" not in received


def test_what_was_asked_before_garbage_is_answered_before_it(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(
            b"GET /early HTTP/1.1\r\n\r\nGET /slow HTTP/1.1\r\n\r\nHELO there\r\n\r\n"
        )
        answers = answers_of(receive_all(connection))
    assert [status for status, _ in answers] == [200, 200, 400]


def test_a_body_that_is_none_takes_no_answer_from_those_before(address: tuple[str, int]) -> None:
    broken = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nnonsense"
    with connect(address) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\n\r\n" + broken)
        answers = answers_of(receive_all(connection))
    assert [status for status, _ in answers] == [200, 400]


def test_what_cannot_be_read_yet_is_not_late() -> None:
    times_s = iter([3 * TIMEOUT_S, 0.0, 0.0])

    async def look_away(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(next(times_s))
        await application({"path": "/early"}, receive, send)

    with (
        serving(app=look_away, head_timeout_s=TIMEOUT_S) as address,
        connect(address) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\nGET / HT")
        time.sleep(TIMEOUT_S / 2)
        connection.sendall(b"TP/1.1\r\nconnection: close\r\n\r\n")
        answers = answers_of(receive_all(connection))
    assert [status for status, _ in answers] == [200] * 3


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

        def is_taken() -> bool:
            with connect(address) as extra:
                extra.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                return answers_of(receive_all(extra))[0][0] == 200

        wait_until(is_taken, "nobody is let in")  # once the server has seen who has left
        for one in held:
            one.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert answers_of(receive_all(one))[0][0] == 200
            one.close()


def test_a_body_that_nobody_waits_for_does_not_hold_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.server.http.connection._DRAIN_S", 0.2)
    with serving() as address, connect(address) as connection:
        connection.sendall(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        began_s = time.monotonic()
        assert is_cut_off(connection, [b"x"] * 999)
        assert time.monotonic() - began_s > 0.1


# -- HTTP/1.0 --------------------------------------------------------------------------------------


async def streaming(scope: Any, receive: Any, send: Any) -> None:
    """Three parts of unknown length."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"one", b"two"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"three"})


def ask(address: tuple[str, int], request: bytes) -> tuple[list[bytes], bytes]:
    """The lines of an answer's head, in small letters, and its body; to the connection's end."""
    with connect(address) as connection:
        connection.sendall(request)
        head, _, body = receive_all(connection).partition(b"\r\n\r\n")
    return head.lower().split(b"\r\n"), body


def test_a_stream_to_an_old_client_ends_with_the_connection() -> None:
    with serving(app=streaming) as address:
        for version in (b"1.0", b"1.0\r\nconnection: keep-alive", b"1.0\r\nexpect: 100-continue"):
            lines, body = ask(address, b"GET / HTTP/%s\r\n\r\n" % version)
            assert body == b"onetwothree"
            assert lines[0] == b"http/1.1 200 ok"
            assert b"connection: close" in lines
            assert not any(line.startswith(b"transfer-encoding") for line in lines)
        lines, body = ask(address, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert body == b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"
        assert b"transfer-encoding: chunked" in lines


def test_old_clients_keep_their_connection_if_they_say_so(address: tuple[str, int]) -> None:
    stays = b"GET /early HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n"
    with connect(address) as connection:
        for _ in range(2):
            connection.sendall(stays)
            received = connection.recv(65536)
            assert b"\r\nconnection: keep-alive\r\n" in received
            assert answers_of(received) == [(200, {"length": 0})]
        connection.sendall(b"GET /early HTTP/1.0\r\n\r\n")
        received = receive_all(connection)
    assert b"\r\nconnection: close\r\n" in received
    assert answers_of(received) == [(200, {"length": 0})]


# -- leaving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("closes_both_sides", [True, False])
def test_who_closes_its_side_has_left(version: bytes, closes_both_sides: bool) -> None:
    left = threading.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"
        left.set()

    with serving(app=wait) as address, connect(address) as connection:
        connection.sendall(b"GET / HTTP/%s\r\n\r\n" % version)
        if closes_both_sides:
            connection.close()
        else:
            connection.shutdown(socket.SHUT_WR)
            assert receive_all(connection) == b""
        assert left.wait(PATIENCE_S)


def test_who_leaves_is_noticed_by_the_request_that_runs_and_counted_for_the_others() -> None:
    runs, is_told = threading.Event(), threading.Event()
    told: list[str] = []
    queued: list[Any] = []

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        runs.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        told.append(scope["path"])
        is_told.set()

    with serving(app=wait, left=queued.append) as address:
        with connect(address) as connection:
            requests = b"GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\n"
            connection.sendall(requests + b"POST /3 HTTP/1.1\r\ncontent-length: 9\r\n\r\nhalf")
            assert runs.wait(PATIENCE_S)
        assert is_told.wait(PATIENCE_S)
    assert told == ["/1"]
    assert [(one["method"], one["path"]) for one in queued] == [("GET", "/2"), ("POST", "/3")]


# -- what is told of refusals ----------------------------------------------------------------------


def test_each_refusal_is_told_once() -> None:
    told: list[int] = []
    clients: list[Any] = []
    durations_s: list[float] = []
    sizes: list[int] = []

    def refused(error: ApiError, client: Any, *, begin_ns: int, num_bytes: int) -> None:
        told.append(error.status)
        clients.append(client)
        durations_s.append((time.monotonic_ns() - begin_ns) / 1e9)
        sizes.append(num_bytes)
        error.headers["X-Request-Id"] = f"id-{error.status}"

    with serving(refused=refused, max_connections=2, head_timeout_s=TIMEOUT_S) as address:
        for request, status in (
            (b"HELO there\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\npadding: " + b"x" * MAX_HEAD, 431),
            (b"GET / HTT", 408),
            (b"GET / HTTP/1.1\r\nhost: x\r\n\r\nnonsense\r\n\r\n", 400),
        ):
            began_s = time.monotonic()
            with connect(address) as connection:
                connection.sendall(request)
                where = connection.getsockname()
                head, _, body = receive_all(connection).rpartition(b"\r\n\r\n")
            assert (told.pop(), clients.pop(), sizes.pop()) == (status, where, len(body))
            assert b"\r\nX-Request-Id: id-%d" % status in head
            least_s = 0.9 * TIMEOUT_S if status == 408 else 0.0
            assert least_s < durations_s.pop() < time.monotonic() - began_s
            assert not told
        with connect(address) as connection:
            receive_all(connection)  # has said nothing
            assert not told
        with connect(address), connect(address), connect(address) as connection:
            receive_all(connection)
            assert told == [503]


def test_a_body_that_is_none_ends_its_request() -> None:
    """It has arrived, and is counted by who serves it: no refusal is told besides."""
    told: list[Any] = []
    states: list[Any] = []

    async def read(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["shown_id"] = "mine"
        assert (await receive())["type"] == "http.disconnect"
        states.append(scope["state"])

    settings = {"app": read, "refused": lambda *one: told.append(one)}
    with serving(**settings) as address, connect(address) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nnonsense")
        head, _, body = receive_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b"\r\nX-Request-Id: mine\r\n" in head
    assert not told
    assert states == [{"shown_id": "mine", "answered": (400, len(body))}]


def test_what_stands_behind_a_body_has_a_largest_size(address: tuple[str, int]) -> None:
    sent = 0
    with connect(address) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\na: ")
        try:
            while sent < 64 << 20:
                connection.sendall(b"x" * 4000)
                sent += 4000
        except OSError:
            pass  # as it should be
    assert sent < 32 << 20


# -- other protocols -------------------------------------------------------------------------------


@pytest.mark.parametrize("in_pieces", [False, True])
def test_an_upgrade_that_is_not_granted_takes_no_body_away(
    address: tuple[str, int], in_pieces: bool
) -> None:
    """Java's HttpClient asks for HTTP/2 so, with every request."""
    asks = (
        b"host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAE\r\n"
    )
    requests = (
        b"POST /1?a=%41 HTTP/1.1\r\n" + asks + b"content-length: 5\r\n\r\nhello",
        b"POST /2 HTTP/1.1\r\n" + asks + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n0\r\n\r\n",
        b"GET /3 HTTP/1.1\r\n" + asks + b"\r\n",
        b"GET /4 HTTP/1.1\r\nconnection: close\r\n\r\n",
    )
    with connect(address) as connection:
        sent = b"".join(requests)
        size = 37 if in_pieces else len(sent)
        for at in range(0, len(sent), size):
            connection.sendall(sent[at : at + size])
            time.sleep(0.002)
        answers = answers_of(receive_all(connection))
    assert answers == [(200, {"length": number}) for number in (5, 2, 0, 0)]


@pytest.mark.parametrize(
    ("version", "connection_header", "is_kept"),
    [
        ("1.1", "close, Upgrade", False),
        ("1.0", "Upgrade", False),
        ("1.0", "keep-alive, Upgrade", True),
    ],
)
def test_an_upgrade_on_a_connection_that_is_to_close(
    address: tuple[str, int], version: str, connection_header: str, is_kept: bool
) -> None:
    with connect(address) as connection:
        connection.sendall(
            f"POST /1 HTTP/{version}\r\nhost: x\r\nConnection: {connection_header}\r\n"
            "Upgrade: h2c\r\ncontent-length: 5\r\n\r\nhello".encode()
        )
        if is_kept:
            connection.sendall(b"GET /2 HTTP/1.0\r\n\r\n")
        answers = answers_of(receive_all(connection))
    assert answers == [(200, {"length": 5})] + [(200, {"length": 0})] * is_kept


def test_a_tunnel_is_refused(address: tuple[str, int]) -> None:
    for more in (b"", b"content-length: 5\r\n", b"connection: upgrade\r\nupgrade: h2c\r\n"):
        with connect(address) as connection:
            connection.sendall(
                b"CONNECT x:443 HTTP/1.1\r\ncontent-length: 1\r\n" + more + b"\r\n12345"
            )
            assert answers_of(receive_all(connection))[0][0] == 400
