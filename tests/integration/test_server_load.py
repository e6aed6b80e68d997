"""Many clients at once, good and bad ones: nothing is lost, and nothing stays behind.

The short load runs on a tiny model, the long one on the embedded model; ISINGLASS_LOAD_SECONDS says
for how long (issue: 300), ISINGLASS_LOAD_STREAMS with how many clients at once.
"""

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import EXACT
from tests.support.load_clients import (
    WHOLE,
    Answer,
    Expected,
    LoadState,
    Wire,
    completion,
    expected_texts,
    run_load,
)
from tests.support.server_facts import (
    Scrape,
    busy_tasks,
    check_arrivals,
    check_idle,
    num_descriptors,
    processes,
    resident_bytes,
    scrape,
)
from tests.support.server_process import SMALL_FLAGS, ServerProcess
from tests.waiting import until, wait_until

LOAD_SECONDS = float(os.environ.get("ISINGLASS_LOAD_SECONDS", "30"))
LOAD_STREAMS = int(os.environ.get("ISINGLASS_LOAD_STREAMS", "256"))

FLAGS = ("--timeout-read-s", "3", "--max-body-bytes", "65536", "--disable-access-log")
"""Limits that clients run into within a test."""
MEBIBYTE = 1 << 20
SERVER_GROWTH_BYTES = 32 * MEBIBYTE
CORE_GROWTH_BYTES = 128 * MEBIBYTE
"""How much more memory a process may hold after a load than after one before it: both remember
some two thousand steps with up to 256 requests each, more than a slow machine makes in minutes."""
FLAT_BYTES = 4 * MEBIBYTE
"""The same once all that is remembered is full."""


@dataclasses.dataclass(frozen=True, slots=True)
class Holdings:
    """What each process of a server holds, by its name."""

    descriptors: dict[str, int]
    resident: dict[str, int]

    @classmethod
    def of(cls, server: ServerProcess) -> "Holdings":
        """As it is now."""
        pids = processes(server)
        return cls(
            {name: num_descriptors(pid) for name, pid in pids.items()},
            {name: resident_bytes(pid) for name, pid in pids.items()},
        )


@pytest.fixture(scope="module")
def server(text_llama: Path) -> Iterator[ServerProcess]:
    """A server of a tiny model."""
    with ServerProcess(str(text_llama), *SMALL_FLAGS, *FLAGS) as running:
        yield running


def load(
    server: ServerProcess, expected: Expected, *, num_visitors: int, seconds: float, seed: int = 0
) -> LoadState:
    return asyncio.run(
        run_load(server.port, expected, num_visitors=num_visitors, seconds=seconds, seed=seed)
    )


def settled(server: ServerProcess) -> Scrape:
    """The metrics once the last client's leaving has been noticed.

    The very scrape that shows it: the one behind it may come from another frontend, whose news of
    this one is a moment older.
    """
    seen: list[Scrape] = []

    def is_settled() -> bool:
        seen[:] = [scrape(server.url)]
        is_idle = seen[0].total("requests_in_flight") == seen[0].total("requests_running") == 0
        return is_idle and seen[0].total("http_requests_in_flight") == 1

    wait_until(is_settled, "requests are in flight after the last client has left")
    return seen[0]


def check_nothing_left(server: ServerProcess, before: Holdings, state: LoadState) -> None:
    """Requests, blocks, descriptors, tasks and memory are back where they were."""
    assert not state.failures, "\n".join(dict.fromkeys(state.failures))[:4000]
    seen = settled(server)
    check_arrivals(seen)
    check_idle(seen)
    for _ in before.descriptors:  # one frontend or another answers
        assert busy_tasks(server.url) == []
    wait_until(
        lambda: Holdings.of(server).descriptors == before.descriptors,
        f"descriptors: {Holdings.of(server).descriptors}, before {before.descriptors}",
    )
    for name, num_bytes in Holdings.of(server).resident.items():
        allowed = CORE_GROWTH_BYTES if name == "EngineCore" else SERVER_GROWTH_BYTES
        grown = num_bytes - before.resident[name]
        assert grown < allowed, f"{name} has grown by {grown / MEBIBYTE:.0f} MiB"
    log = server.log()
    assert "Traceback" not in log, log[-6000:]


def test_a_short_load_of_all_kinds(server: ServerProcess) -> None:
    expected = asyncio.run(expected_texts(server.port))
    load(server, expected, num_visitors=32, seconds=1, seed=1)
    settled(server)
    before = Holdings.of(server)
    state = load(server, expected, num_visitors=48, seconds=6)
    check_nothing_left(server, before, state)
    assert len(state.num_by_kind) == 6, state.num_by_kind
    assert state.num_tokens > 500
    outcomes = scrape(server.url).values("http_request_outcomes_total", "outcome")
    for outcome in ("completed", "client_error", "refused", "disconnected"):
        assert outcomes[outcome] > 0, outcomes
    for outcome in ("server_error", "engine_error", "cancelled"):
        assert outcomes[outcome] == 0, outcomes


