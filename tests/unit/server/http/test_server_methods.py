"""Methods that routes do not spell out, asked of the whole application without an engine."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from engine import AsyncLLM
from engine.server.admin.api_page import api_page
from engine.server.app import make_app
from engine.server.config import ServerConfig
from engine.server.http.route_names import FILES_ROUTE, RouteNames
from engine.server.live.files import PUBLIC_PATHS
from engine.server.openai.protocol.common import GenerationFields
from engine.server.state import ServerState
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return make_app(ServerState(AsyncLLM(), ServerConfig()))


def ask(app: FastAPI, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body, as an ASGI server gets them."""
    sent: list[Any] = []
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
        "scheme": "http",
        "client": ("test", 1),
        "server": ("test", 80),
    }
    bodies = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if not bodies:
            await asyncio.Event().wait()
        return bodies.pop()

    async def send(message: Any) -> None:
        assert not sent or sent[-1].get("more_body", True), "a message behind the last one"
        sent.append(message)

    async def call() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await app(scope, receive, send)

    asyncio.run(call())
    assert sent[-1].get("more_body", False) is False
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(one.get("body", b"") for one in sent[1:])


PROBED = (
    *("/health", "/ping", "/version", "/metrics", "/load"),
    *("/v1/models", "/v1/models/", "/v1/models/nobody"),
)
READ = (*PROBED, "/docs", "/server_info", "/debug/requests", "/openapi.json", *sorted(PUBLIC_PATHS))


@pytest.mark.parametrize("path", READ)
def test_head_is_get_without_a_body(path: str, app: FastAPI) -> None:
    status, headers, body = ask(app, "GET", path)
    head_status, head_headers, nothing = ask(app, "HEAD", path)
    assert (head_status, nothing) == (status, b"")
    assert body
    changing = {
        "x-request-id",
        *(["content-length"] if path in ("/metrics", "/server_info") else []),
    }
    if path == "/debug/requests":  # which tells of the one before
        changing.add("content-length")
    assert head_headers.keys() == headers.keys()
    for name in headers.keys() - changing:
        assert head_headers[name] == headers[name]


def test_head_of_a_stream_without_an_end_ends(app: FastAPI) -> None:
    status, headers, body = ask(app, "HEAD", "/live/events")
    assert (status, body) == (200, b"")
    assert headers["content-type"].startswith("text/event-stream")


def routes(app: FastAPI) -> Iterator[tuple[str, frozenset[str]]]:
    names = RouteNames(app.routes)
    for path in (*READ, "/v1/completions", "/v1/chat/completions", "/tokenize", "/start_profile"):
        yield path, names.methods(path)


def test_every_path_says_which_methods_it_has(app: FastAPI) -> None:
    for path, methods in routes(app):
        allowed = ", ".join(sorted(methods))
        status, headers, body = ask(app, "OPTIONS", path)
        assert (status, headers["allow"], body) == (204, allowed, b"")
        for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "TRACE"} - methods:
            status, headers, body = ask(app, method, path)
            assert (status, headers["allow"]) == (405, allowed), (method, path)
            assert b'"method_not_allowed"' in body


def test_methods_of_several_routes_of_one_path_are_one_list(app: FastAPI) -> None:
    assert ask(app, "DELETE", "/ping")[1]["allow"] == "GET, HEAD, OPTIONS, POST"
    assert ask(app, "GET", "/v1/completions")[1]["allow"] == "OPTIONS, POST"


def test_what_routes_share_is_in_one_place(app: FastAPI) -> None:
    assert set(app.state._state) == {"server"}


def test_the_list_of_models_may_end_in_a_slash() -> None:
    state = ServerState(AsyncLLM(), ServerConfig(served_model_name=("one", "team/two")))
    app = make_app(state)
    (status, _, listed), slashed = (ask(app, "GET", f"/v1/models{end}") for end in ("", "/"))
    assert (status, slashed[0], slashed[2]) == (200, 200, listed)
    assert [one["id"] for one in json.loads(listed)["data"]] == ["one", "team/two"]
    assert json.loads(ask(app, "GET", "/v1/models/team/two")[2])["id"] == "team/two"


@pytest.mark.parametrize("path", ["/v1/models/gpt-4", "/nothing", "/debug/requests/nobody"])
def test_what_is_not_there_is_an_invalid_request(path: str, app: FastAPI) -> None:
    status, _, body = ask(app, "GET", path)
    assert (status, json.loads(body)["error"]["type"]) == (404, "invalid_request_error")


