"""The scrape formats against strict parsers, buckets that users set, and the generated page."""

import json
import math
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from engine import ConfigError
from engine.config import EngineConfig
from engine.frontend.observer import EngineObserver
from engine.frontend.output_processor import ProcessedOutputs
from engine.types.messages import EngineCoreOutputs
from instrumentation import (
    ConsoleStatus,
    Metric,
    Metrics,
    Preemption,
    RequestTimeline,
    StepRecord,
)
from instrumentation.histogram_buckets import parse_buckets
from instrumentation.metric_docs import render
from instrumentation.metric_info import METRICS, MetricKind
from instrumentation.metric_types import Counter, Gauge, Histogram
from instrumentation.prometheus import MetricsServer, SnapshotCollector
from instrumentation.server_metrics import SERVER_METRICS
from instrumentation.vllm_names import DERIVED, SAME_VALUES, to_vllm
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
LABELS = {"model_name": "tiny", "engine": "0"}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def metrics() -> Metrics:
    """Metrics of two engines' worth of made-up work."""
    chance = random.Random(3)
    metrics = Metrics(LABELS)
    for number in range(50):
        metrics.observe_step(
            StepRecord(
                step=number,
                begin_ns=0,
                end_ns=number,
                num_context_requests=chance.randrange(2),
                num_context_tokens=chance.randrange(100),
                num_generation_requests=chance.randrange(1, 5),
                num_generation_tokens=chance.randrange(5),
                num_waiting=3,
                num_blocks_used=chance.randrange(1, 40),
                num_blocks_free=60,
                prefix_query_tokens=chance.randrange(50),
                preempted=(Preemption(1, 2, 30),) if chance.random() < 0.2 else (),
            )
        )
        timeline = RequestTimeline(
            request_id=str(number),
            arrival_ns=10,
            first_scheduled_ns=10 + chance.randrange(10**8),
            first_token_ns=2 * 10**8,
            last_token_ns=3 * 10**8 + chance.randrange(10**9),
            delivered_ns=2 * 10**9,
            num_prompt_tokens=chance.randrange(1, 300),
            num_generation_tokens=chance.randrange(2, 30),
            finish_reason=chance.choice(["stop", "length", "abort"]),
            traceparent=TRACEPARENT,
        )
        metrics.requests.observe_first_token(timeline)
        metrics.requests.observe_end(timeline)
        metrics.requests.observe_tokens(3, [10**6, 10**7])
    return metrics


@pytest.fixture
def server(metrics: Metrics) -> Iterator[MetricsServer]:
    """A scrape endpoint over them, vLLM's names included."""
    collector = SnapshotCollector(
        [metrics.snapshot], translations=[to_vllm], count_error=lambda: pytest.fail("an error")
    )
    server = MetricsServer(collector, host="127.0.0.1", port=0)
    yield server
    server.close()


def scrape(url: str, accept: str = "*/*") -> str:
    """One scrape's text."""
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        assert response.status == 200
        is_openmetrics = response.headers["Content-Type"].startswith("application/openmetrics")
        assert is_openmetrics == (accept == OPENMETRICS)
        return response.read().decode()


def samples_of(families: Any) -> Samples:
    """Every sample by name and labels; a second one of the same is an error."""
    samples: Samples = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


def expected_samples(snapshot: list[Metric]) -> Samples:
    """What a scrape of a snapshot must hold."""
    samples: Samples = {}
    for metric in snapshot:
        labels = metric.labels
        if isinstance(metric, Histogram):
            for bound, count in metric.buckets.items():
                key = frozenset((labels | {"le": bound}).items())
                samples[metric.name + "_bucket", key] = count
            samples[metric.name + "_count", frozenset(labels.items())] = metric.count
            samples[metric.name + "_sum", frozenset(labels.items())] = metric.sum
        else:
            assert isinstance(metric, Counter | Gauge)
            samples[metric.name, frozenset(labels.items())] = metric.value
    return samples


def own(samples: Samples) -> Samples:
    """Those under our names; ages move from scrape to scrape."""
    return {
        key: value
        for key, value in samples.items()
        if key[0].startswith("isinglass_") and "age_seconds" not in key[0]
    }


def test_both_formats_say_what_the_snapshot_says(metrics: Metrics, server: MetricsServer) -> None:
    text = own(samples_of(parse_text(scrape(server.url))))
    openmetrics = own(samples_of(parse_openmetrics(scrape(server.url, OPENMETRICS))))
    expected = own(expected_samples(metrics.snapshot()))
    assert text == openmetrics == expected
    names = {metric.name for metric in metrics.snapshot()}
    open_labels = {name for name, info in METRICS.items() if () in info.labels.values()}
    assert (names | open_labels) - SERVER_METRICS == set(METRICS) - SERVER_METRICS


def test_names_with_a_colon_survive_every_format(server: MetricsServer) -> None:
    for accept in ("*/*", OPENMETRICS, "text/plain; version=0.0.4"):
        text = scrape(server.url, accept)
        for name in (*SAME_VALUES, *DERIVED):
            lines = [line for line in text.splitlines() if line.startswith(name)]
            assert lines, (name, accept)


def test_latencies_carry_the_trace_where_openmetrics_is_asked_for(server: MetricsServer) -> None:
    families = {
        family.name: family for family in parse_openmetrics(scrape(server.url, OPENMETRICS))
    }
    buckets = families["isinglass_request_e2e_seconds"].samples
    exemplars = [sample.exemplar for sample in buckets if sample.exemplar]
    assert exemplars
    for sample in buckets:
        if sample.exemplar:
            assert sample.exemplar.labels == {
                "trace_id": TRACEPARENT.split("-")[1],
                "span_id": TRACEPARENT.split("-")[2],
            }
            assert sample.exemplar.value <= float(sample.labels["le"])
    assert " # {" not in scrape(server.url)


