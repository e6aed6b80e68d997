"""The stream of one request: order, merging while the reader is slow, ends."""

import asyncio
import gc
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from engine.errors import EngineDeadError, EventLoopError
from engine.frontend.output_stream import RequestStream
from engine.types.logprobs import LazyLogprobs, LogprobsLists, LogprobsRow
from engine.types.outputs import CompletionOutput, RequestOutput
from engine.types.sampling import RequestOutputKind

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def output(*completions: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", "prompt", [1, 2], list(completions), finished)


def deltas(num_samples: int, num_tokens: int, generator: random.Random) -> list[RequestOutput]:
    """One token an output, samples in random order; the last output of each says stop."""
    order = [index for index in range(num_samples) for _ in range(num_tokens)]
    generator.shuffle(order)
    sent = [0] * num_samples
    outputs = []
    for position, index in enumerate(order):
        sent[index] += 1
        token_id = 100 * index + sent[index]
        reason = "stop" if sent[index] == num_tokens else None
        outputs.append(
            output(
                CompletionOutput(index, f"<{token_id}>", [token_id], finish_reason=reason),
                finished=position == len(order) - 1,
            )
        )
    return outputs


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_reader_gets_every_token_once_and_in_order(seed: int) -> None:
    generator = random.Random(seed)
    num_samples, num_tokens = generator.randint(1, 3), generator.randint(1, 30)
    closed: list[str] = []

    async def run() -> dict[int, list[CompletionOutput]]:
        stream = RequestStream("r", DELTA, on_close=closed.append)

        async def write() -> None:
            for one in deltas(num_samples, num_tokens, generator):
                stream.slot.put(one)
                if generator.random() < 0.5:
                    await asyncio.sleep(0)

        writing = asyncio.create_task(write())
        seen: dict[int, list[CompletionOutput]] = {}
        async for one in stream:
            for completion in one.outputs:
                seen.setdefault(completion.index, []).append(completion)
            if generator.random() < 0.3:
                await asyncio.sleep(0.001)
        await writing
        return seen

    seen = asyncio.run(run())
    assert closed == ["r"]
    assert seen.keys() == set(range(num_samples))
    for index, pieces in seen.items():
        token_ids = [100 * index + number for number in range(1, num_tokens + 1)]
        assert [token for piece in pieces for token in piece.token_ids] == token_ids
        assert "".join(piece.text for piece in pieces) == "".join(f"<{t}>" for t in token_ids)
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]


def test_of_cumulative_outputs_the_last_counts() -> None:
    async def run() -> list[RequestOutput]:
        stream = RequestStream("r", CUMULATIVE, on_close=lambda _: None)
        stream.slot.put(output(CompletionOutput(0, "a", [1]), CompletionOutput(1, "x", [7])))
        stream.slot.put(
            output(CompletionOutput(0, "ab", [1, 2], finish_reason="stop"), finished=True)
        )
        return [one async for one in stream]

    (only,) = asyncio.run(run())
    texts = {completion.index: completion.text for completion in only.outputs}
    assert (texts, only.finished) == ({0: "ab", 1: "x"}, True)


