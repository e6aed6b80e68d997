"""What a request must pass before a route sees it: keys, sizes, pace. Raw ASGI, no sockets."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from engine.errors import ConfigError
from engine.server.config import ServerConfig
from engine.server.http.auth import ApiKeys, load_api_keys, warn_of_readers
from engine.server.http.errors import add_error_handlers
from engine.server.http.middleware import GuardMiddleware, add_guards
from engine.server.http.route_names import route_path
from engine.server.live.files import PUBLIC_PATHS
from engine.server.process.serve import check_settings
from tests.support.guards import make_state


def make_app(state: Any) -> FastAPI:
    """An application that says what it got, behind the guard."""
    app = FastAPI()
    add_error_handlers(app)
    add_guards(app, state, pages=PUBLIC_PATHS)

    @app.post("/v1/echo")
    async def echo(request: Request) -> dict[str, int]:
        return {"length": len(await request.body()), "serving": state.num_serving}

    @app.get("/{path:path}")
    async def look(path: str) -> dict[str, str]:
        return {"path": path}

    return app


def error_of(response: Any) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


class Chunks:
    """ASGI's receive: parts of a body, or waits for ever behind the last one that there is."""

    def __init__(self, parts: list[bytes], *, ends: bool = True) -> None:
        self._parts = list(parts)
        self._ends = ends

    async def __call__(self) -> dict[str, Any]:
        if not self._parts:
            await asyncio.Event().wait()
        part = self._parts.pop(0)
        return {
            "type": "http.request",
            "body": part,
            "more_body": bool(self._parts) or not self._ends,
        }


def call(
    app: Any, receive: Any, headers: list[tuple[bytes, bytes]], path: str = "/v1/echo"
) -> tuple[int, Any]:
    """Status and JSON of one raw call."""
    sent: list[Any] = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
        "client": ("test", 1),
        "server": ("test", 80),
    }

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(asyncio.wait_for(app(scope, receive, send), 10))
    assert sent[-1].get("more_body", False) is False
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], json.loads(body)


# -- keys ------------------------------------------------------------------------------------------

KEYS = ("first-key", "second-key")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_any_of_the_keys_opens(key: str, scheme: str) -> None:
    with TestClient(make_app(make_state(KEYS))) as client:
        headers = {"Authorization": f"{scheme} {key}"}
        assert client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer first-ke",
        "Bearer first-keys",
        "Bearer FIRST-KEY",
        "Basic first-key",
        "first-key",
        "Bearer first-key second-key",
        "Bearer \xff\xfe",
    ],
)
def test_nothing_else_does(value: str | None) -> None:
    with TestClient(make_app(make_state(KEYS))) as client:
        headers = {} if value is None else {"Authorization": value.encode("latin-1")}
        response = client.get("/v1/models", headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = error_of(response)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert not any(key in response.text for key in KEYS)


GUARDED = (
    *("/v1/models", "/metrics/", "/server_info", "/debug/flight", "/start_profile", "/live/events"),
    *(
        "/load/",
        "/health/",
        "//health",
        "/Health",
        "/version/x",
        "/tokenize",
        "/nothing",
        "/v1/health",
    ),
)


@pytest.mark.parametrize("path", GUARDED)
def test_all_but_a_few_paths_need_a_key(path: str) -> None:
    with TestClient(make_app(make_state(KEYS))) as client:
        assert client.get(f"http://testserver{path}").status_code == 401


@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/version", "/docs", "/openapi.json", *sorted(PUBLIC_PATHS)]
)
def test_probes_and_pages_are_open(path: str) -> None:
    with TestClient(make_app(make_state(KEYS))) as client:
        assert client.get(path).status_code == 200


def test_metrics_are_open_unless_guarded() -> None:
    for guarded, status in ((False, 200), (True, 401)):
        with TestClient(make_app(make_state(KEYS, guard_metrics=guarded))) as client:
            for path in ("/metrics", "/load"):
                assert client.get(path).status_code == status


def test_paths_below_a_proxys_prefix_are_those_that_routes_know() -> None:
    assert route_path({"path": "/api/health", "root_path": "/api"}) == "/health"
    assert route_path({"path": "/health", "root_path": ""}) == "/health"
    assert route_path({"path": "/api", "root_path": "/api"}) == "/"
    assert route_path({"path": "/apix/health", "root_path": "/api"}) == "/apix/health"
    assert route_path({"path": "/api//health", "root_path": "/api/"}) == "/health"


