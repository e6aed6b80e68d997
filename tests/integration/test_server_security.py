"""What a hostile client, or a careless one of ours, must not be able to do to the server.

Some of it is read off the source: no code that could run what it reads. The rest is asked of a real
server, which has to be in good health after every attempt.
"""

import ast
import json
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import ROOT, SMALL_FLAGS, ServerProcess
from tests.waiting import PATIENCE_S, SOON_S, wait_until

# -- the source ------------------------------------------------------------------------------------

SOURCES = sorted(
    path
    for folder in ("engine", "instrumentation", "traces")
    for path in (ROOT / folder).rglob("*.py")
)
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"} | {
    "joblib",
    "multiprocessing",
    "xmlrpc",
}
"""They run what they read, or send what the other side will."""
UNSAFE_CALLS = {"eval", "send_pyobj", "recv_pyobj", "unsafe_load", "full_load", "load_all"}


def calls_of(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name is not None:
                yield name, node


def complaints_of(path: Path, source: str) -> list[str]:
    """What the audit has against a file."""
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        found += [f"imports {one}" for one in modules if one.split(".")[0] in UNSAFE_MODULES]
    for name, call in calls_of(tree):
        keywords = {one.arg: ast.unparse(one.value) for one in call.keywords}
        text = ast.unparse(call.func)
        is_unsafe = (
            (name in UNSAFE_CALLS and text != "model.eval" and not text.endswith(".eval"))
            or (text == "torch.load" and keywords.get("weights_only") != "True")
            or keywords.get("allow_pickle", "False") != "False"
            or (text == "yaml.load")
            or keywords.get("shell", "False") != "False"
            or text in ("os.system", "os.popen", "tempfile.mktemp")
        )
        if is_unsafe:
            found.append(f"calls {ast.unparse(call)[:60]}")
    return [f"{path.name}:{one}" for one in found]


def test_nothing_unpickles_or_evaluates() -> None:
    assert len(SOURCES) > 150
    wrong = [one for path in SOURCES for one in complaints_of(path, path.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "import os, marshal", "eval(text)"),
        *("socket.recv_pyobj()", "np.load(path, allow_pickle=True)", "torch.load(path)"),
        *("def f():\n    import cloudpickle", "subprocess.run(x, shell=True)", "yaml.load(text)"),
    ],
)
def test_the_audit_sees_what_it_looks_for(source: str) -> None:
    assert complaints_of(Path("x.py"), source)


def test_files_that_clients_name_do_not_exist_in_the_interface() -> None:
    """No field or parameter of a request is the name of a file or folder."""
    from engine import AsyncLLM
    from engine.server.app import make_app
    from engine.server.config import ServerConfig
    from engine.server.state import ServerState

    schema = make_app(ServerState(AsyncLLM(), ServerConfig())).openapi()
    names = set(re.findall(r'"name": "(\w+)"', json.dumps(schema)))
    for one in schema["components"]["schemas"].values():
        if "Response" not in one.get("title", ""):
            names |= set(one.get("properties", {}))
    assert {"prompt", "messages", "max_tokens"} <= names
    pathlike = {name for name in names if re.search(r"path|dir|file|folder|url|uri", name)}
    assert not pathlike


def test_no_page_has_an_outside_address() -> None:
    """Whatever a browser can open here comes from here alone, and says so to the browser."""
    from fastapi.testclient import TestClient

    from engine import AsyncLLM
    from engine.server.app import make_app
    from engine.server.config import ServerConfig
    from engine.server.http.middleware import PAGES
    from engine.server.live.files import PUBLIC_PATHS
    from engine.server.state import ServerState

    client = TestClient(make_app(ServerState(AsyncLLM(), ServerConfig())))
    answers = {path: client.get(path) for path in sorted(PAGES | PUBLIC_PATHS | {"/redoc"})}
    shown = {path: one for path, one in answers.items() if one.status_code == 200}
    assert {"/", "/openapi.json", "/live/live.js"} <= shown.keys()
    for path, answer in shown.items():
        names = answer.text.replace("http://www.w3.org/2000/svg", "")  # a name, asked by nobody
        assert not re.search(r"(?:https?|wss?)://|[\"'(]//", names), path
        if "html" in answer.headers["content-type"]:
            assert "default-src 'self'" in answer.headers["content-security-policy"]


