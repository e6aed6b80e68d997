"""Processes that die or hang, disks that are full, receivers that are gone: what clients see of it.

`docs/operating.md`, "When things die", says what is to be expected; each row of it is a test here.
"""

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.load_clients import Wire, completion
from tests.support.otlp_receiver import grpc_receiver, http_receiver
from tests.support.scripts import is_running, socket_folders
from tests.support.server_facts import (
    Scrape,
    busy_tasks,
    check_arrivals,
    num_connections,
    processes,
    scrape,
)
from tests.support.server_process import SMALL_FLAGS, ServerProcess, folder_for_servers
from tests.waiting import PATIENCE_S, SOON_S, until, wait_until

QUIET = (*SMALL_FLAGS, "--disable-access-log")
OTHER_SEED = {"temperature": 1, "seed": 3}


@pytest.fixture
def private_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of each test's own: a server of other tests may live in the session's."""
    with folder_for_servers(monkeypatch) as folder:
        yield folder


class Stream:
    """A streamed completion that is being read."""

    def __init__(self, wire: Wire, num_tokens: int) -> None:
        self._wire = wire
        self._num_tokens = num_tokens
        self.answer = asyncio.create_task(wire.read_answer())

    @property
    def num_events(self) -> int:
        """Events so far."""
        return self._wire.received.count(b"data: ")

    async def end(self) -> dict[str, Any]:
        """The error, or the usage, that it ended with; an empty one if the connection broke."""
        answer = await asyncio.wait_for(asyncio.shield(self.answer), PATIENCE_S)
        if not answer.is_complete:
            return {}
        if answer.status != 200:
            return dict(json.loads(answer.body))
        *_, last, done = answer.events
        assert done == "[DONE]"
        document: dict[str, Any] = json.loads(last)
        return document

    async def assert_complete(self) -> None:
        """It has got all its tokens."""
        document = await self.end()
        assert document.get("usage", {}).get("completion_tokens") == self._num_tokens, document


@asynccontextmanager
async def streams(port: int, num: int, num_tokens: int = 30_000) -> AsyncIterator[list[Stream]]:
    """So many streams, each of which has had its first tokens."""
    wires = [await Wire.open(port) for _ in range(num)]
    running: list[Stream] = []
    try:
        for number, wire in enumerate(wires):
            await wire.send(completion(f"Stream {number}", num_tokens))
            running.append(Stream(wire, num_tokens))
        await until(lambda: all(one.num_events > 1 for one in running))
        yield running
    finally:
        for one in running:
            one.answer.cancel()
        await asyncio.gather(*[one.answer for one in running], return_exceptions=True)
        for wire in wires:
            wire.sock.close()


async def off_loop(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call what blocks, while the streams are being read."""
    return await asyncio.to_thread(function, *arguments)


def ask(server: ServerProcess, num_tokens: int = 3) -> httpx.Response:
    """A short completion."""
    body = {"prompt": "And then", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)


def post(server: ServerProcess, path: str) -> httpx.Response:
    return httpx.post(f"{server.url}/{path}", timeout=PATIENCE_S)


def assert_answers(server: ServerProcess) -> None:
    answer = ask(server)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does not get on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def assert_nothing_left(pids: dict[str, int], temporary: Path) -> None:
    """All processes have gone, and their socket folder."""
    wait_until(
        lambda: not any(map(is_running, pids.values())),
        f"of {pids} there is still {[pid for pid in pids.values() if is_running(pid)]}",
    )
    wait_until(lambda: not socket_folders(temporary), "a socket folder is left")


