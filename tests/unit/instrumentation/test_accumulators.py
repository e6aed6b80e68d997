"""Counting: accumulators, the metrics fed from records, the timeline's intervals, the console."""

import bisect
import random
import re

import pytest

from instrumentation import (
    AdmissionStop,
    ConsoleStatus,
    Counter,
    Gauge,
    GraphMode,
    Histogram,
    Metric,
    Metrics,
    Phase,
    Preemption,
    RequestTimeline,
    SinkName,
    StepRecord,
    WorkerStepRecord,
)
from instrumentation.metrics import cache as cache_metrics
from instrumentation.metrics import engine as engine_metrics
from instrumentation.metrics import requests as request_metrics
from instrumentation.metrics import steps as step_metrics
from instrumentation.metrics.accumulators import (
    CounterFamily,
    GaugeFamily,
    HistogramFamily,
    bound_text,
)
from instrumentation.metrics.info import (
    METRICS,
    PREFIX,
    SECONDS_BUCKETS,
    MetricInfo,
    MetricKind,
    Unit,
)
from instrumentation.testing import FakeClock, Recorder


def value_of(metrics: list[Metric], name: str, **labels: str) -> Metric:
    [found] = [
        metric for metric in metrics if metric.name == PREFIX + name and metric.labels == labels
    ]
    return found


def number_of(metrics: list[Metric], name: str, **labels: str) -> float:
    metric = value_of(metrics, name, **labels)
    assert isinstance(metric, Counter | Gauge)
    return metric.value


def histogram_of(metrics: list[Metric], name: str, **labels: str) -> Histogram:
    metric = value_of(metrics, name, **labels)
    assert isinstance(metric, Histogram)
    return metric


# Families.


def test_counter_adds_and_leaves_negative_amounts_out() -> None:
    family = CounterFamily(request_metrics.GENERATION_TOKENS)
    for amount in (3, 0, -2, 4):
        family.add(amount)
    assert family.snapshot({}) == [Counter(request_metrics.GENERATION_TOKENS.name, {}, 7)]
    assert family.num_negative == 1


def test_counter_taken_over_never_falls() -> None:
    family = CounterFamily(engine_metrics.TELEMETRY_ERRORS)
    for total in (3, 9, 4):
        family.raise_to(total, "journal")
    values = {metric.labels["sink"]: metric.value for metric in family.snapshot({})}
    assert values.pop("journal") == 9
    assert not any(values.values())


def test_usual_series_are_there_at_zero_and_unknown_ones_are_bounded() -> None:
    family = CounterFamily(request_metrics.REQUESTS_FINISHED)
    assert {metric.labels["finish_reason"] for metric in family.snapshot({})} == {
        *request_metrics.FINISH_REASONS
    }
    for number in range(1000):
        family.add(1, f"reason {number}")
    series = family.snapshot({"engine": "0"})
    assert len(series) <= 129
    assert sum(metric.value for metric in series) == 1000
    assert {metric.labels["engine"] for metric in series} == {"0"}


def test_gauge_keeps_the_last_value() -> None:
    family = GaugeFamily(cache_metrics.KV_BLOCKS)
    family.set(5, "used")
    family.set(2, "used")
    assert family.snapshot({})[0] == Gauge(cache_metrics.KV_BLOCKS.name, {"state": "used"}, 2)


@pytest.mark.parametrize(
    "info", [request_metrics.INTER_TOKEN_LATENCY, request_metrics.REQUEST_PROMPT_TOKENS]
)
def test_histogram_against_counting_by_hand(info: MetricInfo) -> None:
    chance = random.Random(5)
    from_base, to_base = info.unit.from_base, info.unit.to_base
    values = [int(10 ** chance.uniform(0, 13)) for _ in range(500)]
    values += [from_base(bound) for bound in info.buckets]
    family = HistogramFamily(info)
    half = len(values) // 2
    family.observe_many(values[:half])
    for value in values[half:]:
        family.observe(value)
    family.observe(-1)
    [histogram] = family.snapshot({})
    assert histogram.count == len(values)
    assert family.num_negative == 1
    assert histogram.sum == to_base(sum(values))
    ordered = sorted(values)
    for bound in info.buckets:
        expected = bisect.bisect_right(ordered, from_base(bound))
        assert histogram.buckets[bound_text(bound)] == expected
    assert list(histogram.buckets)[-1] == "+Inf"
    assert histogram.buckets["+Inf"] == len(values)