@pytest.mark.slow
def test_a_reader_that_stalls_gets_everything_later(server: ServerProcess) -> None:
    """It reads nothing until the engine is done; what it has not read is merged, not queued.

    The answer has some 6 MB, of which the system takes four off the server's hands.
    """
    num_tokens, num_samples = 1000, 8

    async def run() -> None:
        async with await Wire.open(server.port, receive_buffer_bytes=2048) as wire:
            await wire.send(
                completion("Once", num_tokens, logprobs=20, n=num_samples, temperature=1)
            )
            await wire.read_some()
            await until(lambda: not scrape(server.url).total("requests_in_flight"))
            assert scrape(server.url).total("http_requests_in_flight") == 2, "nothing held it up"
            check_merged(await wire.read_answer(), num_tokens, num_samples)

    asyncio.run(run())
    check_arrivals(settled(server))
    assert busy_tasks(server.url) == []


def check_merged(answer: Answer, num_tokens: int, num_samples: int) -> None:
    assert (answer.status, answer.is_complete) == (200, True)
    documents = [json.loads(one) for one in answer.events[:-1]]
    assert documents[-1]["usage"]["completion_tokens"] == num_tokens * num_samples
    choices = [one["choices"][0] for one in documents if one["choices"]]
    for sample in range(num_samples):
        own = [one for one in choices if one["index"] == sample]
        parts = [len(one["logprobs"]["tokens"]) for one in own if one["logprobs"]]
        assert sum(parts) == num_tokens
        assert max(parts) > 50, "what was not read was merged"
        assert [one["finish_reason"] for one in own if one["finish_reason"]] == ["length"]


@pytest.mark.slow
def test_memory_is_flat_over_thousands_of_requests(text_llama: Path) -> None:
    """Once all that is remembered is full: a thousand requests and some two thousand steps."""

    async def ask_often(port: int, num_requests: int) -> None:
        async def ask(number: int) -> None:
            async with room, await Wire.open(port) as wire:
                await wire.send(completion(f"Request {number}", 2, **WHOLE))
                assert (await wire.read_answer()).status == 200

        room = asyncio.Semaphore(32)
        await asyncio.gather(*[ask(number) for number in range(num_requests)])

    with ServerProcess(str(text_llama), *SMALL_FLAGS, *FLAGS) as server:
        while scrape(server.url).total("steps_total") < 2500:
            asyncio.run(ask_often(server.port, 1000))
        before = Holdings.of(server)
        asyncio.run(ask_often(server.port, 3000))
        after = Holdings.of(server)
        assert after.descriptors == before.descriptors
        for name, num_bytes in after.resident.items():
            grown = num_bytes - before.resident[name]
            assert grown < FLAT_BYTES, f"{name} has grown by {grown / MEBIBYTE:.1f} MiB"


@pytest.mark.slow
@pytest.mark.parametrize("num_frontends", [1, 2])
def test_hundreds_of_streams_for_minutes(num_frontends: int) -> None:
    flags = ("--kv-cache-memory-bytes", str(512 << 20), "--api-server-count", str(num_frontends))
    with ServerProcess("--dtype", EXACT["dtype"], *flags, *FLAGS) as server:
        expected = asyncio.run(expected_texts(server.port))
        load(server, expected, num_visitors=LOAD_STREAMS, seconds=LOAD_SECONDS / 3, seed=1)
        settled(server)
        before = Holdings.of(server)
        began_s = time.monotonic()
        state = load(server, expected, num_visitors=LOAD_STREAMS, seconds=LOAD_SECONDS)
        report(state, time.monotonic() - began_s, before, Holdings.of(server))
        check_nothing_left(server, before, state)
        assert state.num_by_kind["behave"] >= LOAD_STREAMS / 2


def report(state: LoadState, seconds: float, before: Holdings, after: Holdings) -> None:
    """Figures for whoever runs this with `-s`."""
    first_token_s = sorted(state.first_token_s)
    grown = {
        name: f"{(after.resident[name] - num_bytes) / MEBIBYTE:+.0f} MiB"
        for name, num_bytes in before.resident.items()
    }
    print(
        f"\n{seconds:.0f} s, {dict(state.num_by_kind)}, {state.num_tokens} tokens checked, "
        f"{state.num_merged_events} merged events, first token p50 "
        f"{first_token_s[len(first_token_s) // 2]:.2f} s, {grown}, {after.descriptors}"
    )
