"""The live view's stream: rows say what records say, and snapshot and deltas add up to them."""

import asyncio
import json
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core.block_hash import BlockHasher
from engine.core.block_map import block_map
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.errors import EngineDeadError, IsinglassError
from engine.frontend.observer import EngineObserver, make_observer
from engine.frontend.output_processor import ProcessedOutputs
from engine.server.config import ServerConfig
from engine.server.http.errors import ApiError
from engine.server.http.served import Phase
from engine.server.live import block_watch, routes
from engine.server.live import feed as feed_module
from engine.server.live.facts import (
    FIRST_TOKEN_COLUMNS,
    REQUEST_COLUMNS,
    STEP_COLUMNS,
    Facts,
    counted,
)
from engine.server.live.feed import HEARTBEAT_S, INTERVAL_S, MAX_WATCHERS, LiveFeed
from engine.server.live.files import HEADERS, PUBLIC_PATHS, page_files
from engine.server.live.watcher import MAX_FRAMES, Watcher
from engine.types.block_map import CACHED_AGES_S, FREE, OWNED, SHARED
from engine.types.messages import EngineCoreOutputs, EngineCoreRequest
from engine.types.sampling import SamplingParams
from instrumentation import NULL, ObservabilityConfig, format_step_label
from instrumentation.names import AdmissionStop, PrefixMiss
from instrumentation.names import Phase as StepPhase
from instrumentation.record.request_records import RequestTimeline
from instrumentation.record.step_records import Admission, Preemption, StepRecord, WorkerStepRecord
from tests.fakes import FakeRequests
from tests.waiting import PATIENCE_S

BASE_NS = 7_000_000_000_000


class FakeEngine:
    """An engine of which only the outside is there."""

    def __init__(self, observer: EngineObserver | None) -> None:
        self.observer = observer
        self.dead_error: EngineDeadError | None = None
        self.attachment: Any = None
        self.run_dir: str | None = None
        self.is_running = True
        self.config = SimpleNamespace(
            scheduler=SimpleNamespace(
                scheduling_policy="fcfs",
                max_num_seqs=8,
                async_scheduling=True,
                enable_chunked_prefill=True,
            ),
            cache=SimpleNamespace(enable_prefix_caching=True),
        )
        ready = SimpleNamespace(
            num_gpu_blocks=10,
            block_size=16,
            device="cpu",
            dtype="bfloat16",
            attention_backend="cpu",
            max_model_len=64,
            max_num_batched_tokens=64,
        )
        self.llm_engine = SimpleNamespace(output_processor=FakeRequests(), ready=ready, obs=NULL)
        self.codes = b"\0\0" * 10
        self.num_map_calls = 0

    async def kv_block_map(self) -> dict[str, Any]:
        self.num_map_calls += 1
        return {"codes": self.codes, "owners": [3], "took_ns": 1000}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(make_observer(ObservabilityConfig(), NULL, model_name="m"))


@pytest.fixture
def feed(engine: FakeEngine) -> LiveFeed:
    state = SimpleNamespace(
        engine=engine,
        peers=None,
        config=ServerConfig(),
        phase=Phase.READY,
        model_names=("m",),
        started_unix_s=int(time.time()),
    )
    return LiveFeed(state)  # type: ignore[arg-type]


class FakeTime:
    """The feed's clock, which moves when it is told to."""

    def __init__(self, feed: LiveFeed) -> None:
        self._feed, self._now_ns = feed, time.monotonic_ns()

    @classmethod
    @contextmanager
    def of(cls, feed: LiveFeed) -> Iterator["FakeTime"]:
        with pytest.MonkeyPatch.context() as patch:
            fake = cls(feed)
            patch.setattr(feed_module, "time", fake)
            yield fake

    def monotonic_ns(self) -> int:
        return self._now_ns

    def monotonic(self) -> float:
        return self._now_ns / 1e9

    async def rounds(self, duration_s: float) -> None:
        """So long the feed looks around."""
        for _ in range(round(duration_s / INTERVAL_S)):
            self._now_ns += int(INTERVAL_S * 1e9)
            self._feed._round()
            for _ in range(3):  # a block map comes
                await asyncio.sleep(0)


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test's coroutine."""

    def run(engine: FakeEngine, feed: LiveFeed) -> None:
        asyncio.run(test(engine, feed))

    return run


