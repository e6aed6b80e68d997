"""The routes that look and steer, over an engine made for the purpose: no secret gets out, no
caller waits for ever, no scrape holds others up."""

import asyncio
import dataclasses
import errno
import logging
import os
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from engine.api.engine_host import EngineHost
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError, IsinglassError, ProfilerError
from engine.server.admin import control, debug
from engine.server.admin.metrics import add_metrics
from engine.server.cluster.metrics_share import MetricsShare
from engine.server.config import ServerConfig
from engine.server.http.errors import add_error_handlers
from engine.server.http.observe import observe
from engine.server.http.route_names import RouteNames
from engine.server.state import ServerState
from engine.types.attachment import CoreAttachment
from instrumentation import Counter, Gauge, Metric, ProfileStatus, SinkName
from instrumentation.metrics.engine import ENGINE_UP
from instrumentation.metrics.merge import encode_snapshot
from instrumentation.metrics.prometheus import exposition
from instrumentation.metrics.server import FRONTEND_CPU, FRONTEND_MEMORY, SERVER_METRICS
from instrumentation.metrics.vllm_server_names import PROCESS_NAMES
from tests.waiting import PATIENCE_S

Calls = Callable[..., Awaitable[Any]]


class FakeEngine:
    """An engine that has not started; what is awaited of it is set by the test."""

    model_name = "tiny"
    labelled_name = None
    observer = None
    attachment = None
    num_unfinished = 0
    early_end = ""

    def __init__(self, **settings: Any) -> None:
        self.config = EngineConfig.from_kwargs(**settings)
        self.metric_sources: list[Callable[[], list[Metric]]] = []
        self.metric_exporters: list[Any] = []

    def set(self, name: str, result: Any) -> None:
        """Have a method return something, raise it, or wait for an event."""

        async def method(**_: Any) -> Any:
            if isinstance(result, Exception):
                raise result
            return await result.wait() if isinstance(result, asyncio.Event) else result

        setattr(self, name, method)


def served(
    server: dict[str, Any] | None = None, **settings: Any
) -> tuple[FastAPI, FakeEngine, ServerState]:
    engine = FakeEngine(**settings)
    state = ServerState(engine, ServerConfig(**(server or {})))  # type: ignore[arg-type]
    state.require_ready = lambda: None  # type: ignore[method-assign]
    app = FastAPI()
    app.state.server = state
    add_error_handlers(app)
    state.observation = observe(app, state, lambda: RouteNames(app.routes))
    add_metrics(app, state)
    app.include_router(control.router)
    app.include_router(debug.router)
    return app, engine, state


async def ask(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, **options)


# -- settings --------------------------------------------------------------------------------------


def test_no_secret_is_shown() -> None:
    secrets = {
        "api_key": ("key-of-mine",),
        "api_key_file": "/private/keys-of-mine",
        "ssl_keyfile": "/private/tls-of-mine.key",
        "ssl_certfile": "/private/tls-of-mine.pem",
    }
    app, _, _ = served(secrets, otlp_traces_endpoint="https://me:word-of-mine@collector:4317/")
    answer = asyncio.run(ask(app, "GET", "/server_info"))
    assert answer.status_code == 200
    assert "of-mine" not in answer.text
    info = answer.json()
    assert {name: info["settings"]["server"][name] for name in secrets} == dict.fromkeys(
        secrets, "set"
    )
    shown = info["settings"]["observability"]["otlp_traces_endpoint"]
    assert shown == "https://collector:4317/"
    assert info["ready"] is None
    assert info["phase"] == "starting"


def test_every_setting_whose_name_smells_of_a_secret_is_covered() -> None:
    smells = ("key", "secret", "password", "ssl", "credential")
    for spec in dataclasses.fields(ServerConfig):
        if spec.name == "allow_credentials":  # a word of CORS
            continue
        is_hidden = control.shown({spec.name: "value"})[spec.name] == "set"
        assert is_hidden == any(smell in spec.name for smell in smells), spec.name


# -- calls to the core -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "status", "text"),
    [
        (ProfilerError("a profile is running already"), 409, "running already"),
        (ConfigError("max_steps must be"), 400, "max_steps"),
        (EngineDeadError("killed by signal 9"), 503, "died"),
        (RuntimeError("/private/secret"), 500, "its log says why"),
        ([ProfileStatus(pid=7)], 200, '"pid":7'),
    ],
)
def test_failures_of_a_call_have_a_status(result: Any, status: int, text: str) -> None:
    app, engine, _ = served()
    engine.set("start_profile", result)
    answer = asyncio.run(ask(app, "POST", "/start_profile", json={"max_steps": 3}))
    assert answer.status_code == status
    assert text in answer.text
    assert "/root" not in answer.text