def test_every_key_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    keys = ApiKeys(["a", "bb", "ccc"])
    monkeypatch.setattr("engine.server.http.auth.hmac.compare_digest", compare)
    for presented in (b"Bearer a", b"Bearer ccc", b"Bearer no", b"Bearer " + b"x" * 5000):
        compared.clear()
        assert keys.accept(presented) is (presented in (b"Bearer a", b"Bearer ccc"))
        assert compared == [(32, 32)] * 3


@pytest.mark.usefixtures("ascii_locale")
def test_keys_come_from_flag_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# Zoë's\nfrom-file-1\n\n  from-file-2  \n", encoding="utf-8")
    file.chmod(0o600)
    monkeypatch.setenv("ISINGLASS_API_KEY", "from-env-1, from-env-2")
    config = ServerConfig(api_key=("from-flag",), api_key_file=str(file))
    keys = load_api_keys(config)
    assert len(keys) == 5
    for key in ("from-flag", "from-env-1", "from-env-2", "from-file-1", "from-file-2"):
        assert keys.accept(f"Bearer {key}".encode())
        assert key not in repr(vars(type(keys))) + str(keys._digests)
    assert not keys.accept("Bearer # Zoë's".encode())


def test_a_file_of_keys_that_others_can_read_is_told_of_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("key\n")
    config = ServerConfig(api_key_file=str(file))
    warned: list[Any] = []
    monkeypatch.setattr("engine.server.http.auth.logger.warning", lambda *said: warned.append(said))
    for mode, num_warnings in ((0o600, 0), (0o644, 1), (0o640, 2)):
        file.chmod(mode)
        load_api_keys(config)  # more than once, and before logs are set up
        warn_of_readers(config)
        assert len(warned) == num_warnings
    warn_of_readers(ServerConfig())


@pytest.mark.parametrize("key", ["", "  ", "two words", "schlüssel", "tab\tbed"])
def test_keys_that_cannot_be_presented_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="API key"):
        load_api_keys(ServerConfig(api_key=(key,)))


def test_metrics_cannot_be_guarded_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISINGLASS_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="guard_metrics needs api_key"):
        check_settings(ServerConfig(guard_metrics=True))
    check_settings(ServerConfig(guard_metrics=True, api_key=("key",)))
    check_settings(ServerConfig())


@pytest.mark.parametrize(
    "settings",
    [
        {"uds": "a.sock", "host": "0.0.0.0"},
        {"uds": "a.sock", "port": 9000},
        {"allowed_methods": ("GET",)},
        {"allowed_headers": ("X-One",)},
        {"allow_credentials": True},
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any]) -> None:
    name = list(settings)[-1]
    with pytest.raises(ConfigError, match=f"^{name} "):
        ServerConfig(**settings)
    needed = {"allowed_origins": ("https://app.example",)}
    assert ServerConfig(**{**settings, **needed, "uds": None})


def test_a_key_file_must_be_there_and_hold_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_api_keys(ServerConfig(api_key_file=str(tmp_path / "no")))
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(ConfigError, match="holds no key"):
        load_api_keys(ServerConfig(api_key_file=str(tmp_path / "empty")))


def test_an_empty_variable_is_no_open_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISINGLASS_API_KEY", "")
    with pytest.raises(ConfigError, match="empty"):
        load_api_keys(ServerConfig())


# -- CORS ------------------------------------------------------------------------------------------

ORIGIN = {"Origin": "https://app.example"}