def messages_of(frames: bytes) -> list[dict[str, Any]]:
    """The messages of some frames, as a browser would read them."""
    parts = frames.decode().split("\n\n")
    assert parts[-1] == ""
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def named(columns: tuple[str, ...], row: list[Any]) -> dict[str, Any]:
    """A row as the page knows it."""
    return dict(zip(columns, row, strict=True))


def random_step(rng: random.Random, number: int) -> tuple[StepRecord, WorkerStepRecord]:
    """A step that says all that a step can say."""
    begin_ns = BASE_NS + number * 30_000_000
    counts = {
        "num_context_requests": rng.randint(0, 3),
        "num_context_tokens": rng.randint(0, 900),
        "num_generation_requests": rng.randint(0, 40),
        "num_generation_tokens": rng.randint(0, 40),
    }
    record = StepRecord(
        step=number,
        begin_ns=begin_ns,
        end_ns=begin_ns + 29_000_000,
        num_running=rng.randint(0, 40),
        num_waiting=rng.randint(0, 9),
        admission_stop=rng.choice(list(AdmissionStop)),
        admission_stop_request_num=rng.randint(-1, 40),
        preempted=tuple(
            Preemption(rng.randint(0, 40), 3, rng.randint(0, 400), 5)
            for _ in range(rng.randint(0, 2))
        ),
        num_blocks_used=rng.randint(0, 50),
        num_blocks_cached_free=rng.randint(0, 20),
        num_blocks_free=30,
        admissions=tuple(
            Admission(rng.randint(0, 40), 9, 0, False, PrefixMiss.NEVER_CACHED)
            for _ in range(rng.randint(0, 2))
        ),
        first_tokens=(number,),
        finished=(number,) if rng.random() < 0.3 else (),
        num_sampled_tokens=rng.randint(0, 40),
        phases=(StepPhase.SCHEDULE, begin_ns, begin_ns + 700_000),
        prefix_query_tokens=rng.randint(0, 99),
        prefix_hit_tokens=rng.randint(0, 9),
        num_evicted_blocks=rng.randint(0, 9),
        **counts,
    )
    worker = WorkerStepRecord(
        step=number,
        begin_ns=begin_ns + 1_000_000,
        end_ns=begin_ns + 28_000_000,
        phases=(StepPhase.FORWARD, begin_ns + 2_000_000, begin_ns + 20_000_000),
        **counts,
    )
    return record, worker


def timeline(num: int, *, reason: str | None = None, **fields: Any) -> RequestTimeline:
    """A request that arrived a moment ago."""
    now_ns = time.monotonic_ns()
    return RequestTimeline(
        request_id=f"request-{num}",
        request_num=num,
        arrival_ns=now_ns - 50_000_000,
        queued_ns=now_ns - 49_000_000,
        first_scheduled_ns=now_ns - 48_000_000,
        first_token_ns=now_ns - 20_000_000,
        last_token_ns=now_ns - 1_000_000,
        delivered_ns=now_ns,
        finish_reason=reason,
        **fields,
    )


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_step_rows_say_what_the_records_say(seed: int) -> None:
    rng = random.Random(seed)
    record, worker = random_step(rng, 17)
    row = named(STEP_COLUMNS, Facts(BASE_NS).step(record, worker))
    assert row["label"] == format_step_label(record.label)
    assert row["begin"] == (worker.begin_ns - BASE_NS) // 1000
    assert row["end"] - row["begin"] == worker.duration_ns // 1000
    assert row["num_context_tokens"] + row["num_generation_tokens"] == record.num_scheduled_tokens
    assert (row["used"], row["cached_free"]) == record.blocks_at_end[:2]
    assert row["preempted"][::3] == [one.request_num for one in record.preempted]
    assert row["admitted"] == [one.request_num for one in record.admissions]
    assert row["admission_stop"] == record.admission_stop.label
    assert row["num_running"] == record.num_running_at_end
    assert row["phases"] == ["schedule", -1000, 700, "forward", 1000, 18_000]


def test_a_step_without_a_worker_record_has_the_cores_times() -> None:
    record, _ = random_step(random.Random(1), 3)
    row = named(STEP_COLUMNS, Facts(BASE_NS).step(record, None))
    assert row["end"] - row["begin"] == 29_000


