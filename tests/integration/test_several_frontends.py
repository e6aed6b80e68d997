"""Several clients of one core: who gets what, who leaves, and what the metrics say."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, AsyncLLM, EngineDeadError, RequestOutput, RequestOutputKind, SamplingParams
from engine.config import EngineConfig
from engine.server.metrics_share import MetricsShare
from engine.transport.core_process import CoreProcess
from engine.transport.mp_client import SyncMPClient
from engine.types.attachment import CoreAttachment
from instrumentation import NULL, Metric
from tests.integration.conftest import SMALL
from tests.integration.reference import varied_text

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
        lambda: CoreProcess(config, run_dir=None, obs=NULL, num_frontends=num), timeout_s=60
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
            one._handler.cancel()
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
            deadline = time.monotonic() + 10
            while not await two.reset_prefix_cache():  # False while anybody's requests run
                assert time.monotonic() < deadline
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
            assert time.monotonic() - killed_s < 2
            for llm in owned.frontends:
                with pytest.raises(EngineDeadError):
                    await llm.submit("Once", LONG)
                assert total(llm.get_metrics(), "engine_up") == 0

    asyncio.run(run())
