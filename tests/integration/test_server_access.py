"""Who gets in and how: keys, TLS, Unix sockets, addresses, and how many may wait. Real servers."""

import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import ROOT, SMALL_FLAGS, ServerProcess
from tests.waiting import PATIENCE_S, wait_until

SERVE = (sys.executable, "-m", "engine.cli.main", "serve")
COMPLETION = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True, "temperature": 0}


def wait_until_ready(server: ServerProcess) -> str:
    """The ready line, for servers that cannot be asked in plain HTTP over TCP."""
    pattern = re.compile(r"^.* ready: .*$", re.MULTILINE)
    wait_until(
        lambda: pattern.search(server.log()) or server.process.poll() is not None, "not ready"
    )
    found = pattern.search(server.log())
    assert found is not None, server.log()
    return found[0]


# -- TLS, keys from the environment, any free port -------------------------------------------------


def make_certificate(folder: Path, name: str, *, signed_by: str | None = None) -> None:
    """A key and a certificate for localhost; by another one of the folder, or by itself."""
    openssl = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command = [*openssl, "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    if signed_by is not None:
        command += ["-CA", f"{signed_by}.pem", "-CAkey", f"{signed_by}.key"]
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "authority", "stranger"):
        make_certificate(folder, name)
    make_certificate(folder, "client", signed_by="authority")
    return folder


@pytest.fixture(scope="module")
def tls_server(text_llama: Path, certificates: Path) -> Iterator[ServerProcess]:
    flags = ["--port", "0", "--served-model-name", "small", "tiny"]
    flags += ["--ssl-certfile", str(certificates / "server.pem")]
    flags += ["--ssl-keyfile", str(certificates / "server.key")]
    flags += ["--ssl-ca-certs", str(certificates / "authority.pem")]
    keys = {"ISINGLASS_API_KEY": "key-one,key-two"}
    server = ServerProcess(
        str(text_llama), *SMALL_FLAGS, *flags, env=keys, wait=False, scheme="https"
    )
    with server:
        line = wait_until_ready(server)
        found = re.search(r"address https://127\.0\.0\.1:(\d+),", line)
        assert found is not None, line
        assert "key-" not in server.log()
        server.port = int(found[1])
        yield server
        assert server.stop() == 0


def client_of(certificates: Path, name: str | None = "client", **options: Any) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(certificates / "server.pem"))
    if name is not None:
        context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    return httpx.Client(verify=context, timeout=PATIENCE_S, **options)