def test_request_rows_have_null_for_what_never_was() -> None:
    one = RequestTimeline(request_id="x" * 1000, request_num=4, arrival_ns=BASE_NS + 5_000)
    row = named(REQUEST_COLUMNS, Facts(BASE_NS).request(one))
    assert row["arrival"] == 5
    assert row["first_token"] is row["end"] is row["reason"] is None
    assert len(row["id"]) == 128


def test_gaps_are_counted_without_loss() -> None:
    rng = random.Random(0)
    gaps_ns = [rng.choice((20_000_000, 20_000_400, 35_123_456)) for _ in range(500)]
    pairs = counted(gaps_ns)
    expanded = [value for value, n in zip(pairs[::2], pairs[1::2], strict=True) for _ in range(n)]
    assert sorted(expanded) == sorted(gap_ns // 1000 for gap_ns in gaps_ns)
    assert len(pairs) == 4  # two of the three are the same in microseconds


# -- watchers --------------------------------------------------------------------------------------


def test_a_watcher_that_stalls_loses_frames_and_knows_how_many() -> None:
    watcher = Watcher()
    watcher.put(b"before the snapshot")
    assert watcher.num_lost == 0
    watcher.restart(b"S")
    for _ in range(MAX_FRAMES + 40):
        watcher.put(b"d")
    # The snapshot counts as a frame, and was lost with the others.
    assert watcher.needs_snapshot
    assert watcher.num_lost == 1 + MAX_FRAMES + 40
    assert watcher.take() == b""
    watcher.restart(b"S2")
    watcher.put(b"d2")
    assert watcher.take() == b"S2d2"


def test_a_closed_watcher_ends_behind_what_waits() -> None:
    async def run() -> None:
        watcher = Watcher()
        watcher.restart(b"S")
        watcher.close()
        await asyncio.wait_for(watcher.wait(), PATIENCE_S)
        assert watcher.take() == b"S"
        await asyncio.wait_for(watcher.wait(), PATIENCE_S)
        assert watcher.take() == b""

    asyncio.run(run())


# -- the feed --------------------------------------------------------------------------------------


@on_loop
async def test_snapshot_and_deltas_give_every_step_once(engine: FakeEngine, feed: LiveFeed) -> None:
    observer = engine.observer
    assert observer is not None
    rng = random.Random(5)
    records = [random_step(rng, number) for number in range(200)]

    def pass_on(record: StepRecord, worker: WorkerStepRecord) -> None:
        gaps_ns = [30_000_000] * record.num_sampled_tokens
        done = ProcessedOutputs(token_gaps_ns=gaps_ns, num_generation_tokens=len(gaps_ns))
        observer.observe(EngineCoreOutputs(step=record, worker_step=worker), done)

    for pair in records[:60]:
        pass_on(*pair)
    assert observer.tap is None
    first = feed.join()
    got: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    got[1] += messages_of(await feed.next_frames(first))
    second = None
    for at, pair in enumerate(records[60:]):
        pass_on(*pair)
        if at == 50:
            second = feed.join()
            got[2] += messages_of(await feed.next_frames(second))
        if at % 20 == 7:
            feed._flush()
            got[1] += messages_of(await feed.next_frames(first))
    feed._flush()
    assert second is not None
    got[1] += messages_of(await feed.next_frames(first))
    got[2] += messages_of(await feed.next_frames(second))
    for messages in got.values():
        assert messages[0]["kind"] == "snapshot"
        assert {one["kind"] for one in messages[1:]} == {"delta"}
        rows = [named(STEP_COLUMNS, row) for one in messages for row in one.get("steps", ())]
        assert [row["step"] for row in rows] == list(range(200))
        for row, (record, _) in zip(rows, records, strict=True):
            assert row["label"] == format_step_label(record.label)
            assert row["num_sampled"] == record.num_sampled_tokens
    gaps = sum(n for one in got[1][1:] for n in one.get("gaps", ())[1::2])
    assert gaps == sum(record.num_sampled_tokens for record, _ in records[60:])
    late = sum(n for _, pairs in got[2][0]["gaps"] for n in pairs[1::2])
    late += sum(n for one in got[2][1:] for n in one.get("gaps", ())[1::2])
    assert late == gaps
    feed.leave(first)
    assert observer.tap is not None
    feed.leave(second)
    assert observer.tap is None
    assert not feed._watchers


@on_loop
async def test_requests_come_once_and_go_once(engine: FakeEngine, feed: LiveFeed) -> None:
    observer, processor = engine.observer, engine.llm_engine.output_processor
    assert observer is not None
    observer.observe_ended([timeline(0, reason="stop")])
    processor.unfinished[1] = timeline(1)
    watcher = feed.join()
    (snapshot,) = messages_of(await feed.next_frames(watcher))
    assert [row[0] for row in snapshot["ended"]] == [0]
    assert [row[0] for row in snapshot["unfinished"]] == [1]
    processor.unfinished[2] = timeline(2)
    done = ProcessedOutputs(first_tokens=[processor.unfinished[2]])
    observer.observe(EngineCoreOutputs(), done)
    observer.observe_ended([timeline(1, reason="length", num_generation_tokens=9)])
    feed._flush()
    feed._flush()
    deltas = messages_of(await feed.next_frames(watcher))
    rows = [named(REQUEST_COLUMNS, row) for one in deltas for row in one.get("arrived", ())]
    assert [(row["num"], row["id"]) for row in rows] == [(2, "request-2")]
    firsts = [named(FIRST_TOKEN_COLUMNS, r) for one in deltas for r in one.get("first_tokens", ())]
    assert [row["num"] for row in firsts] == [2]
    ended = [named(REQUEST_COLUMNS, row) for one in deltas for row in one.get("ended", ())]
    assert [(row["num"], row["reason"], row["num_generated"]) for row in ended] == [
        (1, "length", 9)
    ]
    feed.leave(watcher)


@on_loop
async def test_a_stalled_watcher_goes_on_from_a_snapshot_that_says_so(
    engine: FakeEngine, feed: LiveFeed
) -> None:
    observer = engine.observer
    assert observer is not None
    watcher = feed.join()
    await feed.next_frames(watcher)
    rng = random.Random(2)
    num_steps = MAX_FRAMES + 30
    for number in range(num_steps):
        record, worker = random_step(rng, number)
        observer.observe(EngineCoreOutputs(step=record, worker_step=worker), ProcessedOutputs())
        feed._flush()
    (snapshot,) = messages_of(await feed.next_frames(watcher))
    assert snapshot["kind"] == "snapshot"
    assert snapshot["num_lost"] >= num_steps
    assert [row[0] for row in snapshot["steps"]] == list(range(num_steps))
    feed.leave(watcher)


@on_loop
async def test_only_so_many_may_watch(engine: FakeEngine, feed: LiveFeed) -> None:
    watchers = [feed.join() for _ in range(MAX_WATCHERS)]
    with pytest.raises(ApiError) as refusal:
        feed.join()
    assert refusal.value.status == 503
    feed.leave(watchers.pop())
    watchers.append(feed.join())
    for watcher in watchers:
        feed.leave(watcher)


@on_loop
async def test_the_block_map_is_asked_for_only_while_somebody_watches(
    engine: FakeEngine, feed: LiveFeed
) -> None:
    engine.codes = bytes([0, 0, OWNED, 0, OWNED, 0, SHARED, 0, 1, 0])
    assert feed._task is None
    with FakeTime.of(feed) as fake:
        watcher = feed.join()
        await feed.next_frames(watcher)
        await fake.rounds(0.5)
        messages = messages_of(await feed.next_frames(watcher))
        (found,) = [one["map"] for one in messages if one.get("map")]
        assert found == {"runs": [0, 1, OWNED, 2, SHARED, 1, 1, 1], "owners": [3]}
        await fake.rounds(8)
        assert engine.num_map_calls == 1  # no step, no second look
        feed._blocks.has_stepped = True
        await fake.rounds(0.2)
        assert engine.num_map_calls == 2
    feed.leave(watcher)
    assert feed._task is None


@on_loop
async def test_a_block_map_that_fails_is_told_once_and_asked_for_later(
    engine: FakeEngine, feed: LiveFeed
) -> None:
    async def fail() -> dict[str, Any]:
        engine.num_map_calls += 1
        raise IsinglassError("no map today")

    told: list[str] = []
    engine.kv_block_map = fail  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_watch.logger, "warning", lambda _, error: told.append(str(error)))
        with FakeTime.of(feed) as fake:
            watcher = feed.join()
            for num_calls in (1, 2, 3):
                feed._blocks.has_stepped = True
                await fake.rounds(0.5)
                feed._blocks.has_stepped = True
                await fake.rounds(8)
                assert engine.num_map_calls == num_calls  # and not in every round
                await fake.rounds(2)
        assert told == ["no map today"]
    assert not watcher.is_closed
    feed.leave(watcher)


