"""The client on an event loop: outputs, utility calls, death, and loops that are not its own."""

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from engine.errors import ConfigError, EngineDeadError, EventLoopError, IsinglassError
from engine.transport.async_mp_client import AsyncMPClient
from engine.types.messages import EngineCoreOutputs
from tests.support.async_core import PlayedCore
from tests.waiting import PATIENCE_S


@pytest.fixture
def core() -> Iterator[PlayedCore]:
    core = PlayedCore()
    yield core
    core.close()


def on_loop(work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await work()

    return asyncio.run(run())


async def sent_calls(core: PlayedCore, num: int) -> list[tuple[int, str, list[Any]]]:
    calls: list[tuple[int, str, list[Any]]] = []
    while len(calls) < num:
        calls += core.calls()
        await asyncio.sleep(0.001)
    return calls


def test_outputs_come_in_order_and_answers_find_their_calls(core: PlayedCore) -> None:
    async def run() -> None:
        client = core.client()
        core.send(EngineCoreOutputs(timestamp_ns=1))  # before anybody listens
        client.attach()
        calls = [asyncio.create_task(client.call_utility_async("ask", n)) for n in range(3)]
        for call_id, method, (number,) in reversed(await sent_calls(core, 3)):
            assert method == "ask"
            core.answer(call_id, {"of": number}) if number else core.answer(
                call_id, failure="ConfigError: no"
            )
            core.send(EngineCoreOutputs(timestamp_ns=10 + number))
        with pytest.raises(ConfigError, match="no"):
            await calls[0]
        assert await asyncio.gather(*calls[1:]) == [{"of": 1}, {"of": 2}]
        stamps = [(await client.get_output_async()).timestamp_ns for _ in range(4)]
        assert stamps == [1, 12, 11, 10]
        # One that nobody waits for any more is no news for the others.
        lost = asyncio.create_task(client.call_utility_async("ask"))
        ((call_id, *_),) = await sent_calls(core, 1)
        lost.cancel()
        core.answer(call_id)
        core.send(EngineCoreOutputs(timestamp_ns=20))
        assert (await client.get_output_async()).timestamp_ns == 20
        client.detach()

    on_loop(run)


def test_death_reaches_whoever_waits_behind_what_was_said_before(core: PlayedCore) -> None:
    async def run() -> None:
        client = core.client()
        client.attach()
        calling = asyncio.create_task(client.call_utility_async("ask"))
        taking = asyncio.create_task(client.get_output_async())
        await sent_calls(core, 1)
        core.send(EngineCoreOutputs(timestamp_ns=1))
        core.send(EngineCoreOutputs(timestamp_ns=2))
        core.die("a bug")
        assert (await taking).timestamp_ns == 1
        with pytest.raises(EngineDeadError, match="a bug"):
            await calling
        assert (await client.get_output_async()).timestamp_ns == 2
        for _ in range(3):  # no raise leaves its frames in the error for the next one
            with pytest.raises(EngineDeadError, match="a bug") as caught:
                await client.get_output_async()
            assert len(caught.traceback) <= 3
        with pytest.raises(EngineDeadError, match="a bug"):
            await client.call_utility_async("ask")
        client.detach()
        client.detach()
        with pytest.raises(EngineDeadError, match="a bug"):
            await asyncio.to_thread(client.call_utility, "ask")

    on_loop(run)


def test_a_death_that_takes_long_to_explain_does_not_stop_the_loop(core: PlayedCore) -> None:
    async def run() -> None:
        client = core.client()
        client.attach()
        taking = asyncio.create_task(client.get_output_async())
        core.may_tell_death.clear()
        core.die("a bug")
        await asyncio.sleep(0.05)  # in which the loop sees the death
        assert not taking.done()
        core.may_tell_death.set()
        with pytest.raises(EngineDeadError, match="a bug"):
            await taking
        client.detach()

    on_loop(run)


def test_a_second_task_that_takes_outputs_is_told_so(core: PlayedCore) -> None:
    async def run() -> None:
        client = core.client()
        client.attach()
        taking = asyncio.create_task(client.get_output_async())
        await asyncio.sleep(0)
        with pytest.raises(EventLoopError, match="another task"):
            await client.get_output_async()
        core.send(EngineCoreOutputs(timestamp_ns=1))
        assert (await taking).timestamp_ns == 1
        client.detach()

    on_loop(run)


def test_calls_from_threads_are_made_by_the_loop_which_cannot_wait_for_itself(
    core: PlayedCore,
) -> None:
    async def run() -> AsyncMPClient:
        client = core.client()
        client.attach()
        call = asyncio.create_task(asyncio.to_thread(client.call_utility, "ask", 7))
        ((call_id, method, args),) = await sent_calls(core, 1)
        assert (method, args) == ("ask", [7])
        core.answer(call_id, "told")
        assert await call == "told"
        with pytest.raises(EventLoopError, match="waits for the event loop that makes it"):
            client.call_utility("ask")
        with pytest.raises(EventLoopError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, client.call_utility_async("ask"))
        return client

    client = on_loop(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that of a coroutine that nobody awaits
        for call in (lambda: client.call_utility("ask"), client.get_output):
            with pytest.raises(EventLoopError, match="does not run"):
                call()
        gc.collect()
    assert not core.calls()


def test_what_waits_on_a_loop_that_has_been_closed_does_not_keep_the_client(
    core: PlayedCore,
) -> None:
    client = core.client()
    loop = asyncio.new_event_loop()

    async def begin() -> list[asyncio.Task[Any]]:
        client.attach()
        waiting = [
            asyncio.ensure_future(client.get_output_async()),
            asyncio.ensure_future(client.call_utility_async("ask")),
        ]
        await asyncio.sleep(0.01)
        return waiting

    waiting = loop.run_until_complete(begin())
    loop.close()  # and not by asyncio.run, which would have cancelled what waits
    client.detach()
    with pytest.raises(EngineDeadError, match="shut down"):
        client.call_utility("ask")
    with pytest.raises(IsinglassError, match="shut down"):
        on_loop(client.get_output_async)
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # they are lost, on purpose
