"""A real server, watched: one trace from the client to the steps, metrics that add up, the routes
that look and steer; and what is left to see when its engine dies."""

import concurrent.futures
import contextlib
import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from engine.checkpoint.locate import embedded_model_path
from instrumentation.metrics.info import METRICS, AfterDeath, MetricKind
from instrumentation.metrics.vllm_names import SAME_VALUES
from tests.support.otlp_receiver import (
    OtlpReceiver,
    ReceivedSpan,
    attributes_of,
    http_receiver,
)
from tests.support.server_process import SMALL_FLAGS, ServerProcess, free_port
from tests.tiny_models import build_tiny_checkpoint
from tests.waiting import PATIENCE_S, wait_until

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PROMETHEUS = shutil.which("prometheus")
CLIENT = httpx.Client(timeout=PATIENCE_S)
"""One for all tests: making one takes longer than asking."""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module", autouse=True)
def closed_client() -> Iterator[None]:
    """Leave no connection open."""
    yield
    CLIENT.close()


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    """Where the server's spans and metrics go."""
    yield from http_receiver()


@pytest.fixture(scope="module")
def model_flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A tiny model that speaks the embedded one's tokens, and generates for seconds if asked to."""
    folder = build_tiny_checkpoint(
        tmp_path_factory.mktemp("long") / "llama",
        "llama",
        vocab_size=49152,
        max_position_embeddings=8192,
    )
    return (str(folder), f"--tokenizer={embedded_model_path()}", *SMALL_FLAGS)


