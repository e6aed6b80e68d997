"""Several clients of one core: who gets what, who leaves, and what the metrics say; and a server of
two frontends, which is seen, recorded and limited as one."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import LLM, AsyncLLM, EngineDeadError, RequestOutput, RequestOutputKind, SamplingParams
from engine.config import EngineConfig
from engine.server.cluster.metrics_share import MetricsShare
from engine.transport.core_process import CoreProcess
from engine.transport.mp_client import SyncMPClient
from engine.types.attachment import CoreAttachment
from instrumentation import NULL, Metric, Role
from tests.integration.conftest import SMALL
from tests.support.reference import varied_text
from tests.support.server_facts import processes
from tests.support.server_process import SMALL_FLAGS, ServerProcess
from tests.waiting import PATIENCE_S, SOON_S, until, wait_until
from traces.journal_reader import read_run
from traces.perfetto import write_perfetto
from traces.summary import summarize

LONG = SamplingParams(
    temperature=0, max_tokens=30_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)


@dataclasses.dataclass(slots=True)
class OwnedCore:
    """A core, its owner's client, and the frontends that have attached to it."""

    client: SyncMPClient
    frontends: list[AsyncLLM]

    def attachment(self, index: int, *, life: int = 0) -> CoreAttachment:
        core = self.client.core
        return CoreAttachment(
            directory=core.directory,
            client_index=index,
            first_request_num=index * 10_000 + life * 1000,
            core_pid=core.pid,
            began_ns=time.monotonic_ns(),
            death_fd=core.death_read,
            counts_steps=index == 1,
        )


@contextlib.asynccontextmanager
async def core_with_frontends(model: Path, num: int) -> AsyncIterator[OwnedCore]:
    """A core of the model, and so many frontends attached to it."""
    config = EngineConfig.from_kwargs(model=str(model), **SMALL)
    client = SyncMPClient(
        lambda: CoreProcess(config, run_dir=None, obs=NULL, num_frontends=num), timeout_s=PATIENCE_S
    )
    owned = OwnedCore(client, [])
    try:
        for index in range(1, num + 1):
            attachment = owned.attachment(index)
            owned.frontends.append(AsyncLLM(model, attachment=attachment, **SMALL))
        await asyncio.gather(
            asyncio.to_thread(client.wait_ready), *[llm.start() for llm in owned.frontends]
        )
        yield owned
    finally:
        for llm in owned.frontends:
            await llm.shutdown()
        client.shutdown()


async def final(llm: AsyncLLM, prompt: str, params: SamplingParams) -> RequestOutput:
    outputs = [o async for o in llm.generate(prompt, params)]
    return outputs[-1]


def total(snapshot: list[Metric], name: str, **labels: str) -> float:
    return sum(
        metric.value
        for metric in snapshot
        if metric.name == f"isinglass_{name}" and labels.items() <= metric.labels.items()
    )


def test_each_frontend_gets_its_own_outputs_and_the_metrics_add_up(
    text_llama: Path, tmp_path: Path
) -> None:
    prompts = [varied_text(number, 8)[:100] for number in range(12)]
    params = [SamplingParams(temperature=1.0, seed=n, max_tokens=5 + n) for n in range(12)]
    with LLM(text_llama, **SMALL) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    async def run() -> None:
        async with core_with_frontends(text_llama, 2) as owned:
            one, two = owned.frontends
            assert one.config.model.max_model_len == two.config.model.max_model_len
            results = await asyncio.gather(
                *[
                    final(owned.frontends[number % 2], prompt, own)
                    for number, (prompt, own) in enumerate(zip(prompts, params, strict=True))
                ]
            )
            assert [r.outputs[0].token_ids for r in results] == expected
            shares = [
                MetricsShare(str(tmp_path), index, llm.get_metrics)
                for index, llm in enumerate(owned.frontends, 1)
            ]
            # In one process both would have one file; the second stands for another process.
            shares[1]._path = shares[1]._path.with_name(f"metrics.002.{os.getppid()}")
            for share in shares:
                share.write()
            seen = [share.snapshot() for share in shares]
            for snapshot in seen:
                assert total(snapshot, "requests_arrived_total") == 12
                assert total(snapshot, "requests_finished_total") == 12
                assert total(snapshot, "requests_in_flight") == 0
                assert total(snapshot, "engine_up") == 1
                tokens = total(snapshot, "generation_tokens_total")
                assert tokens == sum(len(ids) for ids in expected)
            # Both are told of every step, and one of them counts it.
            steps = [total(list(llm.get_metrics()), "steps_total") for llm in owned.frontends]
            assert steps[0] > 0
            assert steps[1] == 0
            assert total(seen[0], "steps_total") == total(seen[1], "steps_total") == steps[0]

    asyncio.run(run())


