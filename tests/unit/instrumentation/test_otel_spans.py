"""Spans without an engine: stages against the timeline's definitions, bounds, failures."""

import random
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from instrumentation import Phase, StepRecord, WorkerStepRecord
from instrumentation.metrics import requests as request_metrics
from instrumentation.metrics.accumulators import Families
from instrumentation.metrics.types import Histogram
from instrumentation.otel import attributes as names
from instrumentation.otel.exporting import BoundedProcessor, GuardedExporter
from instrumentation.otel.health import ExportHealth
from instrumentation.otel.http_spans import HttpSpans
from instrumentation.otel.operations import OperationLatencies
from instrumentation.otel.request_spans import RequestSpans, stages_of
from instrumentation.otel.step_spans import StepSpans
from instrumentation.record.request_records import RequestTimeline
from tests.waiting import PATIENCE_S

REQUEST = {names.OPERATION_NAME: "text_completion", names.REQUEST_MODEL: "m"}


def random_timeline(rng: random.Random) -> RequestTimeline:
    """A request that got somewhere between arrival and delivery, with up to four preemptions."""
    stamps = sorted(rng.sample(range(1, 10_000), 12))
    arrival, queued, scheduled, *inner, last, delivered = stamps
    progress = rng.randrange(4)
    first = inner[rng.randrange(0, len(inner), 2)] if progress >= 2 else 0
    free = [one for one in inner if one != first]
    pairs = [
        (begin, end)
        for begin, end in zip(free[::2], free[1::2], strict=False)
        if rng.random() < 0.6
    ]
    if progress == 2 and pairs and rng.random() < 0.5:
        pairs[-1] = (pairs[-1][0], 0)  # given up while thrown out
    return RequestTimeline(
        request_id="r",
        request_num=1,
        arrival_ns=arrival,
        queued_ns=queued,
        first_scheduled_ns=scheduled if progress else 0,
        first_token_ns=first,
        last_token_ns=last if progress == 3 else first,
        delivered_ns=delivered,
        preemptions=pairs if progress else [],
        num_generation_tokens=5 if progress >= 2 else 0,
        finish_reason="stop" if progress == 3 else "abort",
    )


@pytest.mark.parametrize("seed", range(200))
def test_stages_follow_each_other_and_sum_up_to_the_timelines_intervals(seed: int) -> None:
    timeline = random_timeline(random.Random(seed))
    stages = stages_of(timeline)
    assert stages[0].begin_ns == timeline.arrival_ns
    assert stages[-1].end_ns == timeline.delivered_ns
    assert all(before.end_ns == after.begin_ns for before, after in pairwise(stages))
    totals = dict.fromkeys(("queue", "prefill", "decode", "preempted", "deliver"), 0)
    for stage in stages:
        totals[stage.name] += stage.end_ns - stage.begin_ns
    assert totals == {
        "queue": timeline.queue_ns,
        "prefill": timeline.prefill_ns,
        "decode": timeline.decode_ns,
        "preempted": timeline.preempted_ns,
        "deliver": timeline.delivery_ns,
    }
    assert sum(stage.name == "preempted" for stage in stages) == len(timeline.preemptions)


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(memory: InMemorySpanExporter) -> Iterator[TracerProvider]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    yield provider
    provider.shutdown()


def step_record(number: int, scheduled: Sequence[int], **fields: Any) -> StepRecord:
    begin_ns = number * 100
    pairs = tuple(value for num in scheduled for value in (num, 1))
    return StepRecord(
        step=number,
        begin_ns=begin_ns,
        end_ns=begin_ns + 90,
        num_generation_requests=len(scheduled),
        num_generation_tokens=len(scheduled),
        scheduled=pairs,
        **fields,
    )


def test_a_request_number_is_not_taken_for_a_number_of_tokens(
    memory: InMemorySpanExporter, provider: TracerProvider
) -> None:
    spans = StepSpans(provider.get_tracer("t"), lambda num: None, mode="sampled")
    for number in range(1, 40):
        spans.observe(step_record(number, [7 if number % 2 else 8]), None)
    spans.export_served({1}, since_ns=0)  # every pair holds a 1: one token
    spans.export_waiting(lambda: True)
    assert not memory.get_finished_spans()
    spans.export_served({7}, since_ns=2_000)
    spans.export_served({7, 8}, since_ns=3_000)
    spans.export_waiting(lambda: True)
    exported = [span.attributes[names.STEP] for span in memory.get_finished_spans()]
    assert exported == [*range(21, 40, 2), *range(30, 40, 2)]  # each once