def test_tls_keys_and_names(tls_server: ServerProcess, certificates: Path) -> None:
    with client_of(certificates) as client:
        assert client.get(f"{tls_server.url}/health").json() == {"status": "ready"}
        url = f"{tls_server.url}/v1/completions"
        refused = client.post(url, json=COMPLETION)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        for key, name in (("key-one", "small"), ("key-two", "tiny")):
            headers = {"Authorization": f"Bearer {key}"}
            answer = client.post(url, json=COMPLETION | {"model": name}, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
        other = client.post(url, json=COMPLETION | {"model": "gpt-4"}, headers=headers)
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("name", [None, "stranger"])
def test_clients_without_the_right_certificate_stay_outside(
    name: str | None, tls_server: ServerProcess, certificates: Path
) -> None:
    with client_of(certificates, name) as client, pytest.raises(httpx.TransportError):
        client.get(f"{tls_server.url}/health")


def test_no_key_is_ever_shown(tls_server: ServerProcess, certificates: Path) -> None:
    headers = {"Authorization": "Bearer key-one"}
    with client_of(certificates, headers=headers, base_url=tls_server.url) as client:
        for path in ("/server_info", "/metrics", "/debug/requests", "/openapi.json", "/v1/models"):
            assert "key-" not in client.get(path).text
        client.get("/v1/models", headers={"Authorization": "Bearer wrong-key-value"})
    assert "key-one" not in tls_server.log()
    assert "wrong-key-value" not in tls_server.log()


def test_plain_http_at_a_tls_port_disturbs_nobody(
    tls_server: ServerProcess, certificates: Path
) -> None:
    with socket.create_connection(("127.0.0.1", tls_server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"ready" not in connection.recv(4096)
    with client_of(certificates) as client:
        assert client.get(f"{tls_server.url}/health").status_code == 200


# -- a Unix socket, and a queue with a limit -------------------------------------------------------

MAX_WAITING, MAX_WAITING_TOKENS = 4, 600
MAX_STEP_TOKENS = int(SMALL_FLAGS[SMALL_FLAGS.index("--max-num-batched-tokens") + 1])


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uds") / "server.sock"


@pytest.fixture(scope="module")
def uds_server(text_llama: Path, socket_path: Path) -> Iterator[ServerProcess]:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_path))  # and nobody listens there any more
    limits = ["--max-num-queued-reqs", str(MAX_WAITING), "--max-num-seqs", "1"]
    limits += ["--max-num-queued-tokens", str(MAX_WAITING_TOKENS), "--shutdown-timeout", "1"]
    server = ServerProcess(
        str(text_llama), *SMALL_FLAGS, *limits, "--uds", str(socket_path), wait=False
    )
    with server:
        line = wait_until_ready(server)
        assert f"address unix:{socket_path}," in line
        yield server
        assert server.stop() == 0
    assert not socket_path.exists()


@pytest.fixture
def uds_client(uds_server: ServerProcess, socket_path: Path) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(uds=str(socket_path))
    with httpx.Client(transport=transport, base_url="http://server", timeout=PATIENCE_S) as client:
        yield client


def test_the_socket_file_is_its_owners_alone(uds_client: httpx.Client, socket_path: Path) -> None:
    assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
    assert uds_client.get("/health").status_code == 200
    assert uds_client.post("/v1/completions", json=COMPLETION).status_code == 200


def test_a_second_server_does_not_take_the_file(
    uds_client: httpx.Client, socket_path: Path
) -> None:
    done = subprocess.run(
        [*SERVE, "--uds", str(socket_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "another server listens there" in done.stderr
    assert uds_client.get("/health").status_code == 200


def test_what_waits_is_bounded(uds_server: ServerProcess, socket_path: Path) -> None:
    """One request runs at a time; of many that come at once, four wait, and the others are told."""
    rejected_before = metric(socket_path, "requests_rejected_total", 'error="QueueFullError"')
    num_clients = 20
    body = COMPLETION | {"max_tokens": 200}

    def send(number: int) -> httpx.Response:
        return client.post("/v1/completions", json=body)

    limits = httpx.Limits(max_connections=num_clients)
    transport = httpx.HTTPTransport(uds=str(socket_path), limits=limits)
    with (
        httpx.Client(transport=transport, base_url="http://server", timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(num_clients) as threads,
    ):
        answers = list(threads.map(send, range(num_clients)))
        assert send(0).status_code == 200, "whoever comes now finds an empty queue"
    served = [one for one in answers if one.status_code == 200]
    refused = [one for one in answers if one.status_code == 429]
    assert len(served) + len(refused) == num_clients
    assert len(served) >= 1 + MAX_WAITING
    assert len(refused) >= 3
    for one in refused:
        error = one.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert re.search(r"4 requests wait.* 4 may \(--max-num-queued-reqs\)", error["message"])
        assert 1 <= int(one.headers["retry-after"]) <= 60
    rejected = metric(socket_path, "requests_rejected_total", 'error="QueueFullError"')
    assert rejected - rejected_before == len(refused)


def test_a_batch_is_let_in_whole_or_not_at_all(uds_client: httpx.Client, socket_path: Path) -> None:
    arrived = metric(socket_path, "requests_arrived_total")
    whole = uds_client.post("/v1/completions", json=COMPLETION | {"prompt": ["a"] * MAX_WAITING})
    assert (whole.status_code, len(whole.json()["choices"])) == (200, MAX_WAITING)
    too_many = [
        {"prompt": ["a"] * (MAX_WAITING + 2)},  # one may run at once
        {"prompt": ["a", "b"], "n": 3, "temperature": 1},
        {"prompt": "x" * (MAX_WAITING_TOKENS + MAX_STEP_TOKENS + 1)},
        {"prompt": ["x" * 300] * 4},
    ]
    for fields in too_many:
        answer = uds_client.post("/v1/completions", json=COMPLETION | fields)
        assert (answer.status_code, "alone has" in answer.text) == (400, True), answer.text
    # Each refusal counts as one arrival, and none of its prompts has been sent.
    now = metric(socket_path, "requests_arrived_total")
    assert now - arrived == MAX_WAITING + len(too_many)


def test_clients_that_leave_make_room(uds_server: ServerProcess, socket_path: Path) -> None:
    """Requests that are given up while they wait are counted no more."""
    sockets = []
    for _ in range(1 + MAX_WAITING):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(socket_path))
        body = b'{"prompt": "Hi", "max_tokens": 20000, "ignore_eos": true}'
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        sockets.append(connection)
        wait_until(lambda: metric(socket_path, "requests_in_flight") == len(sockets))
        wait_until(lambda: metric(socket_path, "requests_running") == 1)
    transport = httpx.HTTPTransport(uds=str(socket_path))
    with httpx.Client(transport=transport, base_url="http://server", timeout=PATIENCE_S) as client:
        assert client.post("/v1/completions", json=COMPLETION).status_code == 429
        for connection in sockets:
            connection.close()
        wait_until(
            lambda: client.post("/v1/completions", json=COMPLETION).status_code == 200,
            "requests whose clients have left still wait",
        )


def metric(socket_path: Path, name: str, label: str = "") -> float:
    transport = httpx.HTTPTransport(uds=str(socket_path))
    with httpx.Client(transport=transport, base_url="http://server", timeout=PATIENCE_S) as client:
        text = client.get("/metrics").text
    values = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if re.match(rf"isinglass_{name}[{{ ]", line) and label in line
    ]
    assert values or label, text[:2000]
    return sum(values)


# -- addresses and the config file -----------------------------------------------------------------


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_a_config_file_an_address_of_ipv6_and_cors(text_llama: Path, tmp_path: Path) -> None:
    host, shown = ("::1", r"\[::1\]") if has_ipv6() else ("localhost", r"127\.0\.0\.1")
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"model: {text_llama}\nhost: '{host}'\nport: 1\nserved-model-name: from-file\n"
        "api_key: [file-key, other-key]\nallowed-origins: ['https://app.example']\n"
        f"kv_cache_memory_bytes: {32 << 20}\nmax-num-batched-tokens: 256\nenable-docs: false\n"
        "log-format: json\n"
    )
    # The flag wins over the file's port.
    with ServerProcess("--config", str(file), "--port", "0", wait=False) as server:
        line = wait_until_ready_json(server)
        found = re.search(rf"address (http://{shown}:\d+),", line)
        assert found is not None, line
        with httpx.Client(base_url=found[1], timeout=PATIENCE_S) as client:
            assert client.get("/v1/models").status_code == 401
            headers = {"Authorization": "Bearer other-key", "Origin": "https://app.example"}
            models = client.get("/v1/models", headers=headers)
            assert models.json()["data"][0]["id"] == "from-file"
            assert models.headers["access-control-allow-origin"] == "https://app.example"
            assert client.get("/openapi.json").status_code == 404
        assert server.stop() == 0


def wait_until_ready_json(server: ServerProcess) -> str:
    pattern = re.compile(r'^\{.*"message": "(ready: [^"]*)".*\}$', re.MULTILINE)
    wait_until(
        lambda: pattern.search(server.log()) or server.process.poll() is not None, "not ready"
    )
    found = pattern.search(server.log())
    assert found is not None, server.log()
    return found[1]


def test_the_table_of_a_terminal_says_what_was_decided(text_llama: Path) -> None:
    """In a pseudo-terminal, and ended by its Ctrl-C, which goes to the core as well."""
    leader, follower = os.openpty()
    process = subprocess.Popen(
        [*SERVE, str(text_llama), *SMALL_FLAGS, "--port", "0"],
        cwd=ROOT,
        stdin=follower,
        stdout=follower,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    os.close(follower)
    shown = bytearray()

    def read() -> None:
        try:
            while data := os.read(leader, 4096):
                shown.extend(data)
        except OSError:
            return  # the other end has been closed

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        wait_until(lambda: b"start-up" in shown, "no table")
        rows = dict(
            line.strip().split("  ", 1)
            for line in shown.decode().splitlines()
            if "  " in line.strip()
        )
        assert {"address", "dtype", "device", "context", "KV cache", "metrics"} <= set(rows)
        assert rows["context"].strip() == "32,768 tokens"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        reader.join(PATIENCE_S)
        os.close(leader)