# The catalogue.


def test_catalogue_is_well_formed() -> None:
    for info in METRICS.values():
        assert re.fullmatch(r"isinglass_[a-z][a-z0-9_]*", info.name)
        assert info.help
        assert not info.help.endswith(".")
        assert (info.kind is MetricKind.COUNTER) == info.name.endswith("_total")
        assert bool(info.buckets) == (info.kind is MetricKind.HISTOGRAM)
        assert list(info.buckets) == sorted(set(info.buckets))
        if info.unit is Unit.SECONDS:
            assert "_seconds" in info.name
    assert SECONDS_BUCKETS[0] < 0.001
    assert SECONDS_BUCKETS[-1] >= 3600


# Metrics from records.


def random_step(chance: random.Random, step: int) -> StepRecord:
    context, generation = chance.randint(0, 3), chance.randint(0, 5)
    return StepRecord(
        step=step,
        begin_ns=1000,
        end_ns=1000 + chance.randint(10_000, 10**9),
        num_context_requests=context,
        num_context_tokens=context * chance.randint(1, 50),
        num_generation_requests=generation,
        num_generation_tokens=generation,
        num_running=context + generation,
        num_waiting=chance.randint(0, 9),
        admission_stop=chance.choice(list(AdmissionStop)),
        preempted=tuple(
            Preemption(n, chance.randint(1, 9), chance.randint(1, 99))
            for n in range(chance.randint(0, 2))
        ),
        num_blocks_used=chance.randint(0, 50),
        num_blocks_free=chance.randint(0, 50),
        prefix_query_tokens=chance.randint(10, 20),
        prefix_hit_tokens=chance.randint(0, 10),
        preempted_prefix_query_tokens=chance.randint(10, 20),
        preempted_prefix_hit_tokens=chance.randint(0, 10),
        num_evicted_blocks=chance.randint(0, 3),
        phases=(Phase.SCHEDULE, 5, 5 + chance.randint(0, 999), Phase.UPDATE, 2000, 2500),
    )


def test_metrics_of_steps_add_up_to_the_records() -> None:
    chance = random.Random(23)
    steps = [random_step(chance, step) for step in range(200)]
    metrics = Metrics()
    for step in steps:
        metrics.observe_step(step)
    snapshot = metrics.snapshot()

    def total(name: str) -> float:
        return sum(
            metric.value
            for metric in snapshot
            if isinstance(metric, Counter) and metric.name == PREFIX + name
        )

    assert total("steps_total") == 200
    assert total("scheduled_tokens_total") == sum(step.num_scheduled_tokens for step in steps)
    assert total("preemptions_total") == sum(step.num_preempted for step in steps)
    assert total("preemption_lost_tokens_total") == sum(
        preemption.tokens_lost for step in steps for preemption in step.preempted
    )
    assert total("kv_block_evictions_total") == sum(step.num_evicted_blocks for step in steps)
    assert total("admission_stops_total") == sum(
        step.admission_stop is not AdmissionStop.NONE for step in steps
    )
    for admission, prefix in (("first", ""), ("preempted", "preempted_")):
        for what in ("query", "hit"):
            assert number_of(
                snapshot, f"prefix_cache_{what}_tokens_total", admission=admission
            ) == sum(getattr(step, f"{prefix}prefix_{what}_tokens") for step in steps)
    for kind in step_metrics.STEP_KINDS:
        histogram = histogram_of(snapshot, "step_tokens", kind=kind)
        assert histogram.count == number_of(snapshot, "steps_total", kind=kind) > 0
    assert number_of(snapshot, "phase_seconds_total", phase="update") == pytest.approx(500e-9 * 200)
    assert number_of(snapshot, "requests_running") == steps[-1].num_running
    assert number_of(snapshot, "kv_blocks", state="used") == steps[-1].num_blocks_used


