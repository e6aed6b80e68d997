"""The load generator against servers whose behaviour is known: scripted ones, and ours."""

import asyncio
import itertools
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.bench.client import ServerNotReadyError
from engine.bench.command import run_in_loop
from engine.bench.measure import Objective, measure
from engine.bench.prompts import RandomPrompts, SharedPrefixPrompts, read_prompts
from engine.bench.records import LoadRun, Outcome, RequestRecord
from engine.bench.settings import LoadSettings
from engine.errors import ConfigError
from tests.support.openai_fake import (
    Exchange,
    FakeServer,
    Script,
    event_bytes,
    fake_server,
    steady,
    text_chunk,
    usage_chunk,
)
from tests.waiting import PATIENCE_S, SOON_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = RandomPrompts(input_len=5, output_len=10, range_ratio=0.0, seed=0)
SLACK_MS = 100.0
"""How much later than it was sent something may be seen on a busy machine, as a median."""


def load(server: FakeServer, prompts: Any = PROMPTS, **settings: Any) -> LoadRun:
    """Run a load of a few requests."""
    values = {"base_url": server.url, "num_prompts": 5, "ready_timeout_s": PATIENCE_S}
    return run_in_loop(LoadSettings(**(values | {"timeout_s": PATIENCE_S} | settings)), prompts)


def pairs(run: LoadRun, server: FakeServer) -> list[tuple[RequestRecord, Exchange]]:
    """What the client has on record of each request, and what the server has."""
    exchanges = {one.headers["x-request-id"]: one for one in server.exchanges}
    return [(record, exchanges[f"run-{record.index}"]) for record in run.records]


def median_ms(times_ns: Iterable[int]) -> float:
    return statistics.median(times_ns) / 1e6


def outcomes(run: LoadRun) -> list[Outcome]:
    """How the requests ended, in order."""
    return [record.outcome for record in run.records]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_known_pace_is_measured(endpoint: str) -> None:
    with fake_server(steady(ttft_s=0.1, itl_s=0.03)) as server:
        paced = {"request_rate": 20.0, "num_prompts": 20, "request_id_prefix": "run-"}
        run = load(server, endpoint=endpoint, **paced)
    document = measure(run)
    both = pairs(run, server)
    assert document["outcomes"] == {"ok": 20}
    assert document["model_id"] == "fake-model"
    # Never earlier than it was sent, and in the middle hardly later. The role of a chat message and
    # the ending without text must not count as output.
    for record, exchange in both:
        assert record.num_events == len(exchange.sent_ns) == 10
        assert record.sent_ns < exchange.arrived_ns
        # Pieces that come while the client does something else are one.
        assert 1 <= len(record.chunk_ns) <= 10
        assert record.chunk_ns[0] > exchange.sent_ns[0]
        assert record.chunk_ns[-1] > exchange.sent_ns[-1]
    ttft_ms = median_ms(exchange.sent_ns[0] - exchange.arrived_ns for _, exchange in both)
    e2el_ms = median_ms(exchange.sent_ns[-1] - exchange.arrived_ns for _, exchange in both)
    assert 99 <= ttft_ms <= document["p50_ttft_ms"] <= ttft_ms + SLACK_MS
    assert 369 <= e2el_ms <= document["p50_e2el_ms"] <= e2el_ms + SLACK_MS
    assert document["p50_tpot_ms"] == pytest.approx(
        median_ms((record.chunk_ns[-1] - record.chunk_ns[0]) // 9 for record, _ in both), abs=0.01
    )
    assert (e2el_ms - ttft_ms) / 18 < document["p50_tpot_ms"] < (e2el_ms - ttft_ms) / 9 + SLACK_MS
    assert document["total_output_tokens"] == 200
    assert document["total_input_tokens"] == 140
    num_chunks = sum(len(record.chunk_ns) for record, _ in both)
    assert document["tokens_per_chunk"] == pytest.approx(200 / num_chunks, abs=0.01)
    gaps_ns = [b - a for record, _ in both for a, b in itertools.pairwise(record.chunk_ns)]
    assert document["p50_itl_ms"] == pytest.approx(median_ms(gaps_ns), rel=0.1)
    assert document["p99_ttft_from_intended_ms"] >= document["p99_ttft_ms"]


def test_several_tokens_in_a_chunk_do_not_flatter_the_time_per_token() -> None:
    with fake_server(steady(ttft_s=0.05, itl_s=0.5, tokens_per_chunk=5)) as server:
        document = measure(load(server, max_concurrency=5))
    assert document["total_output_tokens"] == 50
    assert document["tokens_per_chunk"] == pytest.approx(5.0)
    # Two chunks of five tokens, 500 ms apart: ITL sees the gap, TPOT spreads it over nine tokens.
    assert 250 <= document["p50_itl_ms"] <= 1000
    assert document["p50_tpot_ms"] == pytest.approx(document["p50_itl_ms"] / 9, abs=0.01)


def test_events_that_arrive_at_once_are_one_chunk() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start()
        for _ in range(2):
            await asyncio.sleep(0.5)
            await exchange.output(event_bytes(text_chunk(" a")) * 3)
        await exchange.send(event_bytes(usage_chunk(1, 6)) + event_bytes("[DONE]"))
        await exchange.end()

    with fake_server(script) as server:
        run = load(server, num_prompts=1)
    (record,) = run.records
    assert record.num_events == 6
    (exchange,) = server.exchanges
    (first_sent, second_sent), (first, second) = exchange.sent_ns, record.chunk_ns
    assert first_sent < first < second_sent < second


def test_reasoning_and_tool_calls_are_output_and_the_role_is_not() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"reasoning": "hm", "content": None},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]},
        {"content": "a"},
        {},
    ]

    async def script(exchange: Exchange) -> None:
        await exchange.start()
        for delta in deltas:
            await exchange.event({"choices": [{"index": 0, "delta": delta}]})
            await asyncio.sleep(0.02)
        await exchange.event("[DONE]")
        await exchange.end()

    with fake_server(script) as server:
        run = load(server, num_prompts=1, endpoint="chat")
    (record,) = run.records
    assert record.num_events == 4
    assert record.completion_tokens is None
    assert record.output_tokens() == 4
    assert (record.chunk_ns[0] - record.sent_ns) / 1e6 >= 19


