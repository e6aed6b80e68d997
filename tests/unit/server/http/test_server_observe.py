"""What is seen of HTTP requests, over applications made for the purpose: whatever an application, a
client or a header does, each arrival is counted once, has an id, and one line in the log."""

import asyncio
import json
import logging
import re
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fastapi import FastAPI
from starlette.requests import ClientDisconnect

from engine.frontend.request_tracer import RequestTracer
from engine.log import JsonFormatter, get_logger
from engine.server.config import ServerConfig
from engine.server.http import loop_watch
from engine.server.http.errors import ApiError, add_error_handlers
from engine.server.http.exchange import shown_path
from engine.server.http.observe import NUM_REMEMBERED, Observation, ObserveMiddleware, observe
from engine.server.http.route_names import FILES_ROUTE, RouteNames
from engine.server.http.served import Phase
from instrumentation import Metric, ObservabilityConfig
from instrumentation.metrics.server import SERVER_METRICS, ServerMetrics
from instrumentation.metrics.types import Counter, Gauge, Histogram

Message = MutableMapping[str, Any]
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class FakeEngine:
    """What the observation asks of an engine that has not started."""

    model_name = "tiny"
    labelled_name = None
    observer = None

    def __init__(self) -> None:
        self.metric_sources: list[Callable[[], list[Metric]]] = []
        self.metric_exporters: list[Any] = []
        self.config = type("Config", (), {"observability": ObservabilityConfig()})()


class FakeState:
    """What it asks of a server."""

    def __init__(self, **settings: Any) -> None:
        self.engine = FakeEngine()
        self.config = ServerConfig(**settings)
        self.phase = Phase.READY


class Client:
    """One request to an application, and what came back; `leave` hangs up."""

    def __init__(self, path: str = "/x", method: str = "GET", **headers: str) -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [
                (name.replace("_", "-").encode(), value.encode("latin-1"))
                for name, value in headers.items()
            ],
            "client": ("10.0.0.7", 4711),
            "server": ("127.0.0.1", 8000),
        }
        self.sent: list[Message] = []
        self.disconnected = False
        self._left = asyncio.Event()

    async def receive(self) -> Message:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    def leave(self) -> None:
        self.disconnected = True
        self._left.set()

    async def call(self, app: Callable[..., Awaitable[None]]) -> None:
        await app(self.scope, self.receive, self.send)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])


def answer(status: int = 200, *parts: bytes) -> Callable[..., Awaitable[None]]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"end"})

    return app


def watched(app: Any, **settings: Any) -> tuple[ObserveMiddleware, Observation, FakeState]:
    state = FakeState(**settings)
    routes = FastAPI(openapi_url=None)
    for path in ("/x", "/health", "/metrics", FILES_ROUTE):
        routes.add_api_route(path, lambda: None, methods=["GET"])
    routes.add_api_route("/v1/completions", lambda: None, methods=["POST"])
    observation = Observation(state, lambda: RouteNames(routes.routes))  # type: ignore[arg-type]
    middleware = ObserveMiddleware(
        app, observation, shows_ids=state.config.enable_request_id_headers
    )
    return middleware, observation, state


def values(metrics: ServerMetrics, name: str, label: str | None = None) -> Any:
    """Values above zero of a metric by one label, or its only value."""
    found = [one for one in metrics.snapshot() if one.name == f"isinglass_{name}"]
    numbers = {
        one.labels.get(label or ""): one.count if isinstance(one, Histogram) else one.value
        for one in found
        if isinstance(one, Counter | Gauge | Histogram)
    }
    return numbers[None] if label is None else {k: v for k, v in numbers.items() if v}