def test_one_server_alone_says_its_own_load(app: FastAPI) -> None:
    scope = {"type": "http", "path": "/v1/completions", "headers": [], "client": None}
    observation = app.state.server.observation
    exchange = observation.begin(scope | {"method": "POST"})
    assert json.loads(ask(app, "GET", "/load")[2]) == {"server_load": 1}
    observation.end(exchange, None)
    assert json.loads(ask(app, "GET", "/load")[2]) == {"server_load": 0}


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "GET"])
def test_a_path_that_is_not_there_stays_so(method: str, app: FastAPI) -> None:
    assert ask(app, method, "/nothing")[0] == 404


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/completions", "there is no route GET /completions; did you mean /v1/completions?"),
        ("/v1/chat/completion", "; did you mean /v1/chat/completions?"),
        ("/debug/request", "; did you mean /debug/requests?"),
        ("/" + "x" * 5000, "xxxx"),
    ],
)
def test_a_path_that_is_not_there_is_named_with_the_nearest(
    path: str, said: str, app: FastAPI
) -> None:
    status, _, body = ask(app, "GET", path)
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (404, "route_not_found")
    assert error["message"].endswith(said)
    assert len(error["message"]) < 400


def test_routes_that_are_turned_off_say_so() -> None:
    app = make_app(ServerState(AsyncLLM(), ServerConfig(enable_debug_routes=False)))
    for path in ("/debug/requests", "/debug/requests/one", "/start_trace"):
        status, _, body = ask(app, "GET", path)
        assert status == 404
        assert b"--no-enable-debug-routes" in body


def test_they_are_counted_under_their_own_names(app: FastAPI) -> None:
    ask(app, "HEAD", "/version")
    ask(app, "OPTIONS", "/version")
    ask(app, "DELETE", "/version")
    series = app.state.server.observation.metrics.snapshot()
    counted = {
        (one.labels["method"], one.labels["status"])
        for one in series
        if one.name == "isinglass_http_requests_total" and one.labels["route"] == "/version"
    }
    assert counted >= {("HEAD", "200"), ("OPTIONS", "204"), ("other", "405")}


def test_the_files_of_the_page_are_one_route(app: FastAPI) -> None:
    answers = {path: ask(app, "GET", path) for path in PUBLIC_PATHS}
    assert {status for status, _, _ in answers.values()} == {200}
    assert answers["/favicon.ico"][1]["content-type"] == "image/svg+xml"
    assert ask(app, "GET", "/live/page.html")[0] == 404
    series = app.state.server.observation.metrics.snapshot()
    counted = {one.labels.get("route", "") for one in series}
    assert {one for one in counted if one.startswith("/live")} <= {FILES_ROUTE, "/live/events"}


# -- the page about them ---------------------------------------------------------------------------


def test_the_page_of_the_api_has_every_route_and_field(app: FastAPI) -> None:
    status, headers, body = ask(app, "GET", "/docs")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = body.decode()
    description = app.openapi()
    for path, operations in description["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code></h2>" in page
    for schema in description["components"]["schemas"].values():
        for name in schema.get("properties", {}):
            assert f"<td><code>{name}</code>" in page
    anchors = set(re.findall(r'id="([^"]+)"', page))
    links = set(re.findall(r'href="#([^"]+)"', page))
    assert len(links) > 30
    assert links <= anchors, "a link to nowhere"
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        for field, schema in description["components"]["schemas"][name]["properties"].items():
            if field in GenerationFields.model_fields and not schema.get("deprecated"):
                assert "description" in schema or "$ref" in str(schema), field
    assert re.findall('rel="icon" href="([^"]+)"', page) == ["favicon.ico"]
    assert "<script" not in page
    (style,) = re.findall(r"<style>(.*)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in headers["content-security-policy"]


def test_what_is_described_is_text() -> None:
    evil = "<script>alert(1)</script>"
    schema = {"type": "integer", "description": evil, "minimum": 1, "default": 5}
    description = {
        "info": {"title": evil, "version": "1"},
        "paths": {f"/{evil}": {"get": {"description": evil, "responses": {}}}},
        "components": {"schemas": {evil: {"properties": {evil: schema}, "required": [evil]}}},
    }
    page = api_page(description)
    assert "<script" not in page
    assert "<td>integer, ≥ 1, default 5<td>&lt;script&gt;" in page
    assert "Required." in page


def test_there_is_no_page_where_none_is_wanted() -> None:
    app = make_app(ServerState(AsyncLLM(), ServerConfig(enable_docs=False)))
    assert [ask(app, "GET", path)[0] for path in ("/docs", "/redoc", "/openapi.json")] == [404] * 3


def test_errors_are_described_as_they_are_sent(app: FastAPI) -> None:
    description = app.openapi()
    assert "HTTPValidationError" not in description["components"]["schemas"]
    form = {"$ref": "#/components/schemas/ErrorResponse"}
    for operations in description["paths"].values():
        for operation in operations.values():
            answers = operation["responses"]
            assert "422" not in answers
            assert answers["default"]["content"]["application/json"]["schema"] == form
    assert "content" in description["paths"]["/health"]["get"]["responses"]["503"]