@pytest.mark.parametrize("seed", range(4))
def test_the_stream_may_be_cut_anywhere(seed: int) -> None:
    stream = b": hello\r\n\r\n" + b"".join(
        event_bytes(text_chunk(text)) for text in (" naïve", " \N{SNOWMAN}", "", " x" * 500)
    )
    stream += event_bytes(usage_chunk(3, 4)) + b"data: [DONE]\r\n\r\n"

    async def script(exchange: Exchange) -> None:
        generator = random.Random(seed)
        rest = stream
        await exchange.start()
        while rest:
            size = generator.choice([1, 2, 7, 60, 300])
            await exchange.send(rest[:size])
            rest = rest[size:]
            if generator.random() < 0.2:
                await asyncio.sleep(0.001)
        await exchange.end()

    with fake_server(script) as server:
        run = load(server, num_prompts=3)
    assert outcomes(run) == [Outcome.OK] * 3
    assert {record.num_events for record in run.records} == {4}
    assert {record.completion_tokens for record in run.records} == {4}


async def _too_many(exchange: Exchange) -> None:
    await exchange.answer("429 Too Many", {"error": {"message": "later"}}, "Retry-After: 1")


async def _redirect(exchange: Exchange) -> None:
    await exchange.answer("307 Elsewhere", {}, "Location: /v1/completions")


