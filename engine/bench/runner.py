"""The run: requests go out when they are due, and each that was due leaves a record.

Knows arrivals, the limit on concurrency, warm-up and the end. Does not know what is measured.

Open loop: a request is due by the clock, whatever became of the earlier ones; waiting for a free
place under the limit, or for this process to get round to it, counts against the server's
latency from the intended time. Closed loop: a request is due the moment a place is free.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator

from engine.bench.arrivals import arrival_offsets_ns
from engine.bench.client import StreamingClient, request_body
from engine.bench.prompts import FilePrompts, PromptSource
from engine.bench.records import NEVER_SENT, LoadRun, Outcome, RequestRecord
from engine.bench.settings import LoadSettings

_BACK_OFF_S = 0.1
"""Pause of a closed loop's place after a failure: else a server that refuses would be hammered."""
_MAX_WARMUP_CONCURRENCY = 64
_MAX_ENCODED = 20_000
_MAX_SENT_PER_TURN = 256

Progress = Callable[[int], None]
"""Called after each measured request with the number of those that are over."""


async def run_load(
    settings: LoadSettings,
    prompts: PromptSource,
    *,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[], None] | None = None,
    on_progress: Progress | None = None,
) -> LoadRun:
    """Wait for the server, warm it up, send the load and return what became of it.

    Args:
        settings: where to and how.
        prompts: what to send.
        stop: set it to end early; what is in flight is cancelled, and recorded as such.
        on_ready: called when the server is there, before anything is sent.
        on_progress: called in the event loop, so it must return at once.

    Raises:
        ServerNotReadyError: before anything is measured, the server is not there.
        ConfigError: the prompts do not suit the endpoint.
    """
    async with StreamingClient(settings) as client:
        await client.wait_until_ready()
        model = settings.model or await client.first_model()
        if on_ready is not None:
            on_ready()
        run = _Run(settings, prompts, client, model, stop or asyncio.Event(), on_progress)
        return await run.run()