# -- the core --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stays", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ends", "stays"]
)
def test_the_core_is_killed_under_load(
    stays: bool, text_llama: Path, private_temporary_folder: Path
) -> None:
    flags = ("--keep-alive-on-engine-death",) if stays else ()
    with ServerProcess(str(text_llama), *QUIET, *flags) as server:
        pids = processes(server)

        async def run() -> None:
            async with streams(server.port, 24) as running:
                os.kill(pids["EngineCore"], signal.SIGKILL)
                killed_s = time.monotonic()
                for one in running:
                    error = (await one.end())["error"]
                    assert error["code"] == "engine_dead", error
                    assert error["type"] == "service_unavailable_error"
                assert time.monotonic() - killed_s < SOON_S
                assert await off_loop(server.health) == 503
                seen = await off_loop(scrape, server.url)
            assert seen.total("engine_up") == 0
            check_arrivals(seen)
            assert seen.total("requests_in_flight") == 0
            assert seen.values("requests_finished_total", "finish_reason")["error"] == 24
            assert seen.values("http_request_outcomes_total", "outcome")["engine_error"] == 24

        asyncio.run(run())
        refused = ask(server)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        if stays:
            time.sleep(3.0)
            assert server.health() == 503
            assert server.stop() == 0
        else:
            assert server.process.wait(PATIENCE_S) == 1
        assert_nothing_left(pids, private_temporary_folder)
        assert "killed by signal 9" in server.log()
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("seconds", [2.0, pytest.param(10.0, marks=pytest.mark.slow)])
def test_the_core_is_stopped_and_goes_on(seconds: float, text_llama: Path) -> None:
    """Requests wait, those that would wait too many are refused, and nothing is lost."""
    limits = ("--max-num-queued-reqs", "4", "--max-num-seqs", "4")
    with ServerProcess(str(text_llama), *QUIET, *limits) as server:
        core = processes(server)["EngineCore"]

        async def run() -> None:
            async with streams(server.port, 4, 1500) as running:
                with stopped(core):
                    until_s = time.monotonic() + seconds
                    waiting = [asyncio.create_task(off_loop(ask, server)) for _ in range(4)]
                    while (await off_loop(scrape, server.url)).total("requests_in_flight") < 8:
                        await asyncio.sleep(0.1)
                    refused = await off_loop(ask, server)
                    assert refused.status_code == 429
                    assert int(refused.headers["retry-after"]) > 0
                    num_events = [one.num_events for one in running]
                    while time.monotonic() < until_s:
                        assert await off_loop(server.health) == 200
                        seen = await off_loop(scrape, server.url)
                        assert seen.total("requests_in_flight") == 8
                        await asyncio.sleep(0.2)
                    assert [one.num_events for one in running] == num_events
                for one in running:
                    await one.assert_complete()
                for answer in await asyncio.gather(*waiting):
                    assert answer.status_code == 200

        asyncio.run(run())
        seen = scrape(server.url)
        check_arrivals(seen)
        assert seen.values("requests_rejected_total", "error")["QueueFullError"] == 1
        assert seen.total("generation_tokens_total") == 4 * 1500 + 4 * 3
        assert busy_tasks(server.url) == []


# -- frontends -------------------------------------------------------------------------------------


@asynccontextmanager
async def streams_of_two(
    server: ServerProcess, num: int, num_tokens: int
) -> AsyncIterator[tuple[list[Stream], dict[str, int]]]:
    """Streams of both frontends, and how many each has."""
    frontends = frontends_of(server)
    assert len(frontends) == 2

    def shares() -> dict[str, int]:
        return {name: num_connections(pid, server.port) for name, pid in frontends.items()}

    async with streams(server.port, num, num_tokens) as running:
        await until(lambda: sum(shares().values()) == num)  # and no one who asks for health
        yield running, shares()


def frontends_of(server: ServerProcess) -> dict[str, int]:
    """Process ids of several frontends by their names."""
    return {name: pid for name, pid in processes(server).items() if "ApiServer" in name}


def assert_no_less(before: Scrape, after: Scrape) -> None:
    """Totals only ever rise."""
    now = after.counters
    fallen = {key: (value, now.get(key)) for key, value in before.counters.items()}
    fallen = {key: pair for key, pair in fallen.items() if pair[1] is None or pair[1] < pair[0]}
    assert not fallen


def test_a_frontend_is_killed(text_llama: Path, private_temporary_folder: Path) -> None:
    """Its streams break off, the other's go on, another takes its place; all is accounted for."""
    num, num_tokens = 10, 1200
    with ServerProcess(str(text_llama), *QUIET, "--api-server-count", "2") as server:
        pids = processes(server)

        async def run() -> Scrape:
            async with streams_of_two(server, num, num_tokens) as (running, shares):
                lost, kept = sorted(shares, key=lambda name: shares[name])
                before = await off_loop(scrape, server.url)
                os.kill(pids[lost], signal.SIGKILL)
                ends = await asyncio.gather(*[one.end() for one in running])
                complete = [one for one in ends if one]
                assert len(complete) == shares[kept], shares
                for document in complete:
                    assert document["usage"]["completion_tokens"] == num_tokens
                return before

        before = asyncio.run(run())
        wait_until(lambda: len(who_answers(server)) == 2, "nobody takes its place")
        assert_answers(server)
        # Of the others a scrape knows what they wrote last, at most a second ago.
        wait_until(
            lambda: scrape(server.url).total("requests_in_flight") == 0, "requests in flight"
        )
        seen = scrape(server.url)
        assert_no_less(before, seen)
        check_arrivals(seen)
        # What a frontend has counted since it last wrote, at most a second, dies with it.
        assert seen.total("requests_arrived_total") >= num // 2
        wait_until(
            lambda: post(server, "reset_prefix_cache").status_code == 200,
            "the lost requests still run in the core",
        )
        pids |= processes(server)
        assert server.stop() == 0
        assert_nothing_left(pids, private_temporary_folder)