def test_a_core_that_hangs_collects_no_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CALL_TIMEOUT_S", 0.2)

    async def run() -> None:
        app, engine, _ = served()
        core_goes_on = asyncio.Event()
        engine.set("stop_profile", core_goes_on)
        engine.set("stop_trace", "runs/run-1")
        hung = asyncio.create_task(ask(app, "POST", "/stop_profile"))
        await asyncio.sleep(0.05)
        refused = await ask(app, "POST", "/stop_trace")
        assert refused.status_code == 409
        assert refused.headers["retry-after"] == "1"
        assert (await ask(app, "GET", "/debug/stacks")).status_code == 200
        assert (await ask(app, "GET", "/metrics")).status_code == 200
        answer = await hung
        assert answer.status_code == 504
        assert "hang" in answer.json()["error"]["message"]
        # The call is still on its way, so it stays the only one.
        assert (await ask(app, "POST", "/stop_trace")).status_code == 409
        core_goes_on.set()
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await ask(app, "POST", "/stop_trace")).status_code == 409:
                await asyncio.sleep(0)
        assert answer.json() == {"run_dir": "runs/run-1"}

    asyncio.run(run())


def test_what_cannot_be_done_now_is_a_conflict() -> None:
    async def run() -> None:
        app, engine, _ = served()
        engine.set("reset_prefix_cache", False)
        engine.set("start_trace", IsinglassError("a recording is being written already"))
        engine.set("dump_flight_record", IsinglassError("there is no flight record"))
        for method, path in (
            ("POST", "/reset_prefix_cache"),
            ("POST", "/start_trace"),
            ("GET", "/debug/flight"),
        ):
            answer = await ask(app, method, path)
            assert answer.status_code == 409, path
        engine.set("start_trace", ConfigError("trace_dir 'x' is not a folder"))
        assert (await ask(app, "POST", "/start_trace")).status_code == 500
        engine.set("stop_trace", "runs/run-1")
        engine.early_end = "this process's part ended early: it could not be written"
        answer = await ask(app, "POST", "/stop_trace")
        assert answer.json() == {"run_dir": "runs/run-1", "note": engine.early_end}
        engine.set("dump_flight_record", EngineDeadError("died; see /tmp/flight-crash.journal"))
        answer = await ask(app, "POST", "/debug/flight")
        assert answer.status_code == 503
        assert "flight-crash" in answer.text

    asyncio.run(run())