@pytest.fixture(scope="module")
def server(
    model_flags: tuple[str, ...], receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server that exports every step, logs JSON, and has vLLM's names too."""
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(
        *model_flags,
        "--trace-steps=all",
        "--log-format=json",
        "--metrics-compat=vllm",
        f"--trace-dir={folder / 'runs'}",
        f"--flight-dir={folder / 'flight'}",
        "--profiler-max-steps=5",
        "--kv-cache-memory-bytes=268435456",
        "--served-model-name=tiny",
        env={
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        },
    ) as server:
        CLIENT.post(f"{server.url}/stop_trace")  # the one that --trace-dir has begun
        yield server


def complete(server: ServerProcess, *, headers: dict[str, str], **body: Any) -> httpx.Response:
    """One completion of a few tokens."""
    whole = {"model": "tiny", "prompt": [7, 8, 9], "max_tokens": 6, "ignore_eos": True} | body
    return CLIENT.post(
        f"{server.url}/v1/completions", json=whole, headers=headers, timeout=PATIENCE_S
    )


def scrape(server: ServerProcess, accept: str = "*/*") -> Samples:
    """Every sample but buckets, by name and labels."""
    response = CLIENT.get(f"{server.url}/metrics", headers={"Accept": accept})
    assert response.status_code == 200
    parse = parse_openmetrics if accept == OPENMETRICS else parse_text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(response.text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of a metric's series that have these labels."""
    wanted = frozenset(labels.items())
    found = [value for (one, have), value in samples.items() if one == name and wanted <= have]
    assert found, name
    return sum(found)


def http_spans(receiver: OtlpReceiver) -> list[ReceivedSpan]:
    return [one for one in receiver.spans() if "http.request.method" in one.attributes]


# -- one trace -------------------------------------------------------------------------------------


def test_one_trace_from_the_client_to_the_steps(
    server: ServerProcess, receiver: OtlpReceiver
) -> None:
    headers = {
        "traceparent": TRACEPARENT,
        "tracestate": "vendor=value,other=thing",
        "x-request-id": "traced",
        "user-agent": "a test",
    }
    assert complete(server, headers=headers).status_code == 200
    receiver.wait_for(lambda: any(one.trace_id.hex() == TRACE_ID for one in http_spans(receiver)))
    receiver.wait_for(lambda: any(one.trace_id.hex() == TRACE_ID for one in receiver.requests()))
    (http,) = [one for one in http_spans(receiver) if one.trace_id.hex() == TRACE_ID]
    (request,) = [one for one in receiver.requests() if one.trace_id.hex() == TRACE_ID]
    assert http.parent_id.hex() == PARENT_ID
    assert request.parent_id == http.span_id
    assert http.proto.trace_state == request.proto.trace_state == "vendor=value,other=thing"
    assert http.name == "POST /v1/completions"
    assert http.proto.kind == http.proto.SPAN_KIND_SERVER
    assert http.proto.status.code == 0
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "client.address": "127.0.0.1",
        "server.address": "127.0.0.1",
        "server.port": server.port,
        "network.protocol.version": "1.1",
        "user_agent.original": "a test",
        "isinglass.request_id": "traced",
    }
    assert {name: http.attributes.get(name) for name in expected} == expected
    assert "error.type" not in http.attributes
    assert http.begin_ns <= request.begin_ns <= request.end_ns <= http.end_ns
    stages = receiver.children_of(request)
    assert [one.name for one in stages] == ["queue", "prefill", "decode", "deliver"]
    # Steps are traces of their own, linked to the requests that they served.
    receiver.wait_for(
        lambda: (
            sum(
                request.span_id in {link.span_id for link in one.proto.links}
                for one in receiver.steps()
            )
            == 6
        )
    )


def test_errors_and_clients_that_leave_have_spans_too(
    server: ServerProcess, receiver: OtlpReceiver
) -> None:
    assert complete(server, headers={"x-request-id": "bad"}, max_tokens=-1).status_code == 400
    assert CLIENT.get(f"{server.url}/nowhere").status_code == 404
    body = {"model": "tiny", "prompt": [5], "max_tokens": 6000, "ignore_eos": True, "stream": True}
    with CLIENT.stream(
        "POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S
    ) as response:
        next(response.iter_bytes())
        left = response.headers["x-request-id"]
    seen: dict[Any, ReceivedSpan] = {}

    def all_there() -> bool:
        for one in http_spans(receiver):
            seen[one.attributes["isinglass.request_id"]] = one
            seen[one.attributes["url.path"]] = one
        return {"bad", "/nowhere", left} <= set(seen)

    receiver.wait_for(all_there)
    bad, nowhere, gone = seen["bad"], seen["/nowhere"], seen[left]
    assert bad.attributes["http.response.status_code"] == 400
    assert bad.attributes["error.type"] == "400"
    assert nowhere.name == "GET"
    assert "http.route" not in nowhere.attributes
    assert gone.attributes["http.response.status_code"] == 499
    assert gone.attributes["error.type"] == "disconnected"
    assert {bad.proto.status.code, nowhere.proto.status.code, gone.proto.status.code} == {0}
    story = CLIENT.get(f"{server.url}/debug/requests/{left}").json()
    assert story["http"][0]["outcome"] == "disconnected"
    assert [one["finish_reason"] for one in story["sequences"]] == ["abort"]


def test_chats_and_completions_have_their_own_operation(
    server: ServerProcess, receiver: OtlpReceiver
) -> None:
    def ended(operation: str) -> int:
        metric = receiver.last_metrics().get("gen_ai.server.request.duration")
        points = () if metric is None else metric.histogram.data_points
        named = {attributes_of(one)["gen_ai.operation.name"]: one.count for one in points}
        return named.get(operation, 0)

    before = ended("chat"), ended("text_completion")
    messages = [{"role": "user", "content": "Hello"}]
    for _ in range(2):
        answer = CLIENT.post(
            f"{server.url}/v1/chat/completions",
            json={"messages": messages, "max_tokens": 4},
            headers={"x-request-id": "a-chat"},
            timeout=PATIENCE_S,
        )
        assert answer.status_code == 200
    assert complete(server, headers={}).status_code == 200
    receiver.wait_for(lambda: ended("chat") == before[0] + 2)
    receiver.wait_for(lambda: ended("text_completion") >= before[1] + 1)
    receiver.wait_for(lambda: any(one.name.startswith("chat ") for one in receiver.requests()))
    assert "isinglass_http_requests_total" in receiver.last_metrics()


# -- metrics ---------------------------------------------------------------------------------------


def test_every_arrival_has_one_outcome(server: ServerProcess) -> None:
    def one(number: int) -> int:
        if number % 4 == 0:
            return complete(server, headers={}, max_tokens=-1).status_code
        if number % 4 == 1:
            return CLIENT.get(f"{server.url}/v1/models").status_code
        if number % 4 == 2:
            body = {"prompt": [5], "max_tokens": 6000, "ignore_eos": True, "stream": True}
            with CLIENT.stream(
                "POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S
            ) as response:
                next(response.iter_bytes())
            return 499
        return complete(server, headers={}).status_code

    before = scrape(server)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(one, range(40)))
    assert statuses == [400, 200, 499, 200] * 10
    # The scrape itself is one.
    wait_until(lambda: total(scrape(server), "isinglass_http_requests_in_flight") == 1)
    samples = scrape(server)
    arrived = total(samples, "isinglass_http_requests_arrived_total")
    assert arrived == total(samples, "isinglass_http_requests_total") + 1
    assert arrived == total(samples, "isinglass_http_request_outcomes_total") + 1

    def gained(name: str, **labels: str) -> float:
        return total(samples, name, **labels) - total(before, name, **labels)

    assert gained("isinglass_http_request_outcomes_total", outcome="disconnected") == 10
    assert gained("isinglass_http_request_outcomes_total", outcome="client_error") == 10
    assert total(samples, "isinglass_http_requests_total", status="499") >= 10
    # And so it is with the engine's own.
    assert total(samples, "isinglass_requests_arrived_total") == sum(
        total(samples, f"isinglass_requests_{one}")
        for one in ("finished_total", "rejected_total", "in_flight")
    )