def who_answers(server: ServerProcess) -> set[int]:
    """Frontends that a few connections, all at once, have come to."""
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            client = stack.enter_context(httpx.Client())
            assert client.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
        return {
            pid for pid in frontends_of(server).values() if num_connections(pid, server.port) > 0
        }


@pytest.mark.slow
def test_a_frontend_is_stopped_and_goes_on(text_llama: Path) -> None:
    """The other's streams and new requests do not notice; its own go on afterwards."""
    with ServerProcess(str(text_llama), *QUIET, "--api-server-count", "2") as server:
        pids = processes(server)

        async def run() -> None:
            async with streams_of_two(server, 16, 250) as (running, shares):
                name = min(shares, key=lambda one: shares[one])
                with stopped(pids[name]):
                    await until(
                        lambda: sum(one.answer.done() for one in running) >= 16 - shares[name]
                    )
                    assert not all(one.answer.done() for one in running) or not shares[name]
                    for _ in range(5):
                        await off_loop(assert_answers, server)
                    assert await off_loop(server.health) == 200
                for one in running:
                    await one.assert_complete()

        asyncio.run(run())
        wait_until(  # what a scrape says of the other frontend is at most a second old
            lambda: scrape(server.url).total("generation_tokens_total") == 16 * 250 + 5 * 3
        )
        seen = scrape(server.url)
        check_arrivals(seen)
        for _ in range(12):  # whoever answers
            before, seen = seen, scrape(server.url)
            assert_no_less(before, seen)


@pytest.mark.slow
def test_frontends_that_die_again_and_again_end_the_server(
    text_llama: Path, private_temporary_folder: Path
) -> None:
    with ServerProcess(str(text_llama), *QUIET, "--api-server-count", "2") as server:
        pids: dict[str, int] = processes(server)
        killed: set[int] = set()
        deadline_s = time.monotonic() + PATIENCE_S
        while server.process.poll() is None:
            assert time.monotonic() < deadline_s, server.log()
            for name, pid in processes(server).items():
                pids[f"{name} {pid}"] = pid
                if "ApiServer" in name and pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            time.sleep(0.1)
        assert server.process.returncode not in (0, None)
        assert 6 <= len(killed) <= 8
        assert "again and again" in server.log()
        assert_nothing_left(pids, private_temporary_folder)


@pytest.mark.slow
def test_a_frontend_that_cannot_be_replaced(text_llama: Path, tmp_path: Path) -> None:
    """The other serves on, until it can be."""
    model, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(text_llama, model)
    with ServerProcess(str(model), *QUIET, "--api-server-count", "2") as server:
        model.rename(away)
        os.kill(frontends_of(server)["ApiServer_2"], signal.SIGKILL)
        while server.log().count("does not stay up") < 3:  # at once, a second and two later
            assert_answers(server)
            assert server.health() == 200
            time.sleep(0.1)
        away.rename(model)
        wait_until(lambda: len(who_answers(server)) == 2, "nobody takes its place")
        assert "Traceback" not in server.log()
        assert server.stop() == 0


@pytest.mark.slow
def test_a_signal_while_a_frontend_is_replaced_over_a_core_that_hangs(
    text_llama: Path, private_temporary_folder: Path
) -> None:
    with ServerProcess(str(text_llama), *QUIET, "--api-server-count", "2") as server:
        pids = processes(server)
        os.kill(pids["EngineCore"], signal.SIGSTOP)
        os.kill(pids["ApiServer_2"], signal.SIGKILL)
        wait_until(lambda: len(frontends_of(server)) == 2, "nobody takes its place")
        time.sleep(5.0)  # it waits for the core by now
        assert server.stop() == 0  # the core gets the time to end that it always does
        assert_nothing_left(pids, private_temporary_folder)