def test_an_error_comes_behind_what_was_there_before_it() -> None:
    async def run() -> None:
        closed: list[str] = []
        stream = RequestStream("r", DELTA, on_close=closed.append)
        stream.slot.put(output(CompletionOutput(0, "a", [1])))
        stream.fail(EngineDeadError("gone"))
        assert (await anext(stream)).outputs[0].text == "a"
        with pytest.raises(EngineDeadError, match="gone"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert closed == ["r"]

    asyncio.run(run())


def test_closing_twice_tells_once() -> None:
    closed: list[str] = []
    stream = RequestStream("r", DELTA, on_close=closed.append)
    stream.close()
    stream.close()
    assert closed == ["r"]


def test_what_comes_behind_an_error_does_not_keep_it_from_a_slow_reader() -> None:
    async def run() -> None:
        stream = RequestStream("r", DELTA, on_close=lambda _: None)
        stream.slot.put(output(CompletionOutput(0, "a", [1])))
        stream.fail(EngineDeadError("shut down"))
        for token_id in range(2, 50):  # the engine goes on until the abort has reached it
            stream.slot.put(output(CompletionOutput(0, "b", [token_id])))
        assert (await anext(stream)).outputs[0].token_ids == [1]
        stream.slot.put(output(CompletionOutput(0, "b", [50])))
        with pytest.raises(EngineDeadError, match="shut down"):
            await anext(stream)

    asyncio.run(run())


class Counted(list[int]):
    """Token ids that count how many have been looked at."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        Counted.num_read += len(self)
        return super().__iter__()


@pytest.mark.parametrize("num_tokens", [100, 1000])
def test_a_reader_that_stalls_costs_no_more_than_what_it_has_not_read(num_tokens: int) -> None:
    async def run() -> None:
        stream = RequestStream("r", DELTA, on_close=lambda _: None)
        for token_id in range(num_tokens):
            lists = LogprobsLists(np.array([[token_id]]), np.array([[-1.0]]), np.array([1]))
            logprobs = LazyLogprobs([LogprobsRow(lists, 0, 1, None)])
            stream.slot.put(
                output(CompletionOutput(0, ".", Counted([token_id]), logprobs=logprobs))
            )
        (completion,) = (await anext(stream)).outputs
        assert completion.token_ids == list(range(num_tokens))
        assert Counted.num_read <= 3 * num_tokens
        assert isinstance(completion.logprobs, LazyLogprobs)
        # No position has been made yet: the event loop has better things to do.
        assert [type(row) for row in completion.logprobs._rows] == [LogprobsRow] * num_tokens
        positions = [list(position) for position in completion.logprobs if position is not None]
        assert positions == [[token_id] for token_id in range(num_tokens)]

    Counted.num_read = 0
    asyncio.run(run())


def test_an_error_is_merged_with_its_kind() -> None:
    async def run() -> RequestOutput:
        stream = RequestStream("r", DELTA, on_close=lambda _: None)
        failed = output(CompletionOutput(0, "", [], finish_reason="error"))
        failed.error, failed.error_kind = "no such grammar", "input"
        stream.slot.put(failed)
        stream.slot.put(output(CompletionOutput(1, "b", [1], finish_reason="stop"), finished=True))
        return await anext(stream)

    merged = asyncio.run(run())
    assert (merged.error, merged.error_kind) == ("no such grammar", "input")


def test_a_second_reader_is_told_and_the_first_gets_what_comes() -> None:
    async def run() -> None:
        stream = RequestStream("r", DELTA, on_close=lambda _: None)
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(EventLoopError, match="another task is reading"):
            await anext(stream)
        stream.slot.put(output(CompletionOutput(0, "a", [1])))
        assert (await first).outputs[0].text == "a"
        # Readers may take turns, and one that was cancelled reads no more.
        given_up = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        stream.slot.put(output(CompletionOutput(0, "b", [2])))
        assert (await anext(stream)).outputs[0].text == "b"

    asyncio.run(run())


def test_whoever_waits_for_a_stream_that_is_closed_sees_its_end() -> None:
    async def run() -> None:
        closed: list[str] = []
        stream = RequestStream("r", DELTA, on_close=closed.append)
        reading = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0)
        stream.close()
        assert await asyncio.wait_for(reading, 5) is None
        assert closed == ["r"]

    asyncio.run(run())


def test_a_stream_is_read_on_its_own_loop() -> None:
    loop = asyncio.new_event_loop()
    stream = RequestStream("r", DELTA, on_close=lambda _: None, loop=loop)
    stream.slot.put(output(CompletionOutput(0, "a", [1])))

    async def read() -> RequestOutput:
        return await anext(stream)

    with pytest.raises(EventLoopError, match="'r' belongs to another event loop"):
        asyncio.run(read())
    assert loop.run_until_complete(read()).outputs[0].text == "a"
    loop.close()
    closed: list[str] = []
    dropped = RequestStream("r", DELTA, on_close=closed.append, loop=loop)
    del dropped  # nobody is there who could be told: no error
    assert not closed


@pytest.mark.parametrize("has_been_read", [False, True])
def test_a_stream_that_is_dropped_is_closed_by_its_loop(has_been_read: bool) -> None:
    async def run() -> None:
        closed: list[tuple[str, int]] = []
        stream = RequestStream(
            "r",
            DELTA,
            on_close=lambda name: closed.append((name, threading.get_ident())),
            loop=asyncio.get_running_loop(),
        )
        stream.slot.put(output(CompletionOutput(0, "a", [1], finish_reason="stop"), finished=True))
        if has_been_read:
            await anext(stream)
            assert closed == [("r", threading.get_ident())]
        cycle: list[object] = [stream]
        cycle.append(cycle)
        slot = stream.slot
        del stream, cycle
        await asyncio.to_thread(gc.collect)
        await asyncio.sleep(0)
        assert closed == [("r", threading.get_ident())]
        slot.fail(EngineDeadError("late"))  # the writer need not know

    asyncio.run(run())


def test_the_slot_alone_keeps_the_task_that_waits() -> None:
    async def run() -> None:
        closed: list[str] = []
        texts: list[str] = []

        async def read(stream: RequestStream) -> None:
            texts.append((await anext(stream)).outputs[0].text)

        stream = RequestStream("r", DELTA, on_close=closed.append)
        slot = stream.slot
        asyncio.get_running_loop().create_task(read(stream))
        del stream
        await asyncio.sleep(0)
        gc.collect()
        assert not closed
        slot.put(output(CompletionOutput(0, "a", [1])))
        await asyncio.sleep(0.01)
        assert texts == ["a"]
        assert closed == ["r"], "behind that nobody has it any more"

    asyncio.run(run())