def test_what_a_lost_frontend_had_ends_and_another_takes_its_place(text_llama: Path) -> None:
    async def run() -> None:
        async with core_with_frontends(text_llama, 2) as owned:
            one, two = owned.frontends
            lost = [await one.submit("Once", LONG) for _ in range(4)]
            await asyncio.gather(*[anext(stream) for stream in lost])
            kept = await two.submit("Once", LONG.clone(max_tokens=400))
            # As if its process had gone: nobody aborts anything, nobody reads any more.
            assert one._handler is not None
            one._handler._task.cancel()
            one._client.detach()
            one.llm_engine.engine_core.shutdown()
            owned.client.detach_client(1)
            again = AsyncLLM(text_llama, attachment=owned.attachment(1, life=1), **SMALL)
            await again.start()
            output = await final(again, "Again", SamplingParams(temperature=0, max_tokens=5))
            assert len(output.outputs[0].token_ids) == 5
            num_tokens = 0
            async for output in kept:
                num_tokens += len(output.outputs[0].token_ids)
            assert num_tokens == 400
            async with asyncio.timeout(PATIENCE_S):
                while not await two.reset_prefix_cache():  # False while anybody's requests run
                    await asyncio.sleep(0.05)
            await again.shutdown()

    asyncio.run(run())


def test_the_cores_death_reaches_every_frontend(text_llama: Path) -> None:
    async def run() -> None:
        async with core_with_frontends(text_llama, 2) as owned:
            streams = [await llm.submit("Once", LONG) for llm in owned.frontends]
            await asyncio.gather(*[anext(stream) for stream in streams])
            killed_s = time.monotonic()
            os.kill(owned.client.core_pid, signal.SIGKILL)

            async def read(stream: Any) -> None:
                async for _ in stream:
                    pass

            errors = await asyncio.gather(*map(read, streams), return_exceptions=True)
            assert {type(error) for error in errors} == {EngineDeadError}
            assert time.monotonic() - killed_s < SOON_S
            for error in errors:  # each frontend has kept the core's records
                said = re.search(r"isinglass flight show (\S+)", str(error))
                assert said is not None
                assert Path(said[1]).is_file()
                assert "engine_dead" in Path(said[1]).name
            for llm in owned.frontends:
                with pytest.raises(EngineDeadError):
                    await llm.submit("Once", LONG)
                assert total(llm.get_metrics(), "engine_up") == 0

    asyncio.run(run())


# -- two processes ---------------------------------------------------------------------------------

NUM_PLACES, NUM_QUEUED = 4, 4