def test_what_never_became_a_request_is_counted_and_logged(server: ServerProcess) -> None:
    before = scrape(server)
    for request, status in (
        (b"HELO there\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\npadding: " + b"x" * (80 << 10), b"431"),
    ):
        with (
            contextlib.suppress(ConnectionError),  # 431: the rest of it is not read
            socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection,
        ):
            connection.sendall(request)
            assert connection.recv(65536).startswith(b"HTTP/1.1 " + status)
    samples = scrape(server)

    def gained(name: str, **labels: str) -> float:
        return total(samples, name, **labels) - total(before, name, **labels)

    assert gained("isinglass_http_request_outcomes_total", outcome="client_error") == 1
    assert gained("isinglass_http_requests_refused_total", reason="headers_too_large") == 1
    assert gained("isinglass_http_requests_arrived_total") == 3  # and a scrape
    assert gained("isinglass_http_requests_total") == 3
    assert '"refusal": "headers_too_large"' in server.log()


def test_a_scrape_has_the_whole_catalogue_in_every_form(server: ServerProcess) -> None:
    for accept in ("*/*", OPENMETRICS):
        names = {name for name, _ in scrape(server, accept)}
        is_open = {name for name, info in METRICS.items() if () in info.labels.values()}
        missing = {
            name
            for name in METRICS
            if name not in names and f"{name}_count" not in names and name not in is_open
        }
        assert not missing
        assert all(name in names or f"{name}_count" in names for name in SAME_VALUES)
    samples = scrape(server)
    assert total(samples, "isinglass_engine_up") == 1
    assert total(samples, "isinglass_frontend_cpu_seconds_total") > 0.1
    assert total(samples, "isinglass_frontend_event_loop_lag_seconds_count") > 3
    text = CLIENT.get(f"{server.url}/metrics", headers={"Accept": OPENMETRICS}).text
    assert " # {" in text, "durations of traced requests carry exemplars"
    response = CLIENT.head(f"{server.url}/metrics")
    assert response.status_code == 200
    assert not response.content
    with CLIENT.stream(
        "GET", f"{server.url}/metrics", headers={"Accept-Encoding": "gzip"}
    ) as response:
        raw = b"".join(response.iter_raw())
    assert b"isinglass_engine_up" in gzip.decompress(raw)
    assert CLIENT.post(f"{server.url}/metrics").status_code == 405