def test_only_the_last_steps_are_kept_and_one_in_a_hundred_goes_at_once(
    memory: InMemorySpanExporter, provider: TracerProvider
) -> None:
    spans = StepSpans(provider.get_tracer("t"), lambda num: None, mode="sampled", capacity=50)
    for number in range(1, 451):
        spans.observe(step_record(number, [7]), None)
    spans.export_waiting(lambda: True)
    exported = [span.attributes[names.STEP] for span in memory.get_finished_spans()]
    assert exported == [100, 200, 300, 400]
    spans.export_served({7}, since_ns=0)
    spans.export_waiting(lambda: True)
    exported = [span.attributes[names.STEP] for span in memory.get_finished_spans()]
    assert exported == [100, 200, 300, 400, *range(401, 451)]
    by_reason = [span.attributes[names.STEP_SAMPLED_BY] for span in memory.get_finished_spans()]
    assert by_reason == ["rate"] * 4 + ["tail"] * 50


def test_chosen_steps_wait_within_bounds_and_what_is_lost_is_counted(
    memory: InMemorySpanExporter, provider: TracerProvider
) -> None:
    spans = StepSpans(provider.get_tracer("t"), lambda num: None, mode="all", capacity=20)
    for number in range(1, 31):
        spans.observe(step_record(number, [7]), None)
    assert spans.num_drops == 10
    permits = iter([True] * 5 + [False] * 5)
    spans.export_waiting(lambda: next(permits))
    assert [span.attributes[names.STEP] for span in memory.get_finished_spans()] == [1, 2, 3, 4, 5]
    spans.drop_waiting()
    assert spans.num_drops == 25