# -- a server --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(text_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that lets clients bring templates, and takes small bodies only."""
    folder = tmp_path_factory.mktemp("server")
    template = folder / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    flags = ["--trust-request-chat-template", "--max-body-bytes", str(1 << 20)]
    flags += ["--trace-dir", str(folder / "runs"), "--chat-template", str(template)]
    flags += ["--timeout-read-s", "2", "--max-header-bytes", "16384", "--shutdown-timeout", "1"]
    flags += ["--structured-outputs-timeout-s", "2"]
    with ServerProcess(str(text_llama), *SMALL_FLAGS, *flags) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as one:
        yield one
        assert one.get("/health").status_code == 200
    assert "Traceback" not in server.log()


def chat(client: httpx.Client, content: Any = "Hi", **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}
    return client.post("/v1/chat/completions", json=body)


def test_sockets_between_processes_are_the_owners_alone(
    server: ServerProcess, private_temporary_folder: Path
) -> None:
    folders = [
        path
        for path in private_temporary_folder.glob("isinglass-*")
        if not path.name.startswith("isinglass-flight")
    ]
    assert folders
    for folder in folders:
        status = folder.stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, os.getuid())
    assert any(stat.S_ISSOCK(one.stat().st_mode) for folder in folders for one in folder.iterdir())


def test_the_only_port_is_that_of_http(server: ServerProcess) -> None:
    """Core and server reach each other through files alone."""
    inodes = set()
    for pid in (server.process.pid, *server.children()):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            inodes |= {found[1]} if found else set()
    listening = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] in ("0A", "07"):
                listening.add(int(fields[1].rpartition(":")[2], 16))
    assert listening == {server.port}


@pytest.mark.parametrize(
    "path",
    [
        "/live/../../../../etc/passwd",
        "/live/%2e%2e/%2e%2e/config.py",
        "/live/..%2fconfig.py",
        "/..%2f..%2fetc%2fpasswd",
        "//etc/passwd",
        "/debug/requests/..%2f..%2fetc%2fpasswd",
        "/debug/flight/..%2f..%2fetc%2fpasswd",
        "/docs/%00",
    ],
)
def test_no_path_leads_to_a_file(path: str, client: httpx.Client) -> None:
    answer = client.build_request("GET", "/x")
    answer.url = httpx.URL(f"{client.base_url}".rstrip("/") + "/x").copy_with(
        raw_path=path.encode()
    )
    got = client.send(answer)
    assert got.status_code in (400, 404), got.text
    assert "root:" not in got.text
    assert "ServerConfig" not in got.text


def test_recordings_go_where_the_operator_said(
    server: ServerProcess, client: httpx.Client, tmp_path: Path
) -> None:
    evil = tmp_path / "evil"
    client.post("/stop_trace")
    wish = {"trace_dir": str(evil), "profiler_dir": str(evil), "path": str(evil)}
    started = client.post("/start_trace", json=wish, params=wish)
    assert started.status_code == 200
    (folder,) = {Path(started.json()["run_dir"]).parent}
    assert folder.name == "runs"
    assert evil not in folder.parents
    assert client.post("/stop_trace").status_code == 200
    refused = client.post("/start_profile", json=wish)
    assert (refused.status_code, "trace_dir" in refused.text) == (400, True)
    ids = {"X-Request-Id": f"../../..{evil}"}
    assert client.post("/v1/completions", json={"prompt": "a"}, headers=ids).status_code == 200
    assert client.post("/debug/flight", params=wish, headers=ids).status_code == 200
    assert not evil.exists()


# -- chat templates --------------------------------------------------------------------------------

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ (messages|attr('__class__')) }}",
    "{{ messages[0]['__class__'] }}{{ messages[0]|map(attribute='__class__')|list }}",
    "{{ '%s'|format(messages.__init__) }}{{ '{0.__class__}'.format(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{{ self.__init__.__globals__ }}{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__['__builtins__'] }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_templates_in_messages_are_text(text: str, client: httpx.Client) -> None:
    answer = chat(client, text)
    assert answer.status_code == 200
    # Every character of it is a token, and two lines of template come to it.
    assert answer.json()["usage"]["prompt_tokens"] == len(f"user: {text}\n".encode())


