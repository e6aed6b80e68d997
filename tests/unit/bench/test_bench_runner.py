"""When the generator sends: under a clock that the test moves, to a server that is not there."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine.bench import runner
from engine.bench.records import Outcome, RequestRecord
from engine.bench.settings import LoadSettings

EARLY_NS = 500_000
_sleep = asyncio.sleep


class FakeClock:
    """Nanoseconds that pass only in sleep, which wakes up early as a loop of whole milliseconds
    does."""

    def __init__(self) -> None:
        self.now_ns = 7_000_000_000

    async def sleep(self, delay_s: float) -> None:
        """Stands in for `asyncio.sleep`; what is ready runs before the time passes."""
        await _sleep(0)
        delay_ns = round(delay_s * 1e9)
        self.now_ns += delay_ns - EARLY_NS if delay_ns > EARLY_NS else delay_ns


class FakeClient:
    """Notes when it is asked to send, and has its answer at once."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    async def send(
        self, body: bytes, *, index: int, intended_ns: int, request_id: str
    ) -> RequestRecord:
        """As `StreamingClient.send`."""
        return RequestRecord(
            index=index,
            request_id=request_id,
            intended_ns=intended_ns,
            sent_ns=self._clock.now_ns,
            end_ns=self._clock.now_ns,
            outcome=Outcome.OK,
        )


class InterruptedClient(FakeClient):
    """Ctrl-C comes while the first warm-up request is in flight."""

    def __init__(self, clock: FakeClock, stop: asyncio.Event) -> None:
        super().__init__(clock)
        self._stop = stop
        self.indices: list[int] = []

    async def send(
        self, body: bytes, *, index: int, intended_ns: int, request_id: str
    ) -> RequestRecord:
        """As `StreamingClient.send`: a cancelled task gives a record too."""
        self.indices.append(index)
        record = await super().send(
            body, index=index, intended_ns=intended_ns, request_id=request_id
        )
        self._stop.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return replace(record, outcome=Outcome.CANCELLED)
        return record


@pytest.mark.parametrize("max_concurrency", [None, 64])
def test_ctrl_c_in_the_warm_up_begins_no_load(
    monkeypatch: pytest.MonkeyPatch, max_concurrency: int | None
) -> None:
    settings = LoadSettings(
        base_url="http://h", num_prompts=500, num_warmups=1, max_concurrency=max_concurrency
    )
    prompts: Any = SimpleNamespace(prompt=lambda index: None, document=dict)
    monkeypatch.setattr(runner, "request_body", lambda prompt, settings, model: b"{}")

    async def load() -> tuple[Any, list[int]]:
        stop = asyncio.Event()
        client: Any = InterruptedClient(FakeClock(), stop)
        run = await runner._Run(settings, prompts, client, "m", stop, None).run()
        return run, client.indices

    run, indices = asyncio.run(load())
    assert indices == [-1]
    assert run.records == ()
    assert run.interrupted
    assert [record.outcome for record in run.warmups] == [Outcome.CANCELLED]


def test_a_closed_loop_has_no_more_places_than_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LoadSettings(base_url="http://h", num_prompts=3, max_concurrency=2000)
    prompts: Any = SimpleNamespace(prompt=lambda index: None, document=dict)
    monkeypatch.setattr(runner, "request_body", lambda prompt, settings, model: b"{}")
    client: Any = FakeClient(FakeClock())
    num_tasks = []
    send = client.send

    async def counting(*arguments: Any, **options: Any) -> RequestRecord:
        num_tasks.append(len(asyncio.all_tasks()))
        return await send(*arguments, **options)

    client.send = counting

    async def load() -> Any:
        return await runner._Run(settings, prompts, client, "m", asyncio.Event(), None).run()

    assert len(asyncio.run(load()).records) == 3
    assert max(num_tasks) < 10


def test_no_request_is_sent_before_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(
        runner,
        "time",
        SimpleNamespace(perf_counter_ns=lambda: clock.now_ns, process_time=lambda: 0.0),
    )
    monkeypatch.setattr(runner.asyncio, "sleep", clock.sleep)
    settings = LoadSettings(
        base_url="http://127.0.0.1:1", num_prompts=600, request_rate=40.0, num_warmups=0
    )
    prompts: Any = SimpleNamespace(prompt=lambda index: None, document=dict)
    monkeypatch.setattr(runner, "request_body", lambda prompt, settings, model: b"{}")
    client: Any = FakeClient(clock)

    async def load() -> Any:
        return await runner._Run(settings, prompts, client, "m", asyncio.Event(), None).run()

    run = asyncio.run(load())
    assert len(run.records) == 600
    assert min(one.sent_ns - one.intended_ns for one in run.records) >= 0