@pytest.mark.slow
@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_frontend_that_is_stopped_does_not_keep_the_server_from_ending(
    num_signals: int, text_llama: Path, private_temporary_folder: Path
) -> None:
    timeout_s = 1 if num_signals == 1 else 2 * PATIENCE_S
    flags = ("--api-server-count", "2", "--shutdown-timeout", str(timeout_s))
    with ServerProcess(str(text_llama), *QUIET, *flags) as server:
        pids = processes(server)
        os.kill(pids["ApiServer_2"], signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert server.process.poll() is None
        if num_signals == 2:
            assert server.stop() == 128 + signal.SIGTERM
        else:
            assert server.process.wait(PATIENCE_S) == 0
        assert_nothing_left(pids, private_temporary_folder)


# -- the server ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_frontends", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_server_is_killed(
    num_frontends: int, text_llama: Path, private_temporary_folder: Path
) -> None:
    """No process, and no socket folder, outlives it."""
    flags = ("--api-server-count", str(num_frontends))
    with ServerProcess(str(text_llama), *QUIET, *flags) as server:
        pids = processes(server)

        async def run() -> None:
            async with streams(server.port, 12) as running:
                server.process.kill()
                for one in running:  # a frontend that the supervisor had may still get to say it
                    document = await one.end()
                    if document:
                        assert (num_frontends, document["error"]["code"]) == (2, "engine_dead")

        asyncio.run(run())
        server.process.wait()
        assert_nothing_left(pids, private_temporary_folder)


@pytest.mark.parametrize("num_frontends", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sigterm_with_fifty_streams(
    num_frontends: int, text_llama: Path, private_temporary_folder: Path
) -> None:
    """Each gets all its tokens; nobody new is let in."""
    flags = ("--api-server-count", str(num_frontends), "--shutdown-timeout", str(PATIENCE_S))
    with ServerProcess(str(text_llama), *QUIET, *flags) as server:
        pids = processes(server)

        async def run() -> None:
            async with streams(server.port, 50, 120) as running:
                server.process.send_signal(signal.SIGTERM)
                for one in running:
                    await one.assert_complete()

        asyncio.run(run())
        assert server.process.wait(PATIENCE_S) == 0
        assert_nothing_left(pids, private_temporary_folder)
        assert "Traceback" not in server.log()


# -- telemetry -------------------------------------------------------------------------------------


def test_a_full_disk_while_a_recording_runs(text_llama: Path, tmp_path: Path) -> None:
    """No file of server and core may grow any more: writes fail as on a full disk."""
    with ServerProcess(str(text_llama), *QUIET, "--trace-dir", str(tmp_path)) as server:
        expected = ask(server, 40).json()["choices"][0]["text"]
        for pid in processes(server).values():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

        def loss() -> float:
            seen = scrape(server.url)
            return sum(
                seen.values(f"telemetry_{what}_total", "sink").get("journal", 0)
                for what in ("errors", "drops")
            )

        deadline_s = time.monotonic() + PATIENCE_S
        while loss() < 2:
            answer = ask(server, 40)
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["text"] == expected
            assert time.monotonic() < deadline_s, "what was not written is not counted"
        assert server.health() == 200
        check_arrivals(scrape(server.url))
        told = post(server, "stop_trace").json()
        assert "ended early: it could not be written: [Errno 27] File too large" in told["note"]
        assert server.stop() == 0


@pytest.mark.parametrize("fault", ["gone", pytest.param("hanging", marks=pytest.mark.slow)])
def test_a_receiver_that_is_gone_or_hangs(fault: str, text_llama: Path) -> None:
    """Requests take their time and no longer; what could not be sent is counted."""
    # Connections end with a receiver over gRPC; over HTTP those that are open go on.
    receivers = grpc_receiver() if fault == "gone" else http_receiver()
    receiver = next(receivers)
    environment = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc" if fault == "gone" else "http/protobuf",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    flags = ("--otlp-traces-endpoint", receiver.endpoint)
    try:
        with ServerProcess(str(text_llama), *QUIET, *flags, env=environment) as server:
            assert_answers(server)
            receiver.wait_for(lambda: bool(receiver.requests()))
            if fault == "gone":
                receivers.close()
            else:
                receiver.delay_s = 4 * PATIENCE_S  # nobody here would wait for that

            def lost() -> float:
                seen = scrape(server.url)
                return seen.values("telemetry_drops_total", "sink")["opentelemetry"]

            deadline_s = time.monotonic() + PATIENCE_S
            while not lost():
                assert_answers(server)
                assert time.monotonic() < deadline_s, "what is lost is not counted"
            assert server.health() == 200
            assert server.stop() == 0
            log = server.log()
            assert "Traceback" not in log
            assert "does not end" not in log, "a thread that has nothing to do is in the way"
    finally:
        receivers.close()