@on_loop
async def test_the_engines_death_ends_the_stream(engine: FakeEngine, feed: LiveFeed) -> None:
    watcher = feed.join()
    await feed.next_frames(watcher)
    engine.dead_error = EngineDeadError("gone")
    messages: list[dict[str, Any]] = []
    async with asyncio.timeout(PATIENCE_S):
        while frames := await feed.next_frames(watcher):
            messages += messages_of(frames)
    assert messages[-1] == {"kind": "end", "reason": "gone", "now": messages[-1]["now"]}
    feed.leave(watcher)


@on_loop
async def test_without_statistics_the_snapshot_says_so(engine: FakeEngine, feed: LiveFeed) -> None:
    engine.observer = None
    watcher = feed.join()
    (snapshot,) = messages_of(await feed.next_frames(watcher))
    assert snapshot["about"]["num_blocks"] == 10
    assert snapshot["has_statistics"] is False
    assert "steps" not in snapshot
    feed.leave(watcher)


@on_loop
async def test_an_engine_that_starts_later_gets_a_second_snapshot(
    engine: FakeEngine, feed: LiveFeed
) -> None:
    observer, engine.observer = engine.observer, None
    engine.is_running = False
    feed._state.phase = Phase.STARTING
    watcher = feed.join()
    (snapshot,) = messages_of(await feed.next_frames(watcher))
    assert (snapshot["phase"], snapshot["has_statistics"]) == ("starting", True)
    engine.observer, engine.is_running = observer, True
    feed._state.phase = Phase.READY
    async with asyncio.timeout(PATIENCE_S):
        messages: list[dict[str, Any]] = []
        while not any(one["kind"] == "snapshot" for one in messages):
            messages += messages_of(await feed.next_frames(watcher))
    assert messages[-1]["phase"] == "ready"
    assert messages[-1]["num_lost"] == 0
    feed.leave(watcher)