def test_a_real_prometheus_takes_it_in(server: ServerProcess, tmp_path: Path) -> None:
    if PROMETHEUS is None:
        pytest.skip("no prometheus on this machine (scripts/install_services.sh)")
    configuration = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "scrape_configs": [
            {
                "job_name": "isinglass",
                "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}],
            },
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(configuration))  # JSON is YAML
    port = free_port()
    with subprocess.Popen(
        [
            PROMETHEUS,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_until(lambda: statuses_at(port) >= {"200", "400"}, "nothing is scraped")
        finally:
            process.terminate()


def statuses_at(port: int) -> set[str]:
    """The statuses of completions that a Prometheus knows of."""
    try:
        answer = CLIENT.get(
            f"http://127.0.0.1:{port}/api/v1/query",
            params={"query": 'isinglass_http_requests_total{route="/v1/completions"}'},
        )
    except httpx.TransportError:
        return set()  # not listening yet
    if answer.status_code == 503:
        return set()  # listening, and not ready yet
    return {one["metric"]["status"] for one in answer.json()["data"]["result"]}


# -- looking ---------------------------------------------------------------------------------------


def test_a_request_is_found_by_its_id_alone(server: ServerProcess) -> None:
    for name, body in (
        ("one", {}),
        ("samples", {"n": 3, "temperature": 1.0}),
        ("batch", {"prompt": [[5, 6], [7, 8]]}),
        ("both", {"prompt": [[5, 6], [7, 8]], "n": 2, "temperature": 1.0}),
        ("named", {"request_id": "by-the-body"}),
    ):
        answer = complete(server, headers={"x-request-id": name}, **body)
        assert answer.headers["x-request-id"] == name
        story = CLIENT.get(f"{server.url}/debug/requests/{name}").json()
        num_choices = len(answer.json()["choices"])
        assert len(story["sequences"]) == num_choices, name
        assert [one["status"] for one in story["http"]] == [200]
        for sequence in story["sequences"]:
            assert sequence["num_output_tokens"] == 6
            seconds = sequence["seconds"]
            parts = [seconds[one] for one in ("queue", "prefill", "decode", "preempted")]
            assert sum(parts) == pytest.approx(seconds["end_to_end"], abs=1e-6)
            assert sequence["steps"]
        # The answer's own id finds the same.
        again = CLIENT.get(f"{server.url}/debug/requests/{answer.json()['id']}").json()
        assert len(again["sequences"]) == num_choices, name
    text = CLIENT.get(f"{server.url}/debug/requests/one", headers={"Accept": "text/plain"})
    assert text.headers["content-type"].startswith("text/plain")
    assert "POST /v1/completions (X-Request-Id one): completed, status 200" in text.text
    assert "end to end" in text.text
    unknown = CLIENT.get(f"{server.url}/debug/requests/nobody")
    assert unknown.status_code == 404
    assert "the last ones were" in unknown.json()["error"]["message"]


def test_running_requests_are_listed(server: ServerProcess) -> None:
    body = {"prompt": [5], "max_tokens": 6000, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": "running"}
    with CLIENT.stream(
        "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S
    ) as response:
        events = response.iter_bytes()  # httpx hangs up with the end of this iterator
        next(events)
        listed = CLIENT.get(f"{server.url}/debug/requests", params={"limit": 5}).json()
        assert any("running" in one["id"] for one in listed["unfinished"])
        assert len(listed["finished"]) <= 5
        (exchange,) = [one for one in listed["http"] if one["request_id"] == "running"]
        assert exchange["state"] == "under way"
        assert CLIENT.post(f"{server.url}/reset_prefix_cache").status_code == 409
    for wrong in (0, 5000, "x"):
        answer = CLIENT.get(f"{server.url}/debug/requests", params={"limit": wrong})
        assert answer.status_code == 400


def test_lines_of_a_request_carry_its_ids(server: ServerProcess) -> None:
    headers = {"x-request-id": "logged", "traceparent": TRACEPARENT}
    assert complete(server, headers=headers).status_code == 200

    def records() -> list[dict[str, Any]]:
        return [json.loads(one) for one in server.log().splitlines() if one.startswith("{")]

    wait_until(lambda: any(one.get("request_id") == "logged" for one in records()))
    (line,) = [one for one in records() if one.get("request_id") == "logged"]
    assert line["logger"] == "isinglass.access"
    assert line["trace_id"] == TRACE_ID
    assert (line["prompt_tokens"], line["output_tokens"]) == (3, 6)
    assert not [one for one in records() if one.get("path") in ("/health", "/metrics")]


def test_flight_records_come_out(server: ServerProcess) -> None:
    complete(server, headers={})
    summary = CLIENT.post(f"{server.url}/debug/flight").json()
    path = Path(summary["path"])
    assert path.stat().st_size == summary["num_bytes"]
    assert 0 < len(summary["last_steps"]) <= 32
    assert summary["last_steps"][-1]["label"].startswith("execute_context_")
    whole = CLIENT.get(f"{server.url}/debug/flight", params={"download": 1})
    assert whole.content.startswith(b"isinglass journal")
    assert ".journal" in whole.headers["content-disposition"]
    stacks = CLIENT.get(f"{server.url}/debug/stacks").text
    assert "task output handler" in stacks
    assert "thread MainThread" in stacks


# -- steering --------------------------------------------------------------------------------------


def test_profiles_and_recordings(server: ServerProcess) -> None:
    post = lambda path, **body: CLIENT.post(server.url + path, **body)  # noqa: E731
    for wrong in ({"max_steps": 0}, {"max_steps": "2"}, {"folder": "/tmp"}, {"max_bytes": -1}):
        answer = post("/start_profile", json=wrong)
        assert answer.status_code == 400, wrong
        assert next(iter(wrong)) in answer.json()["error"]["param"]
    run_dir = post("/start_trace").json()["run_dir"]
    assert post("/start_trace").status_code == 409
    (profile,) = post("/start_profile", json={"max_steps": 3}).json()["profiles"]
    assert profile["state"] == "running"
    assert post("/start_profile").status_code == 409
    complete(server, headers={})

    def status() -> dict[str, Any]:
        (profile,) = CLIENT.get(f"{server.url}/profile_status").json()["profiles"]
        return dict(profile)

    wait_until(lambda: status()["state"] == "done", "the profile is not done")
    profile = status()
    assert profile["num_steps"] == 3
    assert Path(profile["file"]).parent == Path(run_dir)
    assert post("/stop_profile").status_code == 409
    assert post("/stop_trace").json()["run_dir"] == run_dir
    assert post("/stop_trace").status_code == 409
    assert {one.name.split(".")[0] for one in Path(run_dir).glob("*.journal")} >= {"caller"}
    assert post("/reset_prefix_cache").json() == {"reset": True}


def test_settings_in_force_are_shown(server: ServerProcess) -> None:
    info = CLIENT.get(f"{server.url}/server_info").json()
    assert info["phase"] == "ready"
    assert info["models"] == ["tiny"]
    assert info["settings"]["scheduler"]["max_num_batched_tokens"] == 256
    assert info["settings"]["server"]["port"] == server.port
    assert info["ready"]["num_gpu_blocks"] > 0
    states = {one["option"]: one["state"] for one in info["observability"]}
    assert states["metrics_compat"] == "on"


# -- the end ---------------------------------------------------------------------------------------


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process that does not get on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_metrics_are_there_before_the_engine_and_after_it(model_flags: tuple[str, ...]) -> None:
    flags = (*model_flags, "--keep-alive-on-engine-death", "--metrics-compat", "vllm")
    with ServerProcess(*flags, wait=False) as server:
        wait_until(server.health)
        early = scrape(server)
        assert total(early, "isinglass_engine_up") == 0
        assert total(early, "isinglass_http_requests_arrived_total") >= 2
        assert not [name for name, _ in early if name.startswith("vllm:")]
        server.wait_healthy()
        assert complete(server, headers={}, model=None).status_code == 200
        with frozen(core_of(server)):  # what hangs must not take the views along
            assert total(scrape(server), "isinglass_engine_up") == 1
            assert CLIENT.get(f"{server.url}/debug/stacks").status_code == 200
        os.kill(core_of(server), signal.SIGKILL)
        wait_until(lambda: server.health() != 200)
        late = scrape(server)
        assert total(late, "isinglass_engine_up") == 0
        assert total(late, "isinglass_generation_tokens_total") == 6
        for name in ("vllm:generation_tokens_total", "isinglass_sampled_tokens_total"):
            assert total(late, name) == 6
        for name, info in METRICS.items():  # see `after_death`
            if info.kind is MetricKind.GAUGE and info.after_death is AfterDeath.RESET:
                num_free = total(late, name, state="free") if name == "isinglass_kv_blocks" else 0
                assert total(late, name) == num_free
        assert total(late, "isinglass_kv_blocks", state="free") > 0
        assert total(late, "isinglass_memory_bytes") > 0
        assert total(late, "isinglass_telemetry_errors_total") == 0
        assert "Traceback" not in server.log()
        refused = complete(server, headers={"x-request-id": "late"}, model=None)
        assert refused.status_code == 503
        samples = scrape(server)
        assert total(samples, "isinglass_http_requests_refused_total", reason="dead") == 1
        listed = CLIENT.get(f"{server.url}/debug/requests").json()
        assert len(listed["finished"]) == 1
        assert CLIENT.post(f"{server.url}/debug/flight").status_code == 503
        server.stop()


def core_of(server: ServerProcess) -> int:
    """The engine core's process."""
    found = [
        pid
        for pid in server.children()
        if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(found) == 1, found
    return found[0]