def test_duration_of_steps_is_the_workers() -> None:
    chance = random.Random(29)
    metrics = Metrics()
    expected: dict[str, list[int]] = {kind: [] for kind in step_metrics.STEP_KINDS}
    now_ns = 0
    for step in range(300):
        kind = chance.choice(step_metrics.STEP_KINDS)
        record = WorkerStepRecord(
            step=step,
            begin_ns=now_ns,
            end_ns=now_ns + chance.randint(1, 10**9),
            num_context_requests=int(kind != "generation"),
            num_generation_requests=int(kind != "context"),
        )
        # The core's step begins one step earlier and so spans two of the worker's.
        metrics.observe_step(
            StepRecord(step=step, begin_ns=max(0, now_ns - 10**9), end_ns=record.end_ns)
        )
        metrics.steps.observe_worker_step(record)
        expected[kind].append(record.end_ns - record.begin_ns)
        now_ns = record.end_ns
    snapshot = metrics.snapshot()
    total_s = 0.0
    for kind, durations_ns in expected.items():
        histogram = histogram_of(snapshot, "step_duration_seconds", kind=kind)
        assert histogram.count == len(durations_ns) > 0
        assert histogram.sum == pytest.approx(sum(durations_ns) * 1e-9)
        total_s += histogram.sum
    assert total_s == pytest.approx(now_ns * 1e-9)


def test_metrics_of_worker_steps_and_io_threads() -> None:
    metrics = Metrics()
    metrics.steps.observe_worker_step(
        WorkerStepRecord(
            step=1,
            begin_ns=0,
            end_ns=9,
            graph_mode=GraphMode.FULL,
            padded_tokens=3,
            device_time_ns=2_000_000_000,
            phases=(Phase.FORWARD, 0, 10**9),
        )
    )
    metrics.steps.observe_worker_step(WorkerStepRecord(step=2, begin_ns=0, end_ns=9))
    metrics.observe_step(
        StepRecord(step=1, begin_ns=0, end_ns=1, io_phase_totals_ns=(Phase.DECODE, 3 * 10**9))
    )
    snapshot = metrics.snapshot()
    assert number_of(snapshot, "graph_steps_total", mode="full", bucket="0") == 1
    assert number_of(snapshot, "graph_steps_total", mode="none", bucket="0") == 1
    assert number_of(snapshot, "padded_tokens_total") == 3
    assert number_of(snapshot, "device_seconds_total") == 2
    assert number_of(snapshot, "phase_seconds_total", phase="forward") == 1
    assert number_of(snapshot, "phase_seconds_total", phase="decode") == 3


def test_snapshot_takes_the_frontends_phases_and_drops() -> None:
    class Frontend(Recorder):
        def phase_totals_ns(self) -> dict[str, int]:
            return {"send": 5 * 10**9}

        def telemetry_drops(self) -> dict[str, int]:
            return {"journal": 1, "ring": 3}

    metrics = Metrics({"engine": "0"}, instrument=Frontend())
    metrics.observe_step(
        StepRecord(
            step=1,
            begin_ns=0,
            end_ns=1,
            num_telemetry_drops=9,
            telemetry_drops=(SinkName.JOURNAL, 7),
        )
    )
    snapshot = metrics.snapshot()
    assert number_of(snapshot, "phase_seconds_total", phase="send", engine="0") == 5
    drops = {
        (metric.labels["process"], metric.labels["sink"]): metric.value
        for metric in snapshot
        if metric.name == PREFIX + "telemetry_drops_total" and metric.value
    }
    assert drops == {
        ("caller", "journal"): 1,
        ("caller", "ring"): 3,
        ("core", "journal"): 7,
        ("core", "ring"): 2,
    }