def test_preflights_need_no_key_and_refusals_can_be_read() -> None:
    state = make_state(KEYS, allowed_origins=["https://app.example"])
    with TestClient(make_app(state)) as client:
        asks = ORIGIN | {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        preflight = client.options("/v1/echo", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        refused = client.post("/v1/echo", headers=ORIGIN)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        other = client.options("/v1/echo", headers=asks | {"Origin": "https://evil.example"})
        assert other.status_code == 400
        error = other.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "cors_refused")
        assert error["message"].startswith("Disallowed CORS origin")
        assert "access-control-allow-origin" not in other.headers
        assert "access-control-allow-methods" in other.headers


def test_without_origins_there_is_no_cors() -> None:
    with TestClient(make_app(make_state(KEYS))) as client:
        asks = ORIGIN | {"Access-Control-Request-Method": "POST"}
        response = client.options("/v1/echo", headers=asks)
        assert response.status_code == 401
        assert "access-control-allow-origin" not in response.headers


# -- sizes -----------------------------------------------------------------------------------------

LIMIT = 4096


def test_bodies_up_to_the_limit_pass_whole() -> None:
    generator = random.Random(1)
    with TestClient(make_app(make_state(max_body_bytes=LIMIT))) as client:
        for size in (0, 1, LIMIT - 1, LIMIT):
            response = client.post("/v1/echo", content=generator.randbytes(size))
            assert (response.status_code, response.json()["length"]) == (200, size)


@pytest.mark.parametrize("size", [LIMIT + 1, 10 * LIMIT])
def test_longer_ones_are_refused_whatever_they_say_of_themselves(size: int) -> None:
    app = make_app(make_state(max_body_bytes=LIMIT))
    generator = random.Random(size)
    for lengths in ([str(size).encode()], [b"17"], [b"9" * 30], [b"nonsense"]):
        body, parts = b"x" * size, []
        while body:
            cut = generator.randint(1, 2000)
            parts.append(body[:cut])
            body = body[cut:]
        headers = [(b"content-length", length) for length in lengths]
        status, answer = call(app, Chunks(parts), headers)
        assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
        assert str(LIMIT) in answer["error"]["message"]
        assert answer["error"]["code"] == "request_too_large"
    chunked = [(b"transfer-encoding", b"chunked")]
    status, answer = call(app, Chunks([b"x" * LIMIT, b"y"]), chunked)
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


def test_a_refused_body_that_never_ends_is_answered_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.server.http.middleware._DRAIN_S", 0.2)
    app = make_app(make_state(max_body_bytes=LIMIT))
    headers = [(b"transfer-encoding", b"chunked")]
    assert call(app, Chunks([b"x" * LIMIT, b"yy"], ends=False), headers)[0] == 413
    headers = [(b"content-length", b"99999")]
    assert call(app, Chunks([b"x"], ends=False), headers)[0] == 413


def test_heads_have_a_largest_size() -> None:
    app = make_app(make_state(max_header_bytes=2048))
    fits = [(b"x-padding", b"y" * 1900)]
    assert call(app, Chunks([b""]), fits)[0] == 200
    for headers in ([(b"x-padding", b"y" * 2048)], [(b"x", b"y")] * 500):
        status, answer = call(app, Chunks([b""]), headers)
        assert (status, answer["error"]["code"]) == (431, "headers_too_large")
    assert call(app, Chunks([b""]), [], path="/" + "a" * 2048)[0] == 431


def test_a_body_must_keep_moving() -> None:
    app = make_app(make_state(timeout_read_s=0.2))
    headers = [(b"content-length", b"100")]
    status, answer = call(app, Chunks([b"x" * 50], ends=False), headers)
    assert status == 408
    assert "too long" in answer["error"]["message"]
    assert answer["error"]["code"] == "request_timeout"


def test_a_body_that_moves_slowly_gets_more_time() -> None:
    app = make_app(make_state(timeout_read_s=1.0))

    class Slow(Chunks):
        async def __call__(self) -> dict[str, Any]:
            await asyncio.sleep(0.2)
            return await super().__call__()

    # 1.2 s in all: beyond the time-out, but at more than 1 KiB a second.
    status, answer = call(app, Slow([b"x" * 600] * 6), [(b"content-length", b"3600")])
    assert (status, answer["length"]) == (200, 3600)


def test_what_is_being_served_is_counted() -> None:
    state = make_state()
    with TestClient(make_app(state)) as client:
        assert client.post("/v1/echo", content=b"hi").json()["serving"] == 1
        assert client.post("/v1/echo", content=b"").json()["serving"] == 1
    assert state.num_serving == 0


@pytest.mark.parametrize(
    ("path", "is_counted"), [("/live/events", False), ("/live", True), ("/liveness", True)]
)
def test_the_end_waits_for_all_but_the_live_stream(path: str, is_counted: bool) -> None:
    state, seen = make_state(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(state.num_serving)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    assert call(GuardMiddleware(app, state=state), Chunks([b""]), [], path=path) == (200, {})
    assert seen == [int(is_counted)]


def test_other_kinds_of_connections_are_not_touched() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    guard = GuardMiddleware(app, state=make_state(KEYS))
    asyncio.run(guard({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]