@pytest.fixture(scope="module")
def server(text_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two frontends over one core, of which each has its own process."""
    flags = ("--api-server-count=2", f"--max-num-seqs={NUM_PLACES}")
    flags += (f"--max-num-queued-reqs={NUM_QUEUED}", "--disable-access-log")
    flags += (f"--trace-dir={tmp_path_factory.mktemp('several')}",)
    with ServerProcess(str(text_llama), *SMALL_FLAGS, *flags) as server:
        yield server


def on_a_connection_of_its_own(method: str, url: str, **options: Any) -> httpx.Response:
    """One request, which either of the frontends may get."""
    with httpx.Client(timeout=PATIENCE_S, verify=False) as client:  # made quickly
        return client.request(method, url, **options)


def complete(server: ServerProcess, name: str, num_tokens: int) -> httpx.Response:
    body = {"prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    return on_a_connection_of_its_own(
        "POST", f"{server.url}/v1/completions", json=body, headers={"x-request-id": name}
    )


def ask_both(server: ServerProcess, prefix: str) -> set[str]:
    """Have each frontend serve a request at least; the engine's ids of all of them."""
    names: set[str] = set()
    by_frontend: set[int] = set()
    while by_frontend != {1, 2}:
        assert len(names) < 60
        name = f"{prefix}-{len(names)}"
        assert complete(server, name, 5).status_code == 200
        names.add(f"cmpl-{name}")
        story = on_a_connection_of_its_own("GET", f"{server.url}/debug/requests/{name}").json()
        (sequence,) = story["sequences"]
        by_frontend.add(sequence["frontend"])
        assert story["frontends"] == {"answered": [1, 2], "silent": []}
    return names


def test_a_recording_has_the_requests_of_all_frontends(server: ServerProcess) -> None:
    def ask(path: str) -> httpx.Response:
        return on_a_connection_of_its_own("POST", f"{server.url}/{path}")

    ended = ask("stop_trace").json()  # what --trace-dir has begun
    assert ended["frontends"] == {"recorded": [1, 2]}
    begun = ask("start_trace").json()
    assert begun["frontends"] == {"recorded": [1, 2]}
    assert begun["run_dir"] != ended["run_dir"]
    names = ask_both(server, "recorded")
    profiles = ask("start_profile").json()["profiles"]
    assert all(one["file"].startswith(begun["run_dir"]) for one in profiles)
    assert ask("stop_profile").status_code == 200
    assert ask("stop_trace").json() == begun
    assert ask("stop_trace").status_code == 409
    run = read_run(begun["run_dir"])
    assert sorted(one.header.role for one in run.processes) == [
        Role.CALLER,
        Role.CALLER,
        Role.CORE,
    ]
    assert {one.request_id for one in run.timelines} == names
    assert {one.request_num for one in run.arrivals} == {one.request_num for one in run.timelines}
    numbers = [step.step for step in run.steps]
    assert len(numbers) == len(set(numbers)) > 5 * len(names) // 2
    drawn = write_perfetto(begun["run_dir"]).read_bytes()
    assert all(name.encode() in drawn for name in (*names, "ApiServer_1", "ApiServer_2"))
    assert b"Caller" not in drawn
    assert summarize(begun["run_dir"]).requests.count == len(names)


def test_a_replacement_records_where_the_others_do(server: ServerProcess) -> None:
    """Not where the server began to, which has ended."""

    def ask(path: str) -> httpx.Response:
        return on_a_connection_of_its_own("POST", f"{server.url}/{path}")

    def both_answer() -> bool:
        told = on_a_connection_of_its_own("GET", f"{server.url}/load").json()
        return told["frontends"]["silent"] == []

    def second_serves() -> bool:
        assert complete(server, "whose", 5).status_code == 200
        story = on_a_connection_of_its_own("GET", f"{server.url}/debug/requests/whose").json()
        return bool(story["sequences"][-1]["frontend"] == 2)

    def replace_second() -> int:
        before = processes(server)["ApiServer_2"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: processes(server).get("ApiServer_2", before) != before, "no other")
        wait_until(both_answer, "it does not answer")
        return processes(server)["ApiServer_2"]

    ask("stop_trace")  # what --trace-dir has begun, if no other test has ended that
    begun = ask("start_trace").json()
    pid = replace_second()
    journal = f"caller.{pid}.journal"
    own = Path(begun["run_dir"]) / journal
    wait_until(own.exists, "the replacement does not join in")
    names = ask_both(server, "replaced")
    assert ask("stop_trace").json() == begun
    run = read_run(begun["run_dir"])
    assert {one.request_id for one in run.timelines} == names
    (title,) = (one.header.title for one in run.processes if one.header.pid == pid)
    assert re.fullmatch(r"ApiServer_2 \(life \d\)", title)
    # Nothing is being recorded any more: another one finds nothing to join.
    pid = replace_second()
    wait_until(second_serves, "it does not serve")
    assert list(own.parent.parent.rglob(f"caller.{pid}.journal")) == []
    assert list(own.parent.parent.rglob(journal)) == [own]


def test_a_page_of_one_frontend_shows_the_requests_of_all(server: ServerProcess) -> None:
    seen: set[str] = set()
    with (
        httpx.Client(timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(1) as thread,
        client.stream("GET", f"{server.url}/live/events") as response,
    ):
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        next(lines)
        names = thread.submit(ask_both, server, "watched")
        for line in lines:
            message = json.loads(line.removeprefix("data: "))
            seen |= {row[1] for key in ("arrived", "ended") for row in message.get(key, ())}
            assert not message.get("silent")
            if names.done() and names.result() <= seen:
                break


def test_the_load_of_one_frontend_is_that_of_all(server: ServerProcess) -> None:
    def wait_for(num: int) -> None:
        wanted = {"server_load": num, "frontends": {"answered": [1, 2], "silent": []}}

        def is_told() -> bool:
            told = on_a_connection_of_its_own("GET", f"{server.url}/load").json()
            return wanted.items() <= told.items()

        wait_until(is_told, f"the load is not {num}")

    body = {"prompt": "Once", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as running:
        for num in range(1, 5):
            # Each on a connection of its own.
            client = running.enter_context(httpx.Client(timeout=PATIENCE_S))
            url = f"{server.url}/v1/completions"
            answer = running.enter_context(client.stream("POST", url, json=body))
            assert answer.status_code == 200
            wait_for(num)
    wait_for(0)


def test_the_queue_is_limited_for_all_frontends_together(server: ServerProcess) -> None:
    """As many as there are places and room to wait get in, wherever they come."""
    body = {"prompt": "Once", "max_tokens": 30_000, "ignore_eos": True}
    num_clients, most = 24, NUM_PLACES + NUM_QUEUED + 1
    num_refusals = dict.fromkeys(range(num_clients), 0)

    async def run() -> None:
        async def ask(number: int) -> None:
            """Whoever is refused comes again: a frontend that has not heard of a step yet may take
            its own requests to wait that run. Whoever is let in waits for the answer."""
            while True:
                answer = await client.post(f"{server.url}/v1/completions", json=body)
                assert answer.status_code == 429
                assert "--max-num-queued-reqs" in answer.text
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                num_refusals[number] += 1
                await asyncio.sleep(0.1)

        def come_again() -> set[int]:
            return {number for number, num in num_refusals.items() if num > before[number]}

        limits = httpx.Limits(max_connections=num_clients)
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
            tasks = [asyncio.create_task(ask(number)) for number in range(num_clients)]
            for _ in range(5):  # by then all are in who may be
                before = dict(num_refusals)
                await until(lambda: len(come_again()) >= num_clients - most)
            await asyncio.sleep(0.5)
            # Two that come within the same microseconds may both be the last one.
            assert num_clients - most <= len(come_again()) <= num_clients - most + 1
            for task in tasks:
                task.cancel()
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in errors), errors

    asyncio.run(run())
    wait_until(lambda: complete(server, "after", 5).status_code == 200, "they still wait")