def check_identity(metrics: ServerMetrics) -> None:
    """Every arrival has one outcome, or is still in flight."""
    arrived = values(metrics, "http_requests_arrived_total")
    in_flight = values(metrics, "http_requests_in_flight")
    outcomes = values(metrics, "http_request_outcomes_total", "outcome")
    ended = [one.value for one in metrics.snapshot() if one.name == "isinglass_http_requests_total"]  # type: ignore[attr-defined]
    assert arrived == sum(outcomes.values()) + in_flight == sum(ended) + in_flight


@pytest.fixture
def access_lines() -> Iterator[list[logging.LogRecord]]:
    """Records of the package, while a test runs."""
    records: list[logging.LogRecord] = []
    root, handler = logging.getLogger("isinglass"), logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    level = root.level
    root.setLevel(logging.DEBUG)
    root.addHandler(handler)
    yield records
    root.removeHandler(handler)
    root.setLevel(level)


# -- outcomes --------------------------------------------------------------------------------------


async def leaves_before_the_answer(scope: Any, receive: Any, send: Any) -> None:
    assert (await receive())["type"] == "http.disconnect"


async def leaves_in_mid_stream(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"data", "more_body": True})
    assert (await receive())["type"] == "http.disconnect"
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def fails_in_mid_stream(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"data", "more_body": True})
    raise RuntimeError("the route is broken")


async def tells_of_an_error(scope: Any, receive: Any, send: Any) -> None:
    scope["state"]["outcome"] = "engine_error"
    await answer(200, b"data")(scope, receive, send)


async def loses_its_engine(scope: Any, receive: Any, send: Any) -> None:
    scope["state"]["response_id"] = "cmpl-1"
    await answer(503)(scope, receive, send)


async def forgets_to_end(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize(
    ("app", "outcome", "status"),
    [
        (answer(), "completed", "200"),
        (answer(304), "completed", "304"),
        (answer(404), "client_error", "404"),
        (answer(500), "server_error", "500"),
        (leaves_before_the_answer, "disconnected", "499"),
        (leaves_in_mid_stream, "disconnected", "499"),
        (fails_in_mid_stream, "server_error", "200"),
        (tells_of_an_error, "engine_error", "200"),
        (loses_its_engine, "engine_error", "503"),
        (forgets_to_end, "server_error", "200"),
    ],
)
def test_every_end_is_one_outcome(app: Any, outcome: str, status: str) -> None:
    async def run() -> None:
        middleware, observation, _ = watched(app)
        client = Client()
        if outcome == "disconnected":
            client.leave()
        try:
            await client.call(middleware)
        except RuntimeError as error:
            assert "broken" in str(error)  # noqa: PT017 - one of several applications raises
        metrics = observation.metrics
        assert values(metrics, "http_request_outcomes_total", "outcome") == {outcome: 1}
        assert values(metrics, "http_requests_total", "status") == {status: 1}
        assert values(metrics, "http_requests_in_flight") == 0
        assert not observation.in_flight
        check_identity(metrics)

    asyncio.run(run())


def test_a_cancelled_request_is_counted_and_stays_cancelled() -> None:
    async def hangs(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        middleware, observation, _ = watched(hangs)
        task = asyncio.create_task(Client().call(middleware))
        await asyncio.sleep(0)
        assert values(observation.metrics, "http_requests_in_flight") == 1
        check_identity(observation.metrics)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert values(observation.metrics, "http_request_outcomes_total", "outcome") == {
            "cancelled": 1
        }
        check_identity(observation.metrics)

    asyncio.run(run())


def test_a_client_that_left_unnoticed_is_seen_when_the_answer_is_dropped() -> None:
    """uvicorn drops the answer of a route that never asks whether the client is still there."""

    async def run() -> None:
        client = Client()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            client.leave()
            await answer()(scope, receive, send)

        middleware, observation, _ = watched(slow)
        await client.call(middleware)
        assert values(observation.metrics, "http_requests_total", "status") == {"499": 1}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "phase", "reason"),
    [
        (401, Phase.READY, "auth"),
        (408, Phase.READY, "too_slow"),
        (413, Phase.READY, "body_too_large"),
        (429, Phase.READY, "queue_full"),
        (431, Phase.READY, "headers_too_large"),
        (503, Phase.STARTING, "starting"),
        (503, Phase.STOPPING, "stopping"),
        (503, Phase.DEAD, "dead"),
    ],
)
def test_a_refusal_has_its_reason(status: int, phase: Phase, reason: str) -> None:
    async def run() -> None:
        middleware, observation, state = watched(answer(status))
        state.phase = phase
        await Client().call(middleware)
        metrics = observation.metrics
        assert values(metrics, "http_requests_refused_total", "reason") == {reason: 1}
        assert values(metrics, "http_request_outcomes_total", "outcome") == {"refused": 1}
        await Client("/health").call(middleware)
        if status == 503:  # a probe's answer refuses nobody
            assert values(metrics, "http_requests_refused_total", "reason") == {reason: 1}
        check_identity(metrics)

    asyncio.run(run())


