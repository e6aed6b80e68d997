"""Answers of the server over streams that a test feeds: ends, failures, clients that leave."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.errors import EngineDeadError
from engine.frontend.output_stream import RequestStream
from engine.server.http.errors import ApiError
from engine.server.http.served import Phase
from engine.server.openai.completion_answers import (
    CompletionCollector,
    CompletionPlan,
    CompletionWriter,
)
from engine.server.openai.streaming import EventStream, GenerationResponse, WholeAnswer
from engine.types.outputs import CompletionOutput, RequestOutput
from engine.types.sampling import RequestOutputKind


class FakeState:
    """As much of a server's state as answers look at."""

    phase = Phase.READY


class Client:
    """The other end of ASGI: keeps what is sent, leaves when told to."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.messages.append(message)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    def events(self) -> list[Any]:
        """The documents of the events; the last one is the end's mark."""
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[len("data: ") :]) for line in lines[:-1]]


class Bench:
    """Streams, the answer that is made of them, and the client."""

    def __init__(self, num_prompts: int, *, whole: bool = False, n: int = 1, **plan: Any) -> None:
        kind = RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA
        self.closed: list[str] = []
        self.streams = [
            RequestStream(str(i), kind, on_close=self.closed.append) for i in range(num_prompts)
        ]
        self.state = FakeState()
        self.scope: dict[str, Any] = {"type": "http", "method": "POST", "headers": []}
        self.client = Client()
        made = make_plan(n=n, **plan)
        self.answer: GenerationResponse
        if whole:
            self.answer = WholeAnswer(
                self.state,  # type: ignore[arg-type]
                self.streams,
                CompletionCollector(made, num_prompts),
                {},
            )
        else:
            self.answer = EventStream(
                self.state,  # type: ignore[arg-type]
                self.streams,
                CompletionWriter(made),
                {},
            )

    async def run(self, feed: Callable[[], Awaitable[None]]) -> None:
        """Answer while the streams are fed; nothing may be left running."""
        before = asyncio.all_tasks()
        task = asyncio.create_task(self.answer(self.scope, self.client.receive, self.client.send))
        await feed()
        await asyncio.wait_for(task, 5)
        await settle()
        assert asyncio.all_tasks() == before
        assert sorted(self.closed) == sorted(stream.request_id for stream in self.streams)

    @property
    def outcome(self) -> str | None:
        return self.scope["state"].get("outcome")


def make_plan(**changes: Any) -> CompletionPlan:
    values: dict[str, Any] = {
        "response_id": "cmpl-1",
        "created": 7,
        "model": "m",
        "n": 1,
        "tokenizer": None,
        "echo": False,
        "drops_output": False,
        "num_logprobs": None,
        "wants_prompt_logprobs": False,
        "returns_token_ids": False,
        "names_tokens_by_id": False,
        "skips_special_tokens": True,
        "truncates": False,
        "include_usage": True,
        "continuous_usage": False,
    }
    return CompletionPlan(**(values | changes))


def output(
    text: str, *, index: int = 0, reason: str | None = None, finished: bool | None = None
) -> RequestOutput:
    completion = CompletionOutput(index, text, [1], finish_reason=reason)
    done = reason is not None if finished is None else finished
    return RequestOutput("r", "p", [5, 6], [completion], done, num_cached_tokens=1)