@on_loop
async def test_silence_is_broken_by_a_heartbeat(engine: FakeEngine, feed: LiveFeed) -> None:
    with FakeTime.of(feed) as fake:
        watcher = feed.join()
        await feed.next_frames(watcher)
        await fake.rounds(HEARTBEAT_S)
        messages_of(await feed.next_frames(watcher))
        await fake.rounds(HEARTBEAT_S + INTERVAL_S)
        (beat,) = messages_of(await feed.next_frames(watcher))
        assert set(beat) == {"kind", "now"}
    feed.leave(watcher)


@on_loop
async def test_another_frontend_hears_a_heartbeat_while_only_steps_are_told(
    engine: FakeEngine, feed: LiveFeed
) -> None:
    assert engine.observer is not None
    rng, watcher, follower = random.Random(4), feed.join(), feed.tell_other()
    assert json.loads(await anext(follower))["kind"] == "snapshot"
    heard_s = []
    with FakeTime.of(feed) as fake:
        (ears,) = feed._followers
        for number in range(round(4 * HEARTBEAT_S / INTERVAL_S)):
            record, worker = random_step(rng, number)
            told = EngineCoreOutputs(step=record, worker_step=worker)
            engine.observer.observe(told, ProcessedOutputs())
            await fake.rounds(INTERVAL_S)
            await feed.next_frames(watcher)
            if ears.take():
                heard_s.append(fake.monotonic())
    assert 3 <= len(heard_s) <= 4
    assert all(later_s - s < HEARTBEAT_S + 2 * INTERVAL_S for s, later_s in pairwise(heard_s))
    await follower.aclose()
    feed.leave(watcher)


@on_loop
async def test_a_recording_is_told_of_whoever_began_it(engine: FakeEngine, feed: LiveFeed) -> None:
    obs = engine.llm_engine.obs = SimpleNamespace(is_recording=True)
    engine.run_dir = "runs/run-1"  # --trace-dir
    watcher = feed.join()
    (snapshot,) = messages_of(await feed.next_frames(watcher))
    assert snapshot["recording"] == "runs/run-1"
    for is_recording in (False, True):
        obs.is_recording, engine.run_dir = is_recording, "runs/run-2"
        feed._flush()
        feed._flush()
        told = [one for one in messages_of(await feed.next_frames(watcher)) if "recording" in one]
        assert [one["recording"] for one in told] == ["runs/run-2" if is_recording else None]
    feed.leave(watcher)