class _Run:
    """One run under way."""

    def __init__(
        self,
        settings: LoadSettings,
        prompts: PromptSource,
        client: StreamingClient,
        model: str,
        stop: asyncio.Event,
        on_progress: Progress | None,
    ) -> None:
        self._settings = settings
        self._prompts = prompts
        self._client = client
        self._model = model
        self._stop = stop
        self._on_progress = on_progress
        self._records: list[RequestRecord] = []
        self._turns = asyncio.Semaphore(settings.max_concurrency or 1 << 62)
        # Encoded before the clock starts, where their number is known and memory allows.
        num_bodies = min(settings.num_prompts or 1, _MAX_ENCODED)
        self._bodies = [self._encode(index) for index in range(num_bodies)]
        if isinstance(prompts, FilePrompts):
            for prompt in prompts.prompts:  # one that does not suit must not end a load midway
                request_body(prompt, settings, model)

    async def run(self) -> LoadRun:
        await self._until_stopped(self._warm_up())
        warmups, self._records = tuple(self._records), []
        cpu_start, start_ns = time.process_time(), time.perf_counter_ns()
        loop = self._closed_loop if self._settings.closed_loop else self._open_loop
        if not self._stop.is_set():  # else it ends with the warm-up
            await self._until_stopped(loop(start_ns))
        records = tuple(sorted(self._records, key=lambda record: record.index))
        return LoadRun(
            model=self._model,
            records=records,
            warmups=warmups,
            start_ns=start_ns,
            end_ns=max((record.end_ns for record in records), default=time.perf_counter_ns()),
            client_cpu_s=time.process_time() - cpu_start,
            interrupted=self._stop.is_set(),
            settings=self._settings.document()
            | {"model": self._model, "prompts": self._prompts.document()},
        )

    async def _until_stopped(self, work: Coroutine[None, None, None]) -> None:
        """Run to the end, or until told to stop; then everything in flight has left its record."""
        load = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({load, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            load.cancel()  # of no effect on work that is done
            await asyncio.wait({load, stopped})
        if not load.cancelled():
            load.result()

    async def _warm_up(self) -> None:
        remaining = iter(range(-1, -self._settings.num_warmups - 1, -1))
        places = min(self._settings.max_concurrency or _MAX_WARMUP_CONCURRENCY, 1 << 10)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(places, self._settings.num_warmups)):
                group.create_task(self._place(remaining))

    async def _closed_loop(self, start_ns: int) -> None:
        duration_s = self._settings.duration_s
        end_ns = math.inf if duration_s is None else start_ns + duration_s * 1e9

        def indices() -> Iterator[int]:
            limit = self._settings.num_prompts
            index = 0
            while (limit is None or index < limit) and time.perf_counter_ns() < end_ns:
                yield index
                index += 1

        remaining = indices()
        num_places = self._settings.max_concurrency
        assert num_places is not None
        async with asyncio.TaskGroup() as group:
            for _ in range(min(num_places, self._settings.num_prompts or num_places)):
                group.create_task(self._place(remaining))

    async def _place(self, remaining: Iterator[int]) -> None:
        """One place of a closed loop: a request, and when it is over the next."""
        for index in remaining:
            body = self._body(index)
            record = await self._send(index, time.perf_counter_ns(), body)
            if record.outcome is Outcome.CANCELLED:
                return
            if record.outcome is not Outcome.OK:
                await asyncio.sleep(_BACK_OFF_S)

    async def _open_loop(self, start_ns: int) -> None:
        settings = self._settings
        offsets = arrival_offsets_ns(settings.request_rate, settings.burstiness, seed=settings.seed)
        last_ns = math.inf if settings.duration_s is None else settings.duration_s * 1e9
        async with asyncio.TaskGroup() as group:
            for index, offset_ns in enumerate(offsets):
                if offset_ns > last_ns or index == settings.num_prompts:
                    break
                body = self._body(index)
                intended_ns = start_ns + offset_ns
                # All that is due goes out in one turn; streams wait at most for so many.
                if index % _MAX_SENT_PER_TURN == _MAX_SENT_PER_TURN - 1:
                    await asyncio.sleep(0)
                # An event loop may count in milliseconds and wake us early: nothing goes out then.
                while (wait_ns := intended_ns - time.perf_counter_ns()) > 0:
                    await asyncio.sleep(wait_ns / 1e9)
                group.create_task(self._send_in_turn(index, intended_ns, body))

    async def _send_in_turn(self, index: int, intended_ns: int, body: bytes) -> None:
        try:
            await self._turns.acquire()
        except asyncio.CancelledError:
            now_ns = time.perf_counter_ns()
            self._keep(
                RequestRecord(
                    index=index,
                    request_id=self._request_id(index),
                    intended_ns=intended_ns,
                    sent_ns=now_ns,
                    end_ns=now_ns,
                    outcome=Outcome.CANCELLED,
                    detail=NEVER_SENT,
                )
            )
            return
        try:
            await self._send(index, intended_ns, body)
        finally:
            self._turns.release()

    async def _send(self, index: int, intended_ns: int, body: bytes) -> RequestRecord:
        record = await self._client.send(
            body, index=index, intended_ns=intended_ns, request_id=self._request_id(index)
        )
        self._keep(record)
        return record

    def _keep(self, record: RequestRecord) -> None:
        self._records.append(record)
        if self._on_progress is not None and record.index >= 0:
            self._on_progress(len(self._records))

    def _request_id(self, index: int) -> str:
        prefix = self._settings.request_id_prefix
        return f"{prefix}{index}" if index >= 0 else f"{prefix}warmup-{-index - 1}"

    def _body(self, index: int) -> bytes:
        return self._bodies[index] if 0 <= index < len(self._bodies) else self._encode(index)

    def _encode(self, index: int) -> bytes:
        return request_body(self._prompts.prompt(index), self._settings, self._model)