@pytest.mark.parametrize("template", ESCAPES)
def test_templates_of_requests_stay_in_their_sandbox(template: str, client: httpx.Client) -> None:
    answer = chat(client, chat_template=template + "x", max_tokens=1, prompt_logprobs=0)
    text = answer.text
    assert answer.status_code in (200, 400), text
    for sign in ("root:", "uid=", "<class", "<built-in", "<function", "subprocess"):
        assert sign not in text


def test_documents_are_a_variable_of_the_template(client: httpx.Client) -> None:
    template = "{% for one in documents or [] %}{{ one.title }}: {{ one.text }}\n{% endfor %}Q"
    documents = [{"title": "Paris", "text": "It rains."}, {"title": "Rome", "text": "It's hot."}]
    said = "Paris: It rains.\nRome: It's hot.\nQ"
    body = {"messages": [{"role": "user", "content": "?"}], "chat_template": template}
    for fields in ({"documents": documents}, {"chat_template_kwargs": {"documents": documents}}):
        tokens = client.post("/tokenize", json=body | fields).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == said
        assert chat(client, **(body | fields)).json()["usage"]["prompt_tokens"] == len(tokens)
    for wrong in ("Paris", ["Paris"], [{"title": 5}]):
        answer = chat(client, documents=wrong)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("documents")


def test_templates_of_requests_need_the_operators_leave(text_llama: Path) -> None:
    from engine.checkpoint.locate import resolve_model
    from engine.server.config import ServerConfig
    from engine.server.http.errors import ApiError
    from engine.server.openai.tools.chat_templates import ChatTemplates
    from engine.text.tokenizer import get_tokenizer

    tokenizer = get_tokenizer(resolve_model(str(text_llama)))
    templates = ChatTemplates(ServerConfig())
    with pytest.raises(ApiError, match="--trust-request-chat-template") as caught:
        templates.choose("{{ messages }}", tokenizer, has_tools=False)
    assert (caught.value.status, caught.value.param) == (400, "chat_template")


# -- sizes -----------------------------------------------------------------------------------------


def test_bodies_and_heads_are_bounded(client: httpx.Client) -> None:
    large = client.post("/v1/completions", json={"prompt": "x" * (1 << 20)})
    assert large.status_code == 413
    assert "--max-body-bytes" in large.json()["error"]["message"]

    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(64):
            yield b"x" * (1 << 16)
        yield b'"}'

    headers = {"Content-Type": "application/json"}
    assert client.post("/v1/completions", content=chunks(), headers=headers).status_code == 413
    wide = client.get("/health", headers={"X-Padding": "y" * 20_000})
    assert (wide.status_code, wide.json()["error"]["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    "bomb",
    [
        b"[" * 500_000,
        b'{"a":' * 100_000,
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "max_tokens": ' + b"9" * 100_000 + b"}",
        b'{"prompt": "a", "temperature": 1e' + b"9" * 1000 + b"}",
        b'{"logit_bias": {' + b",".join(b'"%d": 1' % n for n in range(50_000)) + b"}}",
        b'{"stop": [' + b",".join([b'"a"'] * 100_000) + b'], "prompt": 1.5}',
        b'{"prompt": "\\ud800"}',
        b"\xff\xfe{}",
        b'{"prompt": "a", "zz": [' + b"[]," * 300_000 + b"1]}",
    ],
    ids=range(10),
)
def test_bombs_of_json_are_refused(route: str, bomb: bytes, client: httpx.Client) -> None:
    began_s = time.monotonic()
    headers = {"Content-Type": "application/json"}
    answer = client.post(route, content=bomb, headers=headers)
    assert answer.status_code == 400, answer.text[:500]
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(answer.content) < 4096, "it must not send the bomb back"
    assert time.monotonic() - began_s < SOON_S


RULES = "".join(f'r{n} ::= r{n + 1} | "a"\n' for n in range(9000))
SLOW_GRAMMAR = f'root ::= r0\n{RULES}r9000 ::= "b"'
"""Takes tens of seconds to be brought into Lark."""


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"regex": "((((a{1,999}){1,999}){1,999}){1,999})"}, "matched in too many ways"),
        ({"regex": "(" * 5000}, "an expression in it is invalid"),
        ({"grammar": "root ::= root root | root"}, "no text but the empty one"),
        ({"grammar": SLOW_GRAMMAR}, "took more than 2 s of processor time"),
    ],
    ids=range(4),
)
def test_grammars_that_take_for_ever_are_given_up(
    form: dict[str, str], problem: str, client: httpx.Client
) -> None:
    """Other requests are served meanwhile, and the bad one is told of it."""
    answers: list[httpx.Response] = []
    bad = threading.Thread(
        target=lambda: answers.append(
            client.post(
                "/v1/completions",
                json={"prompt": "a", "max_tokens": 3, "structured_outputs": form},
            )
        )
    )
    bad.start()
    while bad.is_alive():
        began_s = time.monotonic()
        with httpx.Client(base_url=client.base_url, timeout=PATIENCE_S) as other:
            good = other.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert good.status_code == 200
        assert time.monotonic() - began_s < SOON_S
        time.sleep(0.1)
    bad.join()
    assert answers[0].status_code == 400, answers[0].text
    error = answers[0].json()["error"]
    assert error["param"] == f"structured_outputs.{next(iter(form))}"
    assert problem in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": [f"{number} stops" for number in range(50_000)]},
        {"bad_words": [f"{number} words" for number in range(50_000)]},
        {"n": 10**9, "temperature": 1},
        {"n": 5000, "temperature": 1},
        {"prompt": ["a"] * 5000},
        {"logprobs": 10**6},
        {"prompt": "a " * 100_000},
        {"stop_token_ids": [1] * 100_000 + [-1]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_requests_of_more_than_is_sane_are_refused_at_once(
    fields: dict[str, Any], client: httpx.Client
) -> None:
    began_s = time.monotonic()
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1} | fields)
    assert answer.status_code == 400, answer.text[:500]
    assert (answer.json()["error"]["param"] or "").split(".")[0] in fields
    assert time.monotonic() - began_s < SOON_S