def test_within_a_second_the_last_flight_record_is_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on records refuses nobody, least of all as if the queue were full."""
    now_s = 100.0
    monkeypatch.setattr(debug, "time", SimpleNamespace(monotonic=lambda: now_s))
    records = [tmp_path / "first.journal", tmp_path / "second.journal"]
    for path in records:
        path.write_text(path.name)

    async def run() -> list[str]:
        nonlocal now_s
        app, engine, _ = served()
        answers = []
        for path, later_s in ((records[0], 0.0), (records[1], 0.5), (records[1], 0.6)):
            engine.set("dump_flight_record", str(path))
            now_s += later_s
            answers.append((await ask(app, "GET", "/debug/flight?download=1")).text)
        return answers

    assert asyncio.run(run()) == ["first.journal", "first.journal", "second.journal"]


def test_no_path_is_taken_from_a_client() -> None:
    async def run() -> None:
        app, engine, _ = served()
        engine.set("start_profile", [])
        engine.set("start_trace", "runs/run-1")
        for body in ({"folder": "/tmp/x"}, {"trace_dir": "/tmp/x"}, {"profiler_dir": "/tmp/x"}):
            assert (await ask(app, "POST", "/start_profile", json=body)).status_code == 400
        assert (await ask(app, "POST", "/start_profile")).json() == {"profiles": []}
        answer = await ask(app, "POST", "/start_profile", content=b"{}", headers={})
        assert answer.status_code == 415, "bodies are read as strictly as those of other routes"
        answer = await ask(app, "POST", "/start_trace", params={"trace_dir": "/tmp/x"})
        assert answer.json() == {"run_dir": "runs/run-1"}
        for path in ("/debug/flight?path=/etc/passwd", "/debug/requests/..%2f..%2fetc%2fpasswd"):
            assert b"root:" not in (await ask(app, "GET", path)).content

    asyncio.run(run())


# -- metrics ---------------------------------------------------------------------------------------


def test_before_the_start_the_server_alone_is_shown() -> None:
    async def run() -> None:
        app, _, _ = served()
        await ask(app, "GET", "/metrics")
        answer = await ask(app, "GET", "/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        assert 'isinglass_engine_up{engine="0",model_name="tiny"} 0.0' in answer.text
        assert not [name for name in SERVER_METRICS if name not in answer.text]

    asyncio.run(run())


def test_before_the_start_there_is_none_of_vllms_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        app, engine, _ = served(metrics_compat="vllm")
        engine.set("start_profile", RuntimeError("not yet"))
        for _ in range(3):
            assert (await ask(app, "POST", "/start_profile")).status_code == 500
            text = (await ask(app, "GET", "/metrics")).text
        assert "isinglass_engine_up" in text
        assert "vllm:" not in text
        assert 'http_requests_total{handler="/start_profile",method="POST",status="5xx"} 3' in text
        for name in PROCESS_NAMES:
            assert f"\n{name} " in text
        ((sink, scrapes),) = engine.metric_exporters
        assert (sink, scrapes.num_errors) == (SinkName.PROMETHEUS, 0)
        assert not [record for record in caplog.records if record.name == "isinglass.telemetry"]

    asyncio.run(run())


def test_scrapes_that_failed_before_the_start_are_counted_by_the_engine() -> None:
    async def run() -> None:
        app, engine, _ = served(metrics_compat="vllm")
        page = app.state.server.metrics_page
        snapshot = page.snapshot

        def broken() -> list[Metric]:
            raise RuntimeError("no numbers today")

        page.snapshot = broken
        for _ in range(3):
            assert (await ask(app, "GET", "/metrics")).status_code == 200
        host = EngineHost(engine.config, metric_exporters=engine.metric_exporters)
        assert host.observer is not None
        engine.observer = host.observer
        page.snapshot = snapshot
        text = (await ask(app, "GET", "/metrics")).text
        assert re.search(r'telemetry_errors_total\{.*sink="prometheus"\} 3\.0', text)

    asyncio.run(run())


def test_a_frontend_that_takes_anothers_place_does_not_say_that_the_engine_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachment = CoreAttachment(
        directory=str(tmp_path),
        client_index=1,
        first_request_num=0,
        began_ns=0,
        core_pid=1,
        death_fd=0,
    )
    monkeypatch.setattr(FakeEngine, "attachment", attachment)
    app, _, _ = served()
    page = app.state.server.metrics_page
    labels = {"model_name": "tiny", "engine": "0"}

    def up() -> list[float]:
        return [one.value for one in page.snapshot() if one.name == ENGINE_UP.name]

    assert up() == [0]  # nobody says that it is up
    MetricsShare(str(tmp_path), 2, lambda: [Gauge(ENGINE_UP.name, labels, 1)]).write()
    assert up() == [1]


def test_the_dead_are_read_once_and_a_number_of_another_users_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = {1: PermissionError(), 2: ProcessLookupError(), 3: None}

    def kill(pid: int, number: int) -> None:
        assert number == 0
        if (error := owner[pid]) is not None:
            raise error

    monkeypatch.setattr(os, "kill", kill)
    labels = {"model_name": "tiny", "engine": "0"}
    for pid in owner:
        said = [Gauge(FRONTEND_MEMORY.name, labels, 10), Counter(FRONTEND_CPU.name, labels, 1)]
        (tmp_path / f"metrics.{pid:03}.{pid}").write_bytes(encode_snapshot(said))
    share = MetricsShare(str(tmp_path), 4, lambda: [Gauge(FRONTEND_MEMORY.name, labels, 5)])
    for _ in range(2):
        values = {one.name: one.value for one in share.snapshot()}
        assert values == {FRONTEND_MEMORY.name: 15, FRONTEND_CPU.name: 3}
        for pid in (1, 2):  # their files do not change any more
            (tmp_path / f"metrics.{pid:03}.{pid}").write_bytes(b"")
        owner[1] = owner[2] = None  # new processes with their numbers


def test_a_full_disk_lets_no_total_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = {1: 0.0, 2: 0.0}
    labels = {"model_name": "tiny", "engine": "0"}

    def own(index: int) -> Callable[[], list[Metric]]:
        return lambda: [Counter(FRONTEND_CPU.name, labels, seconds[index])]

    shares = {index: MetricsShare(str(tmp_path), index, own(index)) for index in seconds}
    # In one process both would have one file; the second stands for another process.
    shares[2]._path = shares[2]._path.with_name(f"metrics.002.{os.getppid()}")
    write_bytes, is_full = Path.write_bytes, False

    def write(path: Path, data: bytes) -> int:
        if is_full:
            write_bytes(path, data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", write)
    monkeypatch.setattr(logging.getLogger("isinglass"), "propagate", True)
    seen = [0.0]
    for number in range(12):
        is_full = 4 <= number < 10
        seconds[1 + number % 2] += 1
        asked = shares[1 + number // 2 % 2]
        (metric,) = asked.snapshot()
        seen.append(metric.value)
        assert seen[-1] >= seen[-2], "it fell"
    (metric,) = shares[1].snapshot()
    assert metric.value == 12, "what had not been written down is there once it can be"
    warnings = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == 2, "one for each frontend"
    assert "No space left" in warnings[0].getMessage()


def test_what_another_frontend_said_counts_while_its_file_cannot_be_read(tmp_path: Path) -> None:
    labels = {"model_name": "tiny", "engine": "0"}
    other = tmp_path / f"metrics.002.{os.getppid()}"
    other.write_bytes(encode_snapshot([Counter(FRONTEND_CPU.name, labels, 5)]))
    share = MetricsShare(str(tmp_path), 1, lambda: [Counter(FRONTEND_CPU.name, labels, 1)])
    assert [one.value for one in share.snapshot()] == [6]
    other.write_bytes(b"no metrics")
    assert [one.value for one in share.snapshot()] == [6]
    other.unlink()
    assert [one.value for one in share.snapshot()] == [6]


def test_without_statistics_there_is_an_explanation() -> None:
    app, _, _ = served(disable_log_stats=True)
    answer = asyncio.run(ask(app, "GET", "/metrics"))
    assert answer.status_code == 404
    assert "--disable-log-stats" in answer.json()["error"]["message"]


def test_snapshots_of_several_processes_can_take_the_place_of_one() -> None:
    async def run() -> None:
        app, _, _ = served()
        app.state.server.metrics_page.snapshot = lambda: [
            Gauge("isinglass_engine_up", {"engine": number}, 1) for number in "01"
        ]
        text = (await ask(app, "GET", "/metrics")).text
        assert text.count("isinglass_engine_up{") == 2

    asyncio.run(run())


def test_a_broken_snapshot_breaks_no_scrape() -> None:
    async def run() -> None:
        app, _, _ = served()

        def broken() -> list[Metric]:
            raise RuntimeError("no numbers today")

        app.state.server.metrics_page.snapshot = broken
        answer = await ask(app, "GET", "/metrics")
        assert answer.status_code == 200
        assert not answer.content

    asyncio.run(run())


def test_a_scrape_is_rendered_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    has_turned = threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        assert has_turned.wait(PATIENCE_S), "the loop is held up"
        return exposition(*arguments, **options)

    monkeypatch.setattr("instrumentation.metrics.prometheus.exposition", slow)

    async def run() -> None:
        app, _, _ = served()
        scrape = asyncio.create_task(ask(app, "GET", "/metrics"))
        ticks = 0
        while not scrape.done():
            await asyncio.sleep(0.01)
            ticks += 1
            if ticks == 10:
                has_turned.set()
        assert scrape.result().status_code == 200

    asyncio.run(run())


# -- requests --------------------------------------------------------------------------------------


def test_requests_are_listed_before_the_engine_has_started() -> None:
    async def run() -> None:
        app, _, _ = served()
        listed = (await ask(app, "GET", "/debug/requests")).json()
        assert listed["unfinished"] == listed["finished"] == []
        assert [one["path"] for one in listed["http"]] == ["/debug/requests"]
        answer = await ask(app, "GET", "/debug/requests/a%20b")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "request_not_found"

    asyncio.run(run())


def test_stacks_name_threads_and_tasks() -> None:
    text = asyncio.run(ask(served()[0], "GET", "/debug/stacks")).text
    assert "thread MainThread" in text
    assert Path(debug.__file__).name in text
    assert "task " in text
