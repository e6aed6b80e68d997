"""When the generator sends: under a clock that the test moves, to a server that is not there."""

import asyncio
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
    prompts: Any = SimpleNamespace(prompt=lambda index: None)
    monkeypatch.setattr(runner, "request_body", lambda prompt, settings, model: b"{}")
    client: Any = FakeClient(clock)

    async def load() -> Any:
        return await runner._Run(settings, prompts, client, "m", asyncio.Event(), None).run()

    run = asyncio.run(load())
    assert len(run.records) == 600
    assert min(one.sent_ns - one.intended_ns for one in run.records) >= 0