def random_timeline(chance: random.Random) -> RequestTimeline:
    """A life that stops at a random point, preempted a few times on the way."""
    times = sorted(chance.sample(range(1, 10**6), 14))
    timeline = RequestTimeline(
        request_id="r", arrival_ns=times[0], queued_ns=times[1], num_prompt_tokens=7, preemptions=[]
    )
    reached = chance.randint(1, 5)
    if reached >= 2:
        timeline.first_scheduled_ns = times[2]
    if reached >= 3 and chance.random() < 0.5:
        timeline.preemptions.append((times[3], times[4]))
    if reached >= 4:
        timeline.first_token_ns = timeline.last_token_ns = times[5]
        timeline.num_generation_tokens = 1
        for begin in (6, 8):
            if chance.random() < 0.5:
                timeline.preemptions.append((times[begin], times[begin + 1]))
    if reached == 5:
        timeline.last_token_ns = times[12]
        timeline.num_generation_tokens = 5
        timeline.finish_reason = "length"
    else:
        timeline.finish_reason = chance.choice(("abort", "error"))
        if timeline.preemptions and chance.random() < 0.5:
            timeline.preemptions[-1] = (timeline.preemptions[-1][0], 0)
    timeline.delivered_ns = times[13]
    return timeline


def test_intervals_partition_every_life() -> None:
    chance = random.Random(31)
    seen = set()
    for _ in range(2000):
        timeline = random_timeline(chance)
        parts = (
            timeline.queue_ns,
            timeline.prefill_ns,
            timeline.decode_ns,
            timeline.preempted_ns,
        )
        assert all(part >= 0 for part in parts), timeline
        assert sum(parts) == timeline.e2e_ns, timeline
        assert timeline.e2e_ns + timeline.delivery_ns == (
            timeline.delivered_ns - timeline.arrival_ns
        )
        assert 0 <= timeline.intake_ns <= timeline.queue_ns
        seen.add(tuple(part > 0 for part in parts))
    assert len(seen) == 5  # Each way in which a life can end is among them.


def test_intervals_of_one_life_by_hand() -> None:
    timeline = RequestTimeline(
        request_id="r",
        arrival_ns=100,
        queued_ns=110,
        first_scheduled_ns=130,
        first_token_ns=200,
        last_token_ns=500,
        delivered_ns=520,
        preemptions=[(150, 160), (300, 350)],
        num_generation_tokens=4,
        finish_reason="stop",
    )
    assert (timeline.intake_ns, timeline.queue_ns) == (10, 30)
    assert (timeline.prefill_ns, timeline.decode_ns, timeline.preempted_ns) == (60, 250, 60)
    assert (timeline.ttft_ns, timeline.e2e_ns, timeline.delivery_ns) == (100, 400, 20)
    assert timeline.mean_inter_token_ns == 100


def test_metrics_of_requests() -> None:
    chance = random.Random(41)
    timelines = [random_timeline(chance) for _ in range(300)]
    metrics = Metrics()
    gaps = [chance.randint(10**5, 10**7) for _ in range(50)]
    metrics.requests.observe_tokens(80, gaps)
    for timeline in timelines:
        if timeline.first_token_ns:
            metrics.requests.observe_first_token(timeline)
        metrics.requests.observe_end(timeline)
    snapshot = metrics.snapshot()
    with_token = [timeline for timeline in timelines if timeline.first_token_ns]
    assert number_of(snapshot, "generation_tokens_total") == 80
    assert number_of(snapshot, "prompt_tokens_total") == 7 * len(with_token)
    assert histogram_of(snapshot, "inter_token_latency_seconds").sum == pytest.approx(
        sum(gaps) * 1e-9
    )
    assert histogram_of(snapshot, "time_to_first_token_seconds").count == len(with_token)
    sums = {
        name: histogram_of(snapshot, f"request_{name}_seconds").sum
        for name in ("e2e", "queue", "prefill", "decode", "preempted")
    }
    assert sums["e2e"] == pytest.approx(sum(sums.values()) - sums["e2e"])
    for reason in ("length", "abort", "error"):
        assert number_of(snapshot, "requests_finished_total", finish_reason=reason) == sum(
            timeline.finish_reason == reason for timeline in timelines
        )