def test_requests_that_are_not_sampled_leave_no_exemplar() -> None:
    metrics = Metrics(LABELS)
    unsampled = TRACEPARENT.removesuffix("01") + "00"
    metrics.requests.observe_end(RequestTimeline(request_id="a", traceparent=unsampled))
    metrics.requests.observe_end(RequestTimeline(request_id="a"))
    metrics.requests.observe_end(RequestTimeline(request_id="a", traceparent="no trace context"))
    histograms = [metric for metric in metrics.snapshot() if isinstance(metric, Histogram)]
    assert not any(histogram.exemplars for histogram in histograms)


def test_vllm_names_have_vllms_labels_and_our_values(
    metrics: Metrics, server: MetricsServer
) -> None:
    samples = samples_of(parse_text(scrape(server.url)))
    base = frozenset(LABELS.items())
    for name, info in SAME_VALUES.items():
        ends = ("_count", "_sum") if info.kind is MetricKind.HISTOGRAM else ("",)
        for end in ends:
            assert samples[name + end, base] == samples[info.name + end, base]
    blocks = {
        state: samples["isinglass_kv_blocks", base | {("state", state)}]
        for state in ("used", "cached_free", "free")
    }
    usage = samples["vllm:kv_cache_usage_perc", base]
    assert usage == pytest.approx(blocks["used"] / sum(blocks.values()))
    num_steps = sum(
        value for (name, _), value in samples.items() if name == "isinglass_steps_total"
    )
    assert samples["vllm:iteration_tokens_total_count", base] == num_steps == 50
    for reason in ("stop", "length", "abort", "error"):
        ours = samples["isinglass_requests_finished_total", base | {("finish_reason", reason)}]
        theirs = samples["vllm:request_success_total", base | {("finished_reason", reason)}]
        assert ours == theirs


def test_a_scrape_survives_a_snapshot_that_raises() -> None:
    errors = []

    def broken() -> list[Metric]:
        raise RuntimeError("no numbers today")

    collector = SnapshotCollector([broken], count_error=lambda: errors.append(1))
    server = MetricsServer(collector, host="127.0.0.1", port=0)
    try:
        assert "isinglass" not in scrape(server.url)
    finally:
        server.close()
    assert errors == [1]


def test_other_paths_and_a_taken_port(server: MetricsServer) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(server.url.replace("/metrics", "/"), timeout=PATIENCE_S)
    collector = SnapshotCollector([], count_error=lambda: None)
    with pytest.raises(OSError, match="in use"):
        MetricsServer(collector, host="127.0.0.1", port=server.port)


# Buckets.


def test_buckets_replace_those_of_the_catalogue() -> None:
    buckets = parse_buckets('{"request_e2e_seconds": [0.5, 2], "isinglass_step_tokens": [1, 10]}')
    metrics = Metrics(buckets=buckets)
    metrics.requests.observe_end(RequestTimeline(request_id="a", arrival_ns=0, delivered_ns=10**9))
    by_name = {m.name: m for m in metrics.snapshot() if isinstance(m, Histogram)}
    assert by_name["isinglass_request_e2e_seconds"].buckets == {"0.5": 0, "2.0": 1, "+Inf": 1}
    assert list(by_name["isinglass_step_tokens"].buckets) == ["1.0", "10.0", "+Inf"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[1]", "must be an object"),
        ('{"nonsense": [1]}', "no histogram; there are: .*request_e2e_seconds"),
        ('{"steps_total": [1]}', "no histogram"),
        ('{"step_tokens": []}', "must be a list"),
        ('{"step_tokens": 3}', "must be a list"),
        ('{"step_tokens": [2, 1]}', "each above the one before"),
        ('{"step_tokens": [1, 1]}', "each above the one before"),
        ('{"step_tokens": [-1, 1]}', "none below 0"),
        ('{"step_tokens": [true]}', "True is not"),
        ('{"step_tokens": ["1"]}', "'1' is not"),
        (json.dumps({"step_tokens": [math.inf]}), "inf is not"),
    ],
)
def test_wrong_buckets_are_refused_before_anything_starts(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_kwargs(custom_histogram_buckets=text)


def test_the_page_of_metrics_is_what_the_catalogue_gives() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == render(), "run: python -m instrumentation.metric_docs > docs/metrics.md"
    for name in METRICS:
        assert f"`{name}`" in page


def test_only_reading_is_allowed(server: MetricsServer) -> None:
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(server.url, data=b"x", timeout=PATIENCE_S)
    request = urllib.request.Request(server.url, method="HEAD")
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        assert int(response.headers["Content-Length"]) > 1000
        assert response.read() == b""


@pytest.mark.slow
def test_sums_hold_for_whoever_reads_meanwhile() -> None:
    metrics = Metrics(LABELS)
    observer = EngineObserver(metrics, ConsoleStatus(log=lambda line: None))
    done = ProcessedOutputs()
    done.timelines = [RequestTimeline(request_id="a", last_token_ns=7, finish_reason="stop")] * 5
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            observer.observe(EngineCoreOutputs(), done)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(200):
            found = {m.name: m for m in metrics.snapshot() if "request_" in m.name}
            counts = {
                found[f"isinglass_request_{part}_seconds"].count
                for part in ("e2e", "queue", "prefill", "decode", "delivery")
            }
            assert len(counts) == 1
            assert counts.pop() % 5 == 0
    finally:
        stop.set()
        thread.join()