def test_a_wrong_method_at_a_probe_is_the_clients_error() -> None:
    async def run() -> None:
        middleware, observation, _ = watched(answer(405))
        await Client("/health", "POST").call(middleware)
        outcomes = values(observation.metrics, "http_request_outcomes_total", "outcome")
        assert outcomes == {"client_error": 1}

    asyncio.run(run())


@pytest.mark.parametrize("root", ["", "/api", "/api/"])
def test_the_path_that_is_shown_is_what_was_asked_for(root: str) -> None:
    """Not what a proxy has taken off, which ASGI has in front of it."""
    for asked in ("/v1/completions", "/api/x", "/a%20b", "*"):
        path = root + urllib.parse.unquote(asked)
        scope = {"path": path, "raw_path": (root + asked).encode(), "root_path": root}
        assert shown_path(scope) == asked
        assert shown_path({"path": path, "root_path": root}) == asked.replace("*", "%2A")


def test_random_traffic_adds_up() -> None:
    apps = [answer(status) for status in (200, 400, 401, 404, 429, 500, 503)]
    apps += [tells_of_an_error, leaves_before_the_answer, leaves_in_mid_stream, forgets_to_end]

    async def run() -> None:
        middleware, observation, _ = watched(None)
        for number in range(300):
            client = Client(
                f"/{'x' if number % 3 else number}", ("GET", "POST", "BREW")[number % 3]
            )
            client.leave()
            middleware.app = apps[number % len(apps)]
            await client.call(middleware)
        check_identity(observation.metrics)
        assert values(observation.metrics, "http_requests_arrived_total") == 300

    asyncio.run(run())


# -- identity --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [
        ("a", True),
        ("0af7651916cd43dd-8448eb.211c:80319c_@+=", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("", False),
        ("two words", False),
        ("line\nbreak", False),
        ("a/b", False),
        ("ümlaut", False),
        ("-leading", False),
    ],
)
def test_a_sane_id_of_the_client_is_kept(sent: str, is_kept: bool) -> None:
    async def run() -> None:
        middleware, _, _ = watched(answer())
        client = Client(x_request_id=sent)
        await client.call(middleware)
        returned = client.headers[b"x-request-id"].decode()
        assert (returned == sent) == is_kept
        assert client.scope["state"]["request_id"] == returned
        assert re.fullmatch(r"[0-9a-f]{24}", returned) or is_kept

    asyncio.run(run())


def test_an_id_in_use_gets_a_number_for_the_engine_alone() -> None:
    async def run() -> None:
        gate = asyncio.Event()

        async def waits(scope: Any, receive: Any, send: Any) -> None:
            await gate.wait()
            await answer()(scope, receive, send)

        middleware, observation, _ = watched(waits)
        clients = [Client("/v1/completions", "POST", x_request_id="again") for _ in range(3)]
        tasks = [asyncio.create_task(one.call(middleware)) for one in clients]
        await asyncio.sleep(0)
        ids = [one.scope["state"]["request_id"] for one in clients]
        assert ids == ["again", "again~2", "again~3"]
        assert len(observation.find("again")) == 3
        gate.set()
        await asyncio.gather(*tasks)
        assert {one.headers[b"x-request-id"] for one in clients} == {b"again"}
        assert [one.engine_id for one in observation.find("again")] == ids
        assert len(observation.find("again~2")) == 1

    asyncio.run(run())