async def settle() -> None:
    """Let every task get as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def texts(events: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for one in events:
        for choice in one["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def test_deltas_come_as_they_are_made() -> None:
    async def test() -> None:
        bench = Bench(1)

        async def feed() -> None:
            for number, text in enumerate(["a", 'b"\n', "é🙂"]):
                bench.streams[0].slot.put(output(text))
                await settle()
                assert len(bench.client.messages) == number + 2
            bench.streams[0].slot.put(output("", reason="stop"))

        await bench.run(feed)
        events = bench.client.events()
        assert texts(events) == {0: 'ab"\né🙂'}
        assert events[-1]["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        assert bench.scope["state"]["num_output_tokens"] == 4

    asyncio.run(test())


def test_plain_and_full_events_have_one_form() -> None:
    """The parts encoded in advance make the same document as the slow way."""

    async def test() -> None:
        bench = Bench(1)

        async def feed() -> None:
            for text in "ab":
                bench.streams[0].slot.put(output(text))
                await settle()
            bench.streams[0].slot.put(output("c", reason="length"))

        await bench.run(feed)
        first, second, last, usage = bench.client.events()
        assert first.keys() == second.keys() == last.keys() == usage.keys()
        assert list(first) == list(second)
        assert first["choices"][0] | {"text": "b"} == second["choices"][0]
        assert list(second["choices"][0]) == list(last["choices"][0])

    asyncio.run(test())


def test_prompts_and_samples_have_their_index() -> None:
    async def test() -> None:
        bench = Bench(2, n=2)

        async def feed() -> None:
            for number in (1, 0):
                for index in (1, 0):
                    bench.streams[number].slot.put(output(f"{number}{index}", index=index))
                    await settle()
                for index in (1, 0):
                    bench.streams[number].slot.put(
                        output("!", index=index, reason="stop", finished=index == 0)
                    )
                    await settle()

        await bench.run(feed)
        assert texts(bench.client.events()) == {0: "00!", 1: "01!", 2: "10!", 3: "11!"}

    asyncio.run(test())


def test_who_stalls_gets_everything_in_few_events() -> None:
    async def test() -> None:
        bench = Bench(1)

        async def feed() -> None:
            bench.streams[0].slot.put(output("0"))
            await settle()
            bench.client.reads.clear()
            for number in range(1, 100):
                bench.streams[0].slot.put(output(str(number % 10)))
                await settle()
            bench.client.reads.set()
            await settle()
            bench.streams[0].slot.put(output("", reason="stop"))

        await bench.run(feed)
        assert texts(bench.client.events())[0] == "0123456789" * 10
        assert len(bench.client.messages) <= 5
        assert bench.scope["state"]["num_output_tokens"] == 101

    asyncio.run(test())


@pytest.mark.parametrize("whole", [False, True])
def test_what_fails_before_the_answer_has_a_status(whole: bool) -> None:
    async def test() -> None:
        bench = Bench(2, whole=whole)

        async def feed() -> None:
            await settle()
            bench.streams[1].fail(EngineDeadError("killed"))

        await bench.run(feed)
        assert bench.client.status == 503
        assert json.loads(bench.client.body)["error"]["code"] == "engine_dead"

    asyncio.run(test())


def test_what_fails_in_mid_stream_is_an_event() -> None:
    async def test() -> None:
        bench = Bench(2)

        async def feed() -> None:
            bench.streams[0].slot.put(output("a"))
            await settle()
            bench.streams[1].fail(EngineDeadError("killed"))

        await bench.run(feed)
        assert bench.client.status == 200
        *texts_before, error = bench.client.events()
        assert texts(texts_before) == {0: "a"}
        assert error["error"]["code"] == "engine_dead"
        assert bench.outcome == "engine_error"

    asyncio.run(test())


def test_shutdown_is_not_called_death() -> None:
    async def test() -> None:
        bench = Bench(1)

        async def feed() -> None:
            bench.streams[0].slot.put(output("a"))
            await settle()
            bench.state.phase = Phase.STOPPING
            bench.streams[0].fail(EngineDeadError("shut down"))

        await bench.run(feed)
        assert bench.client.events()[-1]["error"]["code"] == "shutting_down"
        assert bench.outcome == "cancelled"

    asyncio.run(test())


@pytest.mark.parametrize(
    ("kind", "status", "param"), [("input", 400, "structured_outputs.regex"), ("engine", 500, None)]
)
@pytest.mark.parametrize("whole", [False, True])
def test_requests_that_the_engine_gives_up(
    kind: str, status: int, param: str | None, whole: bool
) -> None:
    async def test() -> None:
        bench = Bench(1, whole=whole)

        async def feed() -> None:
            failed = output("", reason="error")
            failed.error = "structured_outputs.regex cannot be used" if param else "it broke"
            failed.error_kind = kind
            bench.streams[0].slot.put(failed)

        await bench.run(feed)
        assert bench.client.status == status
        assert json.loads(bench.client.body)["error"]["param"] == param

    asyncio.run(test())


@pytest.mark.parametrize("whole", [False, True])
def test_who_leaves_ends_all_prompts(whole: bool) -> None:
    async def test() -> None:
        bench = Bench(3, whole=whole)

        async def feed() -> None:
            if not whole:
                bench.streams[0].slot.put(output("a"))
            await settle()
            bench.client.left.set()

        await bench.run(feed)
        assert bench.client.status == (499 if whole else 200)
        assert bench.outcome == "disconnected"

    asyncio.run(test())


def test_an_error_of_ours_says_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        bench = Bench(1, whole=True)

        async def feed() -> None:
            bench.streams[0].fail(ZeroDivisionError("/secret/path"))

        await bench.run(feed)
        assert bench.client.status == 500
        assert b"secret" not in bench.client.body

    asyncio.run(test())


def test_errors_with_a_status_of_their_own_keep_it() -> None:
    async def test() -> None:
        bench = Bench(1, whole=True)

        async def feed() -> None:
            bench.streams[0].fail(ApiError(503, "time is up", headers={"Retry-After": "5"}))

        await bench.run(feed)
        assert bench.client.status == 503
        assert (b"retry-after", b"5") in bench.client.messages[0]["headers"]

    asyncio.run(test())


def test_a_cancelled_answer_leaves_nothing() -> None:
    async def test() -> None:
        bench = Bench(2)
        task = asyncio.create_task(
            bench.answer(bench.scope, bench.client.receive, bench.client.send)
        )
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert sorted(bench.closed) == ["0", "1"]

    asyncio.run(test())