def test_defective_values_neither_raise_nor_vanish() -> None:
    metrics = Metrics()
    timeline = RequestTimeline(
        request_id="r", arrival_ns=500, first_scheduled_ns=100, last_token_ns=50, preemptions=[]
    )
    metrics.requests.observe_end(timeline)
    metrics.steps.observe_worker_step(WorkerStepRecord(step=1, begin_ns=10, end_ns=0))
    assert number_of(metrics.snapshot(), "telemetry_negative_values_total") >= 2


# The console.


def test_console_line_sums_the_interval_up() -> None:
    clock, lines = FakeClock(), []
    console = ConsoleStatus(interval_s=10, log=lines.append, clock=clock)
    for _ in range(20):
        clock.advance(500_000_000)
        console.observe(
            StepRecord(
                step=1,
                begin_ns=0,
                end_ns=1,
                num_context_tokens=30,
                num_running=3,
                num_waiting=2,
                num_blocks_used=25,
                num_blocks_free=75,
                prefix_query_tokens=8,
                prefix_hit_tokens=2,
            ),
            num_generation_tokens=4,
        )
    assert lines == [
        "Engine 000: Avg prompt throughput: 60.0 tokens/s, "
        "Avg generation throughput: 8.0 tokens/s, Running: 3 reqs, Waiting: 2 reqs, "
        "KV cache usage: 25.0%, Prefix cache hit rate: 25.0%"
    ]


def test_console_leaves_idle_time_out_of_the_rates() -> None:
    clock, lines = FakeClock(), []
    console = ConsoleStatus(interval_s=10, log=lines.append, clock=clock)
    clock.advance(3600 * 10**9)
    for _ in range(11):
        begin_ns = clock.now_ns
        clock.advance(10**9)
        console.observe(
            StepRecord(step=1, begin_ns=begin_ns, end_ns=clock.now_ns), num_generation_tokens=6
        )
    [line] = lines
    assert "generation throughput: 6.0 tokens/s" in line


def test_gauges_show_what_the_last_step_left_behind() -> None:
    metrics = Metrics()
    record = StepRecord(
        step=1,
        begin_ns=0,
        end_ns=1,
        num_running=3,
        finished=(4, 5),
        num_blocks_used=9,
        num_blocks_cached_free=1,
        num_blocks_free=10,
    )
    assert record.blocks_at_end == (9, 1, 10)
    record.num_blocks_used_at_end, record.num_blocks_cached_free_at_end = 3, 5
    metrics.observe_step(record)
    snapshot = metrics.snapshot()
    assert number_of(snapshot, "requests_running") == 1
    states = [number_of(snapshot, "kv_blocks", state=state) for state in cache_metrics.BLOCK_STATES]
    assert states == [3, 5, 12]


def test_console_is_silent_when_idle_after_one_last_line() -> None:
    clock, lines = FakeClock(), []
    console = ConsoleStatus(interval_s=1, log=lines.append, clock=clock)
    console.observe(StepRecord(step=1, begin_ns=0, end_ns=1), num_generation_tokens=1)
    for _ in range(5):
        clock.advance(1_000_000_000)
        console.tick()
    assert len(lines) == 2
    assert "generation throughput: 1.0" in lines[0]
    assert "throughput: 0.0" in lines[1]
    with pytest.raises(ValueError, match="must be above 0"):
        ConsoleStatus(interval_s=0)