async def _error_event(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.event(text_chunk(" a"))
    await exchange.event({"error": {"message": "the engine died", "code": 500}})
    await exchange.event("[DONE]")
    await exchange.end()


async def _named_error_event(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.send(b"event: error\ndata: the engine died\n\n")
    await exchange.end()


async def _reset_in_the_middle(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.event(text_chunk(" a"))
    await asyncio.sleep(0.05)
    await exchange.reset()


async def _close_before_the_answer(exchange: Exchange) -> None:
    exchange.writer.close()


async def _end_without_done(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.event(text_chunk(" a"))
    await exchange.end()


async def _garbage(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.event("{not json")
    await exchange.end()


async def _no_stream(exchange: Exchange) -> None:
    await exchange.answer("200 OK", {"choices": [{"text": "all at once"}]})


async def _empty(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.end()


async def _stall(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.event(text_chunk(" a"))
    await asyncio.sleep(2 * PATIENCE_S)


@pytest.mark.parametrize(
    ("script", "outcome", "status", "detail", "num_events"),
    [
        (_too_many, Outcome.HTTP_ERROR, 429, "later", 0),
        (_redirect, Outcome.HTTP_ERROR, 307, "", 0),
        (_error_event, Outcome.ERROR_EVENT, 200, "the engine died", 1),
        (_named_error_event, Outcome.ERROR_EVENT, 200, "the engine died", 0),
        (_reset_in_the_middle, Outcome.DISCONNECTED, 200, "", 1),
        (_close_before_the_answer, Outcome.DISCONNECTED, None, "disconnected", 0),
        (_end_without_done, Outcome.DISCONNECTED, 200, "without [DONE]", 1),
        (_garbage, Outcome.BAD_STREAM, 200, "{not json", 0),
        (_no_stream, Outcome.BAD_STREAM, 200, "no stream", 0),
        (_empty, Outcome.BAD_STREAM, 200, "without [DONE]", 0),
        (_stall, Outcome.TIMED_OUT, 200, "1 s", 1),
    ],
)
def test_each_way_to_fail_has_its_outcome(
    script: Script, outcome: Outcome, status: int | None, detail: str, num_events: int
) -> None:
    fine = steady(ttft_s=0.0, itl_s=0.001)

    async def every_other(exchange: Exchange) -> None:
        await (script if exchange.number % 2 else fine)(exchange)

    with fake_server(every_other) as server:
        timeout_s = 1.0 if outcome is Outcome.TIMED_OUT else PATIENCE_S
        run = load(server, num_prompts=6, max_concurrency=1, timeout_s=timeout_s)
    assert outcomes(run) == [Outcome.OK, outcome] * 3
    for record in run.records[1::2]:
        assert record.status == status
        assert detail in record.detail
        assert record.num_events == num_events
        assert record.end_ns > record.sent_ns
    name = f"http_{status}" if outcome is Outcome.HTTP_ERROR else str(outcome)
    assert measure(run)["outcomes"] == {"ok": 3, name: 3}


def test_a_server_that_goes_away_is_refused_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with fake_server(steady(ttft_s=0.0, itl_s=0.0)) as server:
        # Ready at one place, gone at the other: the requests go where nobody listens.
        class Moved(LoadSettings):
            url = f"http://127.0.0.1:{port}/v1/completions"

        settings = Moved(base_url=server.url, num_prompts=4, request_rate=50.0)
        run = run_in_loop(settings, PROMPTS)
    assert outcomes(run) == [Outcome.REFUSED] * 4
    assert all(record.status is None for record in run.records)


def test_a_slow_server_shows_what_waiting_users_suffer() -> None:
    """Coordinated omission: one request at a time of 100 ms each, and 40 due a second."""
    with fake_server(steady(ttft_s=0.1, itl_s=0.0)) as server:
        run = load(server, num_prompts=20, request_rate=40.0, max_concurrency=1)
    document = measure(run, objective=Objective(ttft_ms=300))
    assert document["max_concurrent_requests"] == 1
    # From the sending, the server looks fine; from when it was due, the last one waited for all
    # the others, which take 100 ms each and come 25 ms apart.
    assert 5 * document["p50_ttft_ms"] < document["max_ttft_from_intended_ms"]
    assert document["max_ttft_from_intended_ms"] >= 19 * 100 - 1000
    assert document["client"]["sent_late_ms"]["max"] >= 900
    lates = [record.sent_ns - record.intended_ns for record in run.records]
    assert lates[-1] > lates[5] > lates[0]
    # And goodput is not fooled by the first of the two views.
    assert document["goodput_ratio"] <= 0.5


def test_an_open_loop_does_not_wait_for_answers() -> None:
    answers, all_are_here = steady(ttft_s=0.0, itl_s=0.0), asyncio.Event()

    async def answer_none_before_the_last(exchange: Exchange) -> None:
        if exchange.number == 29:
            all_are_here.set()
        await all_are_here.wait()
        await answers(exchange)

    with fake_server(answer_none_before_the_last) as server:
        run = load(server, num_prompts=30, request_rate=100.0)
    assert outcomes(run) == [Outcome.OK] * 30
    assert measure(run)["max_concurrent_requests"] == 30


def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    with fake_server(steady(ttft_s=0.02, itl_s=0.001)) as server:
        run = load(server, num_prompts=40, max_concurrency=4)
    document = measure(run)
    assert document["max_concurrent_requests"] == 4
    assert document["completed"] == 40
    # A request is due when a place is free, so nothing is late: far less than what it waited for.
    assert document["client"]["sent_late_ms"]["p50"] < document["p50_ttft_ms"] / 2
    assert server.num_connections <= 4 + 2  # connections are kept and used again


def test_a_duration_ends_the_sending_and_waits_for_what_is_in_flight() -> None:
    with fake_server(steady(ttft_s=0.2, itl_s=0.0)) as server:
        closed = load(server, num_prompts=None, duration_s=0.5, max_concurrency=2)
        opened = load(server, num_prompts=None, duration_s=0.5, request_rate=40.0)
    for run in (closed, opened):
        assert set(outcomes(run)) == {Outcome.OK}
        assert max(record.intended_ns for record in run.records) - run.start_ns < 1e9
        assert run.end_ns - run.start_ns > 0.5e9
        assert not run.interrupted
    assert 2 <= len(closed.records) <= 6  # a round or two less where the machine is slow
    assert 8 <= len(opened.records) <= 35


def test_a_closed_loop_does_not_hammer_a_server_that_refuses() -> None:
    with fake_server(_too_many) as server:
        run = load(server, num_prompts=None, duration_s=0.35, max_concurrency=2)
    assert set(outcomes(run)) == {Outcome.HTTP_ERROR}
    assert 2 <= len(run.records) <= 8


def test_a_seed_repeats_the_requests_and_warmups_are_others() -> None:
    def seen(seed: int) -> tuple[list[Any], LoadRun]:
        prompts = RandomPrompts(input_len=9, output_len=4, range_ratio=0.5, seed=seed)
        with fake_server(steady(ttft_s=0.0, itl_s=0.0)) as server:
            run = load(server, prompts, num_warmups=3, seed=seed, max_concurrency=1)
        return [exchange.body for exchange in server.exchanges], run

    bodies, run = seen(1)
    assert bodies == seen(1)[0]
    assert bodies != seen(2)[0]
    assert len(bodies) == 8
    assert len({body["prompt"] for body in bodies}) == 8
    assert len(run.records) == 5
    assert len(run.warmups) == 3
    assert {record.index for record in run.warmups} == {-1, -2, -3}
    assert measure(run)["warmup"] == {"num_prompts": 3, "outcomes": {"ok": 3}}
    assert run.start_ns >= max(record.end_ns for record in run.warmups)


def test_requests_carry_what_they_were_told_to(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": [1, 2], "max_tokens": 3, "top_p": 0.5, "stop": ["a"]}\n')
    with fake_server(steady(ttft_s=0.0, itl_s=0.0)) as server:
        load(
            server,
            read_prompts(path, output_len=9),
            num_prompts=1,
            model="other",
            temperature=0.3,
            ignore_eos=True,
            extra_body={"top_p": 0.9},
            headers={"X-Tenant": "me"},
            api_key="key",
            request_id_prefix="run-",
        )
        shared = SharedPrefixPrompts(
            num_prefixes=1,
            prefix_len=3,
            suffix_len=2,
            output_len=4,
            range_ratio=0.0,
            seed=0,
            chat=True,
        )
        load(server, shared, num_prompts=1, endpoint="chat")
        own = {"authorization": "Bearer mine", "content-type": "application/json; a=b"}
        load(server, shared, num_prompts=1, endpoint="chat", api_key="key", headers=own)
    first, second, third = server.exchanges
    assert first.body == {
        "model": "other",
        "prompt": [1, 2],
        "max_tokens": 3,
        "temperature": 0.3,
        "ignore_eos": True,
        "top_p": 0.9,
        "stop": ["a"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert first.headers["authorization"] == "Bearer key"
    assert first.headers["x-tenant"] == "me"
    assert first.headers["x-request-id"] == "run-0"
    assert second.path == "/v1/chat/completions"
    assert [message["role"] for message in second.body["messages"]] == ["system", "user"]
    assert second.body["max_completion_tokens"] == 4
    assert "authorization" not in second.headers
    # What is given wins, in any spelling, and is sent once.
    assert third.headers["authorization"] == "Bearer mine"
    assert third.headers["content-type"] == "application/json; a=b"
    assert len(third.headers) == len(second.headers) + 1


def test_cached_tokens_are_read_from_the_usage() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.event(text_chunk(" a"))
        await exchange.event(usage_chunk(8, 1, prompt_tokens_details={"cached_tokens": 6}))
        await exchange.event("[DONE]")
        await exchange.end()

    with fake_server(script) as server:
        assert measure(load(server))["total_cached_tokens"] == 30


@pytest.mark.parametrize("lasting", [{}, {"num_prompts": None, "duration_s": 0.3}])
@pytest.mark.parametrize(
    ("endpoint", "prompt", "message"),
    [
        ("chat", '{"prompt": [1]}', "takes no token ids"),
        ("completions", '{"messages": [{"role": "user", "content": "a"}]}', "take no messages"),
        ("completions", '{"prompt": "\\ud800"}', "no valid text"),
    ],
)
def test_prompts_that_do_not_suit_the_endpoint_are_refused_before_anything_is_sent(
    endpoint: str, prompt: str, message: str, lasting: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' * 9 + prompt)
    with (
        fake_server(steady(ttft_s=0.0, itl_s=0.0)) as server,
        pytest.raises(ConfigError, match=message),
    ):
        load(
            server,
            read_prompts(path, output_len=1),
            endpoint=endpoint,
            max_concurrency=2,
            **lasting,
        )
    assert server.exchanges == []


def test_the_load_waits_until_the_server_is_ready() -> None:
    with fake_server(steady(ttft_s=0.0, itl_s=0.0)) as server:
        server.health = [503, 503, 200]
        assert len(load(server).records) == 5
        assert server.health == [200]
        server.health = [404]  # no such route: the models answer for it
        assert len(load(server).records) == 5
        server.health = [503]
        with pytest.raises(ServerNotReadyError, match=r"not ready after 1 s: HTTP status 503"):
            load(server, ready_timeout_s=1.0)
        server.health = [401]
        began_s = time.monotonic()
        with pytest.raises(ServerNotReadyError, match="OPENAI_API_KEY"):
            load(server)
        assert time.monotonic() - began_s < PATIENCE_S / 2, "it has waited for another answer"


def test_a_server_that_never_answers_is_waited_for_as_long_as_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began_s = time.monotonic()
        with pytest.raises(ServerNotReadyError, match=r"not ready after 0\.3 s"):
            run_in_loop(LoadSettings(base_url=url, ready_timeout_s=0.3), PROMPTS)
    assert 0.3 <= time.monotonic() - began_s < SOON_S


def command(*arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "engine.cli.main", "bench", "serve", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_prints_tables_and_one_document_and_writes_its_files(tmp_path: Path) -> None:
    saved, plot = tmp_path / "run.json", tmp_path / "run.svg"
    with fake_server(steady(ttft_s=0.01, itl_s=0.001)) as server:
        process = command(
            *("--base-url", f"{server.url}/v1", "--num-prompts", "20", "--max-concurrency", "4"),
            *("--output-len", "5", "--num-warmups", "2", "--goodput", "ttft:60000"),
            *("--save", str(saved), "--save-detailed", "--plot", str(plot)),
        )
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    *lines, last = out.splitlines()
    document = json.loads(last)
    assert document["completed"] == 20
    assert document["goodput_ratio"] == 1
    assert any("closed loop of 4; 20 requests" in line for line in lines)
    whole = json.loads(saved.read_text())
    assert document.items() <= whole.items()
    assert [one["index"] for one in whole["requests"]] == list(range(20))
    assert all(len(one["chunk_ns"]) >= 1 for one in whole["requests"])
    assert plot.read_text().startswith("<svg")


def test_ctrl_c_reports_what_there_is() -> None:
    with fake_server(steady(ttft_s=0.0, itl_s=0.02)) as server:
        process = command(
            *("--base-url", server.url, "--num-prompts", "500", "--request-rate", "40"),
            *("--max-concurrency", "5"),
        )
        wait_until(lambda: len(server.exchanges) >= 8)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    document = json.loads(out.splitlines()[-1])
    assert document["interrupted"] is True
    assert "INTERRUPTED" in out
    # Every request that was due is there: over, in flight, or waiting for a place.
    assert document["outcomes"]["cancelled"] >= 5
    assert sum(document["outcomes"].values()) == document["num_prompts"]
    assert len(server.exchanges) <= document["num_prompts"] < 500
    assert "Traceback" not in err


def test_ctrl_c_ends_the_wait_for_a_server() -> None:
    with fake_server(steady(ttft_s=0.0, itl_s=0.0)) as server:
        server.health = [503]
        process = command("--base-url", server.url, "--ready-timeout", "600")
        wait_until(lambda: server.num_connections)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert out == ""


def test_a_server_that_is_not_there_is_an_error_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = command("--base-url", f"http://127.0.0.1:{port}", "--ready-timeout", "0.2")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert out == ""
    assert err.startswith("isinglass: error: ")
    assert "is not ready after 0.2 s" in err


def test_a_run_without_one_success_fails() -> None:
    with fake_server(_too_many) as server:
        process = command("--base-url", server.url, "--num-prompts", "3")
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "later" in out
    assert json.loads(out.splitlines()[-1])["outcomes"] == {"http_429": 3}
