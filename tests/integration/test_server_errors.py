"""What the server says to requests that are wrong, and that nothing is left of them."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import ServerProcess, stream_lines
from tests.waiting import PATIENCE_S, wait_until

COMPLETION: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
JSON = {"content-type": "application/json"}
HUGE = 10**30

BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 4}, "top_p"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": HUGE}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": "2"}, "n"),
    ({"n": True}, "n"),
    ({"n": HUGE}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"prompt": ["a", "b"], "n": 1000}, "prompt"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"logits_processors": ["os.system"]}, "logits_processors"),
    ({"seed": HUGE}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids.0"),
    ({"stop_token_ids": [HUGE]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -2}, "logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 8192}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": HUGE}, "truncate_prompt_tokens"),
    ({"max_tokens": 8193}, "max_tokens"),
    ({"max_tokens": HUGE}, "max_tokens"),
    ({"logprobs": 2001}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"request_id": "a/../b"}, "request_id"),
    ({"request_id": "x" * 300}, "request_id"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"priority": 1}, "priority"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["fine", ""]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [HUGE]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "so " * 9000}, "prompt"),
    ({"bad_words": ["word " * 200 for _ in range(20)]}, "bad_words"),
    ({"allowed_token_ids": [5] * 60_000}, "allowed_token_ids"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
        "response_format.json_schema.schema.type",
    ),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": "x"}},
        "structured_outputs.whitespace_pattern",
    ),
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [5]}, "messages"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -5}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
    ({"max_completion_tokens": 3}, "max_tokens"),
    ({"max_completion_tokens": 8193, "max_tokens": None}, "max_completion_tokens"),
    ({"max_completion_tokens": 1, "max_tokens": None, "min_tokens": 2}, "min_tokens"),
    ({"logprobs": True, "top_logprobs": 2001}, "top_logprobs"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"documents": [{"text": 5}]}, "documents.0.text"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
]


@pytest.fixture(scope="module")
def http(embedded_server: ServerProcess) -> Iterator[httpx.Client]:
    """A plain client; in the end nothing may be running on the server."""
    with httpx.Client(base_url=embedded_server.url, timeout=PATIENCE_S) as http:
        yield http
        wait_until(lambda: num_running(http) <= 1, "requests are still running")
        log = embedded_server.log()
    assert "Traceback" not in log


def num_running(http: httpx.Client) -> int:
    """Sequences that the engine was working on in its last step; one of them may be our own.

    The metrics say what the last step saw, so that it takes a step to see that there is nothing.
    """
    assert http.post("/v1/completions", json=COMPLETION | {"max_tokens": 1}).status_code == 200
    text = http.get("/metrics").text
    match = re.search(r"^isinglass_requests_running\{[^}]*\} (\S+)", text, re.MULTILINE)
    assert match is not None
    return int(float(match[1]))


def assert_refused(answer: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    """OpenAI's form, the field, and nothing of the inside."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    assert error["type"].endswith("_error")
    assert not re.search(r"Traceback|\.py\b|site-packages|object at 0x", answer.text)
    said = error["message"].partition(", got ")[0]
    assert not re.search(r"\b(None|True|False)\b|dictionar|\w\(|\[\"|max_model_len", said), said
    assert len(answer.text) < 2000
    return dict(error)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_wrong_completions_name_the_field(http: httpx.Client, stream: bool) -> None:
    for wrong, param in BAD_COMPLETIONS:
        body = COMPLETION | {"stream": stream} | wrong
        if stream and "stream_options" in wrong and "stream" not in wrong:
            continue
        assert_refused(http.post("/v1/completions", json=body), 400, param)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_wrong_chats_name_the_field(http: httpx.Client, stream: bool) -> None:
    for wrong, param in BAD_CHATS:
        body = CHAT | {"stream": stream} | wrong
        assert_refused(http.post("/v1/chat/completions", json=body), 400, param)