async def _endless() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


@on_loop
async def test_a_reader_that_takes_nothing_is_dropped(engine: FakeEngine, feed: LiveFeed) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 1:
            await _endless()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "STALL_S", 0.1)
        stream = routes.LiveStream(feed, feed.join())
        await asyncio.wait_for(stream({"type": "http"}, _endless, send), PATIENCE_S)
    assert [one["type"] for one in sent] == ["http.response.start", "http.response.body"]
    headers = dict(sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    assert not feed._watchers


@on_loop
async def test_a_reader_that_leaves_is_forgotten(engine: FakeEngine, feed: LiveFeed) -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    stream = routes.LiveStream(feed, feed.join())
    await asyncio.wait_for(stream({"type": "http"}, receive, send), PATIENCE_S)
    assert not feed._watchers
    assert engine.observer is not None
    assert engine.observer.tap is None


# -- the block map ---------------------------------------------------------------------------------


def _requests(rng: random.Random, hasher: BlockHasher) -> Iterator[Request]:
    prefix = [rng.randrange(100) for _ in range(24)]
    for num in range(40):
        shares = rng.random() < 0.5
        tokens = (prefix if shares else []) + [
            rng.randrange(100) for _ in range(rng.randint(1, 30))
        ]
        message = EngineCoreRequest(f"r{num}", num, tokens, SamplingParams(), arrival_ns=0)
        yield Request(message, hasher)


@pytest.mark.parametrize("seed", range(4))
def test_block_map_says_of_each_block_what_the_pool_says(seed: int) -> None:
    rng = random.Random(seed)
    hasher, cache = BlockHasher(4), KVCacheManager(90, 4, enable_caching=True)
    held: list[Request] = []
    for number, request in enumerate(_requests(rng, hasher)):
        cache.set_time((number + 1) * 2 * 10**9)
        hit = cache.get_computed_blocks(request)
        if cache.allocate_slots(request, request.num_tokens - hit.num_tokens, hit=hit) is not None:
            request.num_computed_tokens = request.num_tokens
            held.append(request)
        while held and (len(held) > 6 or rng.random() < 0.3):
            cache.free(held.pop(rng.randrange(len(held))))
        now_ns = (number + 1) * 2 * 10**9
        found = block_map(cache, held, now_ns=now_ns)
        codes = [
            int.from_bytes(found["codes"][at : at + 2], "little")
            for at in range(0, len(found["codes"]), 2)
        ]
        assert codes == _naive_codes(cache, held, found["owners"], now_ns)


def _naive_codes(
    cache: KVCacheManager, held: list[Request], owners: list[int], now_ns: int
) -> list[int]:
    holders: dict[int, list[int]] = {}
    for request in held:
        for block_id in cache.block_ids(request):
            holders.setdefault(block_id, []).append(request.num)
    cached = set(cache.pool.cached_blocks())
    codes = []
    for block_id in range(cache.pool.num_blocks):
        nums = holders.get(block_id, [])
        if len(nums) > 1:
            codes.append(SHARED)
        elif nums:
            codes.append(OWNED + owners.index(nums[0]))
        elif block_id in cached:
            age_s = (now_ns - cache.pool.history.used_ns[block_id]) / 1e9
            codes.append(1 + sum(age_s >= bound for bound in CACHED_AGES_S))
        else:
            codes.append(FREE)
    return codes


# -- the files -------------------------------------------------------------------------------------


def test_the_page_asks_for_nothing_from_outside_and_runs_nothing_inline() -> None:
    files = page_files()
    assert set(files) == PUBLIC_PATHS
    assert "default-src 'self'" in HEADERS["Content-Security-Policy"]
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    page = files["/"].content.decode()
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*src=)", page)
    for path in re.findall(r'(?:src|href)="(live/[^"]+)"', page):
        assert f"/{path}" in files
    for path, file in files.items():
        text = file.content.decode()
        urls = set(re.findall(r"https?://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not urls, f"{path} mentions {urls}"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        for module in re.findall(r'from "\./([^"]+)"', text):
            assert f"/live/{module}" in files