def test_phases_of_overlapping_steps_are_told_apart(
    memory: InMemorySpanExporter, provider: TracerProvider
) -> None:
    """With async scheduling a record holds its own waiting and the next step's scheduling."""
    spans = StepSpans(provider.get_tracer("t"), lambda num: None, mode="all")
    schedule, execute = int(Phase.SCHEDULE), int(Phase.EXECUTE)
    wait, update, forward = int(Phase.WAIT), int(Phase.UPDATE), int(Phase.FORWARD)
    first = (schedule, 99, 110, execute, 110, 115, schedule, 199, 210, execute, 210, 215)
    spans.observe(step_record(1, [7], phases=(*first, wait, 215, 230, update, 230, 240)), None)
    second = (schedule, 299, 310, execute, 310, 315, wait, 315, 330, update, 330, 340)
    worker = WorkerStepRecord(step=2, begin_ns=240, end_ns=325, phases=(forward, 250, 320))
    spans.observe(step_record(2, [7], phases=second), worker)
    spans.export_waiting(lambda: True)
    finished = memory.get_finished_spans()
    offset_ns = finished[0].start_time - 99
    labels = [
        (span.name, (span.start_time - offset_ns) // 10, (span.end_time - offset_ns) // 10)
        for span in finished[5:9]
    ]
    # The offset is taken anew for each step, so it may be a little off: compare durations.
    assert [name for name, _, _ in labels] == ["schedule", "execute", "wait", "update"]
    durations = [span.end_time - span.start_time for span in finished]
    assert durations[:4] == [11, 5, 15, 10]
    assert durations[5:10] == [11, 5, 15, 10, 70]
    assert finished[4].name == finished[10].name == "execute_context_0(0)_generation_1(1)"
    assert finished[10].end_time - finished[10].start_time == 340 - 199


def test_contexts_of_ended_requests_are_kept_a_while_and_no_longer(
    memory: InMemorySpanExporter, provider: TracerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instrumentation.otel.request_spans._MAX_ENDED_CONTEXTS", 10)
    requests = RequestSpans(provider.get_tracer("t"))
    for num in range(30):
        span = requests.begin(REQUEST, arrival_ns=1, num_samples=1, traceparent=None)
        requests.expect(span, num)
        assert requests.context_of(num) == span.context
        requests.end(RequestTimeline(request_id="r", request_num=num, arrival_ns=1, delivered_ns=9))
    assert [num for num in range(30) if requests.context_of(num)] == list(range(20, 30))
    requests.end(RequestTimeline(request_id="r", request_num=3))  # ended already, or never known
    roots = [span for span in memory.get_finished_spans() if span.parent is None]
    assert len(roots) == 30


class Blocking(SpanExporter):
    """Exports nothing until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.num_spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.go.wait(PATIENCE_S)
        self.num_spans += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.go.set()


def test_the_queue_is_bounded_and_what_is_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "50")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    blocking, health = Blocking(), ExportHealth("traces", "here")
    exporter = GuardedExporter(blocking, health)
    processor = BoundedProcessor(exporter)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("t")
    for _ in range(1000):
        tracer.start_span("s").end()  # had one waited for the export, none would be lost
    assert processor.is_crowded
    assert 850 <= health.num_drops <= 900  # 100 wait, and up to 50 are under way
    blocking.go.set()
    processor.force_flush()
    assert blocking.num_spans + health.num_drops == 1000
    assert not processor.is_crowded
    exporter.shutdown()
    exporter.shutdown()
    tracer.start_span("late").end()
    assert blocking.num_spans + health.num_drops == 1001
    processor.shutdown()


class Failing(SpanExporter):
    """Fails in every way there is."""

    def __init__(self) -> None:
        self.num_calls = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_calls += 1
        if self.num_calls == 2:
            raise RuntimeError("broken")
        return SpanExportResult.SUCCESS if self.num_calls == 4 else SpanExportResult.FAILURE


def test_failures_are_counted_and_logged_once_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    health = ExportHealth("traces", "http://nowhere")
    exporter = GuardedExporter(Failing(), health)
    spans: list[Any] = [object()] * 3
    results = [exporter.export(spans) for _ in range(5)]
    assert [result is SpanExportResult.SUCCESS for result in results] == [False] * 3 + [True, False]
    assert (health.num_errors, health.num_drops) == (4, 12)
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 2
    assert "http://nowhere" in caplog.text


# -- HTTP ------------------------------------------------------------------------------------------

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_request_span_hangs_below_its_open_http_span_and_keeps_the_state() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    http = HttpSpans(tracer)
    requests = RequestSpans(tracer, parent_of=http.parent_of)
    exchange = http.begin(
        "POST /x", {"a": 1}, begin_ns=5, traceparent=TRACEPARENT, tracestate="k=v,m=w"
    )
    assert exchange.traceparent is not None
    for traceparent in (exchange.traceparent, TRACEPARENT):
        request = requests.begin(REQUEST, arrival_ns=6, num_samples=1, traceparent=traceparent)
        requests.fail(request, "PromptError", "empty")
    http.end(exchange, {"b": 2}, end_ns=9, error=None)
    assert http.parent_of(exchange.traceparent) is None
    below, beside, above = exporter.get_finished_spans()
    assert above.parent is not None
    assert below.parent is not None
    assert beside.parent is not None
    assert below.parent.span_id == above.context.span_id
    assert beside.parent.span_id == above.parent.span_id == 0x00F067AA0BA902B7
    assert below.context.trace_state.to_header() == "k=v,m=w"
    assert beside.context.trace_state.to_header() == ""  # a traceparent alone does not carry it
    assert (above.end_time or 0) - (above.start_time or 0) == 4
    # Both clocks are read once for the two: a child cannot begin before its parent.
    assert (below.start_time or 0) - (above.start_time or 0) == 1
    assert dict(above.attributes or {}) == {"a": 1, "b": 2}
    assert above.status.is_unset


def test_open_http_spans_end_with_the_engine() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    http = HttpSpans(provider.get_tracer("test"))
    for _ in range(3):
        http.begin("GET", {}, begin_ns=1, traceparent=None, tracestate="k=v")
    http.end_all("shutdown", end_ns=2)
    http.end_all("shutdown", end_ns=3)
    spans = exporter.get_finished_spans()
    assert [one.attributes for one in spans] == [{"error.type": "shutdown"}] * 3
    assert all(one.parent is None and not one.status.is_ok for one in spans)
    assert len({one.context.trace_id for one in spans}) == 3


def test_latencies_by_operation_add_up() -> None:
    rng = random.Random(11)
    latencies = OperationLatencies({request_metrics.E2E_SECONDS.name: (0.5, 1.0)})
    families = Families()
    metrics = request_metrics.RequestMetrics(families)
    for number in range(60):
        timeline = random_timeline(rng)
        operation = ("chat", "text_completion")[number % 3 == 0]
        latencies.observe_first_token(timeline, operation)
        latencies.observe_end(timeline, operation)
        metrics.observe_first_token(timeline)
        metrics.observe_end(timeline)
    totals = {one.name: one for one in families.snapshot({}) if isinstance(one, Histogram)}
    for name in names.GEN_AI_METRICS:
        series = latencies.snapshot(name, {"model_name": "m"})
        assert {one.labels["gen_ai.operation.name"] for one in series} == {
            "chat",
            "text_completion",
        }
        assert all(one.labels["model_name"] == "m" for one in series)
        assert sum(one.count for one in series) == totals[name].count > 0
        assert sum(one.sum for one in series) == pytest.approx(totals[name].sum)
    bounds = latencies.snapshot(request_metrics.E2E_SECONDS.name, {})[0].buckets
    assert list(bounds) == ["0.5", "1.0", "+Inf"]