@pytest.mark.parametrize("prompt", [[1] * 400_000, [[1]] * 90_000, [["a"] * 250_000], ["a"] * 9999])
def test_prompts_are_refused_by_their_length(prompt: list[Any], client: httpx.Client) -> None:
    """Without a look at each item, which takes longer than a step should wait."""
    answer = client.post("/v1/completions", json={"prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert re.search(
        r"prompts are too many|context length is 32768 .*the prompt has \d", answer.text
    )


# -- clients of other manners ----------------------------------------------------------------------


def ask_as_old(server: ServerProcess, *, stream: bool) -> tuple[bytes, bytes]:
    """Head and body of a completion's answer over HTTP/1.0, to the end of its connection."""
    fields = {"prompt": "Hi", "max_tokens": 5, "ignore_eos": True, "seed": 1, "stream": stream}
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.0\r\nhost: x\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        while data := connection.recv(65536):
            received += data
    head_bytes, _, answer = received.partition(b"\r\n\r\n")
    return head_bytes, answer


def test_old_clients_get_streams_that_end_with_the_connection(server: ServerProcess) -> None:
    head, body = ask_as_old(server, stream=True)
    assert b"transfer-encoding" not in head
    assert b"\r\nconnection: close" in head
    events = body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(one.startswith(b"data: ") for one in events[:-1])
    tokens = [json.loads(one[6:])["choices"][0]["text"] for one in events[:-2]]
    whole = json.loads(ask_as_old(server, stream=False)[1])
    assert "".join(tokens) == whole["choices"][0]["text"]


# -- last, since it leaves a thread busy -----------------------------------------------------------


@pytest.mark.slow
def test_a_template_without_an_end_stops_neither_the_server_nor_its_end(
    server: ServerProcess,
) -> None:
    """Nothing bounds the time of a trusted template but the end of the process, which it must not
    hold up."""
    endless = "{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template": endless}
    outcomes: list[str] = []

    def ask() -> None:
        try:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
            outcomes.append(str(answer.status_code))
        except httpx.HTTPError as error:
            outcomes.append(type(error).__name__)

    stuck = threading.Thread(target=ask)
    stuck.start()
    time.sleep(1.0)
    for _ in range(3):
        assert server.health() == 200
        short = {"prompt": "a", "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=short, timeout=PATIENCE_S)
        assert answer.status_code == 200
    assert not outcomes
    pids = server.children()
    assert server.stop() == 0
    stuck.join(PATIENCE_S)
    assert outcomes
    assert outcomes[0] != "200"
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "orphans")