def test_too_long_a_prompt_says_how_long(http: httpx.Client) -> None:
    long = "A conversation of four megabytes. " * 120_000
    for path, body, param, length in (
        ("/v1/completions", {"prompt": [5] * 9000}, "prompt", r"9000"),
        ("/v1/completions", {"prompt": "so " * 9000}, "prompt", r"\d+"),
        ("/v1/completions", {"prompt": long}, "prompt", r"at least \d+"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": long}]},
            "messages",
            r"at least \d+",
        ),
    ):
        error = assert_refused(http.post(path, json=body), 400, param)
        assert error["code"] == "context_length_exceeded"
        begins = r"This model's maximum context length is 8192 tokens \(--max-model-len\), .*"
        assert re.match(begins + rf"the prompt has {length}\. ", error["message"])
    kept = http.post(
        "/v1/completions", json=COMPLETION | {"prompt": long, "truncate_prompt_tokens": 7}
    ).json()
    assert kept["usage"]["prompt_tokens"] == 7


def test_each_refusal_of_the_engines_is_counted_once(http: httpx.Client) -> None:
    def counts() -> dict[str, float]:
        counted = re.findall(
            r'^isinglass_requests_rejected_total\{.*error="(\w+)".*\} (\S+)',
            http.get("/metrics").text,
            re.MULTILINE,
        )
        return {name: float(value) for name, value in counted}

    before = counts()
    nobody = {"messages": [{"role": "", "content": "Hi"}]}
    for path, body, error in (
        ("/v1/completions", {"prompt": "so " * 9000}, "PromptError"),
        ("/v1/completions", {"prompt": [5] * 9000}, "PromptError"),
        ("/v1/completions", {"prompt": [10**6]}, "PromptError"),
        ("/v1/chat/completions", nobody, "PromptError"),
        ("/v1/completions", COMPLETION | {"temperature": -1}, "SamplingParamsError"),
        ("/v1/completions", COMPLETION | {"logprobs": 5000}, "SamplingParamsError"),
        ("/v1/chat/completions", CHAT | {"top_p": 7}, "SamplingParamsError"),
    ):
        assert http.post(path, json=body).status_code == 400
        after = counts()
        changed = {name: after[name] - before.get(name, 0.0) for name in after}
        assert {name: change for name, change in changed.items() if change} == {error: 1.0}, body
        before = after