def test_ids_can_be_kept_out_of_answers() -> None:
    async def run() -> None:
        middleware, _, _ = watched(answer(), enable_request_id_headers=False)
        client = Client(x_request_id="a")
        await client.call(middleware)
        assert b"x-request-id" not in client.headers

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        ([TRACEPARENT], TRACEPARENT),
        ([], None),
        (["nonsense"], None),
        ([TRACEPARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32)], None),
        ([TRACEPARENT, TRACEPARENT], None),
    ],
)
def test_a_well_formed_traceparent_is_passed_on(sent: list[str], passed_on: str | None) -> None:
    async def run() -> None:
        middleware, _, _ = watched(answer())
        client = Client()
        client.scope["headers"] = [(b"traceparent", one.encode()) for one in sent]
        await client.call(middleware)
        assert client.scope["state"]["traceparent"] == passed_on

    asyncio.run(run())


def test_the_last_exchanges_of_the_api_are_remembered() -> None:
    async def run() -> None:
        middleware, observation, _ = watched(answer())
        for number in range(NUM_REMEMBERED + 10):
            await Client("/v1/completions", "POST", x_request_id=f"r{number}").call(middleware)
            await Client("/health", x_request_id=f"h{number}").call(middleware)
        assert not observation.find("r0")
        assert not observation.find("h9")
        assert observation.find(f"r{NUM_REMEMBERED}")[0].status == 200
        assert len(observation.exchanges()) == NUM_REMEMBERED

    asyncio.run(run())


# -- counts ----------------------------------------------------------------------------------------


def test_strangers_cannot_make_series() -> None:
    async def run() -> None:
        middleware, observation, _ = watched(answer(404))
        for number in range(500):
            await Client(f"/{number}", f"METHOD{number}").call(middleware)
            await Client("/x", f"METHOD{number}").call(middleware)
        series = [
            one.labels
            for one in observation.metrics.snapshot()
            if one.name == "isinglass_http_requests_total"
        ]
        assert {(one["method"], one["route"], one["status"]) for one in series} == {
            ("other", "other", "404"),
            ("other", "/x", "404"),
        }

    asyncio.run(run())


def test_templates_mounts_and_prefixes_name_routes() -> None:
    app = FastAPI(openapi_url=None)
    app.add_api_route("/debug/requests/{request_id:path}", lambda: None, methods=["GET"])
    app.add_api_route("/debug/requests", lambda: None, methods=["GET", "POST"])
    app.mount("/static", answer())  # type: ignore[arg-type]
    names = RouteNames(app.routes)
    assert names.find("/debug/requests", "POST") == ("/debug/requests", "POST")
    template = "/debug/requests/{request_id:path}"
    assert names.find("/debug/requests/a/b", "GET") == (template, "GET")
    assert names.find("/debug/requests/a/b", "POST") == (template, "other")
    assert names.find("/static/picture.png", "GET") == ("/static/*", "GET")
    assert names.find("/", "GET") == ("other", "other")


def test_a_stream_is_counted_as_it_goes() -> None:
    async def run() -> None:
        middleware, observation, _ = watched(answer(200, b"12345", b"", b"678"))
        client = Client()
        await client.call(middleware)
        metrics = observation.metrics
        assert values(metrics, "http_response_bytes_total", "route") == {"/x": 11}
        assert values(metrics, "http_stream_chunks_total") == 3
        assert values(metrics, "http_request_duration_seconds", "route") == {"/x": 1}
        assert values(metrics, "http_time_to_first_byte_seconds", "route") == {"/x": 1}
        assert [one.get("body") for one in client.sent[1:]] == [b"12345", b"", b"678", b"end"]

    asyncio.run(run())