def test_more_tokens_than_fit_are_cut_and_more_than_the_context_are_refused(
    text_llama: Path, tmp_path: Path
) -> None:
    """A tiny model: such a prompt takes a large one minutes on a slow machine."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    flags = ("--max-model-len", "8192", "--chat-template", str(template))
    kv_cache = ("--kv-cache-memory-bytes", str(64 << 20))
    with (
        ServerProcess(str(text_llama), *kv_cache, *flags) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):
        long = {"prompt": [5] * 8190, "ignore_eos": True}
        for fields in ({"max_tokens": 3}, {"max_tokens": 8192, "truncate_prompt_tokens": 8190}):
            answer = http.post("/v1/completions", json=long | fields).json()
            assert answer["usage"]["completion_tokens"] == 2
            assert answer["choices"][0]["finish_reason"] == "length"
        kept = {"prompt": [5] * 9000, "truncate_prompt_tokens": -1, "max_tokens": 4}
        usage = http.post("/v1/completions", json=kept).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (8191, 1)
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            answer = http.post(path, json=body | {"max_tokens": 8193, "stream": True})
            error = assert_refused(answer, 400, "max_tokens")
            assert error["code"] == "context_length_exceeded"
            begins = "This model's maximum context length is 8192 tokens, "
            assert error["message"].startswith(begins)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"text"',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a\\udc00b"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 50_000,
        b'{"prompt": "a", "x": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b"\x00\x01\x02",
    ],
    ids=range(15),
)
def test_what_is_not_json_is_refused(http: httpx.Client, content: bytes) -> None:
    answer = http.post("/v1/completions", content=content, headers=JSON)
    assert assert_refused(answer, 400, None)["code"] == "invalid_json"


def test_surrogates_that_belong_together_are_a_character(http: httpx.Client) -> None:
    content = b'{"prompt": "\\ud83d\\ude42", "max_tokens": 1, "echo": true}'
    for body in (content, b"\xef\xbb\xbf" + content):  # a byte order mark is none of it
        answer = http.post("/v1/completions", content=body, headers=JSON)
        assert answer.json()["choices"][0]["text"].startswith("🙂")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_other_media_types_are_refused(http: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = http.post("/v1/completions", content=json.dumps(COMPLETION), headers=headers)
    assert_refused(answer, 415, None)


def test_wrong_names_and_methods(http: httpx.Client) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        error = assert_refused(http.post(path, json=body | {"model": "gpt-4"}), 404, "model")
        assert (error["type"], error["code"]) == ("invalid_request_error", "model_not_found")
        assert_refused(http.get(path), 405, None)
    assert_refused(http.get("/v1/models/gpt-4"), 404, "model")
    assert_refused(http.get("/v1/nothing"), 404, None)


def test_tokenizer_routes_refuse_too(http: httpx.Client) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"messages": [{"role": 5}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [HUGE]}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        assert_refused(http.post(path, json=body), 400, param)


def test_fields_that_nobody_knows_are_accepted(http: httpx.Client) -> None:
    body = COMPLETION | {"from_the_future": [1], "metadata": {"a": "b"}, "suffix": None}
    assert http.post("/v1/completions", json=body).status_code == 200


def test_an_id_in_use_is_not_given_again(http: httpx.Client) -> None:
    body = COMPLETION | {"request_id": "twice-1", "max_tokens": 300, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as first:
        lines = first.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["id"] == "cmpl-twice-1"
        short = COMPLETION | {"request_id": "twice-1"}
        for wanted in (short, short | {"request_id": "twice", "prompt": ["a", "b"]}):
            answer = http.post("/v1/completions", json=wanted)
            assert answer.status_code == 200
            assert re.fullmatch(r"cmpl-twice(-1)?-[0-9a-f]{8}", answer.json()["id"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_who_leaves_is_not_worked_for(
    http: httpx.Client, embedded_server: ServerProcess, stream: bool
) -> None:
    body = COMPLETION | {
        "prompt": ["one", "two"],
        "n": 2,
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": stream,
        "request_id": f"leaver-{stream}",
    }
    wait_until(lambda: num_running(http) <= 1, "something is running")
    with socket.create_connection(("127.0.0.1", embedded_server.port)) as connection:
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: left-{stream}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        wait_until(lambda: num_running(http) >= 4, "the request is not running")
        if stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
    wait_until(lambda: num_running(http) <= 1, "the engine goes on for nobody")

    def is_recorded() -> bool:
        lines = embedded_server.log().splitlines()
        return any(f"id left-{stream}" in line and " 499 " in line for line in lines)

    wait_until(is_recorded, "499 is not in the log")


def test_who_stalls_hinders_nobody_and_misses_nothing(
    http: httpx.Client, embedded_server: ServerProcess
) -> None:
    """One does not read while another is served; all the text comes in the end."""
    body = COMPLETION | {
        "max_tokens": 80,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "logprobs": 2000,  # megabytes, more than sockets hold
    }
    content = json.dumps(body).encode()
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", embedded_server.port))
        stalled.settimeout(PATIENCE_S)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        stalled.sendall(head.encode() + content)
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
        wait_until(lambda: num_running(http) <= 1, "the engine waits for a client")
        received = b""
        while part := stalled.recv(1 << 16):
            received += part
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    tokens = re.findall(rb'"token_logprobs":\[([^]]*)\]', received)
    assert sum(part.count(b",") + 1 for part in tokens) == 80


def test_a_stream_of_one_bad_prompt_among_good_ones_starts_nothing(http: httpx.Client) -> None:
    body = COMPLETION | {"prompt": [[5], [6], [10**6]], "max_tokens": 4000, "ignore_eos": True}
    assert_refused(http.post("/v1/completions", json=body | {"stream": True}), 400, "prompt")
    assert num_running(http) <= 1
    good = http.post("/v1/completions", json=COMPLETION | {"stream": True})
    assert stream_lines(good)[-1] == "[DONE]"