def test_bodies_are_counted_as_they_were_read() -> None:
    async def reads_once(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await answer()(scope, receive, send)

    async def run() -> None:
        middleware, observation, _ = watched(reads_once)
        for body in (b"12345", b"123", b""):
            client = Client(method="POST")
            message = {"type": "http.request", "body": body, "more_body": True}
            client.receive = AsyncMock(return_value=message)  # type: ignore[method-assign]
            await client.call(middleware)
        metrics = observation.metrics
        assert values(metrics, "http_request_bytes_total", "route") == {"/x": 8}

    asyncio.run(run())


def test_durations_come_from_the_clock_and_carry_the_trace() -> None:
    now_ns = 5_000_000_000
    state = FakeState()
    observation = Observation(state, lambda: RouteNames(()), clock=lambda: now_ns)  # type: ignore[arg-type]
    scope = Client(traceparent=TRACEPARENT).scope
    exchange = observation.begin(scope)
    exchange.status, exchange.is_complete, exchange.first_byte_ns = 200, True, now_ns + 250_000_000
    now_ns += 700_000_000
    observation.end(exchange, None)
    found = {one.name: one for one in observation.metrics.snapshot() if isinstance(one, Histogram)}
    duration = found["isinglass_http_request_duration_seconds"]
    assert duration.sum == pytest.approx(0.7)
    assert found["isinglass_http_time_to_first_byte_seconds"].sum == pytest.approx(0.25)
    (exemplar,) = duration.exemplars.values()
    assert (exemplar.trace_id, exemplar.span_id) == tuple(TRACEPARENT.split("-")[1:3])


def test_a_blocked_loop_shows_while_it_is_blocked() -> None:
    now_ns = 10**9
    metrics = ServerMetrics(clock=lambda: now_ns)
    metrics.observe_loop(2_000_000, next_sample_ns=now_ns + 250_000_000)
    assert values(metrics, "frontend_event_loop_lag_max_seconds") == pytest.approx(0.002)
    now_ns += 3_250_000_000
    assert values(metrics, "frontend_event_loop_lag_max_seconds") == pytest.approx(3.0)
    metrics.observe_loop(3_000_000_000, next_sample_ns=now_ns + 250_000_000)
    now_ns += 11_000_000_000
    metrics.observe_loop(0, next_sample_ns=now_ns + 250_000_000)
    assert values(metrics, "frontend_event_loop_lag_max_seconds") == 0
    assert values(metrics, "frontend_event_loop_lag_seconds") == 3


def test_the_loop_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 10**9
    monkeypatch.setattr(loop_watch, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    timers: list[tuple[float, Callable[[], None]]] = []

    async def run() -> None:
        nonlocal now_ns
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda *timer: timers.append(timer))
        middleware, observation, _ = watched(answer())
        await Client().call(middleware)
        await Client().call(middleware)
        for lag_ns in (1_000_000, 30_000_000):
            ((delay_s, sample),) = timers
            timers.clear()
            now_ns += round(delay_s * 1e9) + lag_ns
            sample()
        assert len(timers) == 1
        assert values(observation.metrics, "frontend_event_loop_lag_seconds") == 2
        (lags,) = [
            one
            for one in observation.metrics.snapshot()
            if one.name == "isinglass_frontend_event_loop_lag_seconds"
        ]
        assert isinstance(lags, Histogram)
        assert lags.sum == pytest.approx(0.031)
        assert values(observation.metrics, "frontend_open_file_descriptors") > 2
        assert values(observation.metrics, "frontend_resident_memory_bytes") > 1 << 20
        assert values(observation.metrics, "frontend_cpu_seconds_total") > 0

    asyncio.run(run())


def test_every_metric_of_the_server_is_in_a_snapshot_or_open() -> None:
    async def run() -> None:
        middleware, observation, state = watched(answer())
        await Client().call(middleware)
        (source,) = state.engine.metric_sources
        assert {one.name for one in source()} == SERVER_METRICS
        assert all(one.labels["model_name"] == "tiny" for one in observation.metrics.snapshot())

    asyncio.run(run())


# -- log -------------------------------------------------------------------------------------------


def test_a_line_says_what_became_of_a_request(access_lines: list[logging.LogRecord]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        get_logger("test").info("inside")
        await answer(200, b"abc")(scope, receive, send)

    async def run() -> None:
        middleware, _, _ = watched(app)
        await Client("/v1/completions", "POST", x_request_id="mine", traceparent=TRACEPARENT).call(
            middleware
        )

    asyncio.run(run())
    inside, line = access_lines
    assert line.name == "isinglass.access"
    assert line.levelno == logging.INFO
    text = line.getMessage()
    assert text.startswith('10.0.0.7 "POST /v1/completions" 200 completed, 6 bytes, 0.0')
    assert text.endswith(" s, id mine")
    fields = json.loads(JsonFormatter("caller").format(line))
    assert fields["status"] == 200
    assert fields["response_bytes"] == 6
    for record in (inside, line):
        assert record.request_id == "mine"  # type: ignore[attr-defined]
        assert record.trace_id == TRACEPARENT.split("-")[1]  # type: ignore[attr-defined]


def test_probes_and_scrapes_are_no_news(access_lines: list[logging.LogRecord]) -> None:
    async def run() -> None:
        middleware, _, _ = watched(answer())
        await Client("/health").call(middleware)
        await Client("/metrics").call(middleware)
        await Client("/live/axis.js").call(middleware)
        await Client("/live/blocks.js").call(middleware)
        silent, _, _ = watched(answer(), disable_access_log=True)
        await Client().call(silent)

    asyncio.run(run())
    assert [one.levelno for one in access_lines] == [logging.DEBUG] * 4


def test_a_path_cannot_forge_a_line(access_lines: list[logging.LogRecord]) -> None:
    async def run() -> None:
        middleware, _, _ = watched(answer(404))
        client = Client()
        client.scope |= {"path": "/x\nERROR all is lost", "raw_path": b"/x%0AERROR%20all"}
        await client.call(middleware)
        client = Client()
        client.scope |= {"path": "/x\nERROR " + "y" * 9999}
        del client.scope["raw_path"]
        await client.call(middleware)

    asyncio.run(run())
    assert len(access_lines) == 2
    for line in access_lines:
        assert "\n" not in line.getMessage()
        assert len(line.getMessage()) < 500


# -- in an application -----------------------------------------------------------------------------


def make_app() -> tuple[FastAPI, Observation]:
    app = FastAPI(openapi_url=None)
    add_error_handlers(app)

    @app.get("/breaks")
    async def breaks() -> None:
        raise ZeroDivisionError

    @app.get("/refuses")
    async def refuses() -> None:
        raise ApiError(429, "no room")

    return app, observe(app, FakeState(), lambda: RouteNames(app.routes))  # type: ignore[arg-type]


def test_it_is_outside_of_the_answer_to_errors() -> None:
    async def run() -> None:
        app, observation = make_app()
        broken, refused = Client("/breaks", x_request_id="b"), Client("/refuses")
        await broken.call(app)  # answered and logged: no second report by the server
        await refused.call(app)
        assert broken.sent[0]["status"] == 500
        assert broken.headers[b"x-request-id"] == b"b"
        assert values(observation.metrics, "http_request_outcomes_total", "outcome") == {
            "server_error": 1,
            "refused": 1,
        }
        assert values(observation.metrics, "http_requests_refused_total", "reason") == {
            "queue_full": 1
        }
        check_identity(observation.metrics)
        (route,) = {
            one.labels["route"]
            for one in observation.metrics.snapshot()
            if one.name == "isinglass_http_requests_total" and one.labels["status"] == "500"
        }
        assert route == "/breaks"

    asyncio.run(run())


def test_other_scopes_pass() -> None:
    async def run() -> None:
        seen = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["type"])

        middleware, observation, _ = watched(app)
        await middleware({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
        assert seen == ["lifespan"]
        assert values(observation.metrics, "http_requests_arrived_total") == 0

    asyncio.run(run())


def test_nobody_is_traced_before_the_engine_has_started() -> None:
    observation = Observation(FakeState(), lambda: RouteNames(()))  # type: ignore[arg-type]
    assert type(observation.tracer) is RequestTracer


# -- refused before there was a request ------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (ApiError(400, "no request"), "client_error", None),
        (ApiError(408, "late"), "refused", "too_slow"),
        (ApiError(431, "long"), "refused", "headers_too_large"),
        (ApiError(503, "full", code="too_many_connections"), "refused", "connections_full"),
    ],
)
def test_what_never_became_a_request_has_an_outcome_too(
    error: ApiError, outcome: str, reason: str | None, access_lines: list[logging.LogRecord]
) -> None:
    state = FakeState()
    state.phase = Phase.STARTING
    observation = Observation(state, lambda: RouteNames(()))  # type: ignore[arg-type]
    begin_ns = time.monotonic_ns() - 3 * 10**9
    observation.refuse(error, ("10.0.0.7", 4711), begin_ns=begin_ns, num_bytes=123)
    metrics = observation.metrics
    check_identity(metrics)
    assert values(metrics, "http_request_outcomes_total", "outcome") == {outcome: 1}
    assert values(metrics, "http_requests_total", "status") == {str(error.status): 1}
    assert values(metrics, "http_requests_total", "route") == {"other": 1}
    reasons = {} if reason is None else {reason: 1}
    assert values(metrics, "http_requests_refused_total", "reason") == reasons
    (line,) = access_lines
    told = re.fullmatch(
        rf'10.0.0.7 "- -" {error.status} {reason or outcome}, 123 bytes, 3\.\d+ s, id (\w+)',
        line.getMessage(),
    )
    assert told is not None
    assert error.headers["X-Request-Id"] == told[1]
    assert metrics.num_response_bytes == {"other": 123}


# -- what the connection knows better --------------------------------------------------------------


async def breaks_off(scope: Any, receive: Any, send: Any) -> None:
    """Its body is none, and the connection says so itself."""
    scope["state"]["answered"] = 400, 17
    assert (await receive())["type"] == "http.disconnect"
    raise ClientDisconnect


def test_a_body_that_is_none_is_the_answer_that_its_client_got() -> None:
    async def run() -> None:
        middleware, observation, _ = watched(breaks_off)
        client = Client("/v1/completions", "POST")
        client.leave()
        with pytest.raises(ClientDisconnect):
            await client.call(middleware)
        metrics = observation.metrics
        check_identity(metrics)
        assert values(metrics, "http_request_outcomes_total", "outcome") == {"client_error": 1}
        assert values(metrics, "http_requests_total", "status") == {"400": 1}
        assert metrics.num_response_bytes == {"/v1/completions": 17}

    asyncio.run(run())


def test_a_request_that_was_left_in_its_pipeline_has_an_outcome(
    access_lines: list[logging.LogRecord],
) -> None:
    _, observation, _ = watched(answer())
    observation.leave(Client("/v1/completions", "POST").scope)
    check_identity(observation.metrics)
    assert values(observation.metrics, "http_request_outcomes_total", "outcome") == {
        "disconnected": 1
    }
    assert values(observation.metrics, "http_requests_total", "route") == {"/v1/completions": 1}
    (line,) = access_lines
    assert '"POST /v1/completions" 499 disconnected' in line.getMessage()
