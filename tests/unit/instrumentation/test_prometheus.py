"""The scrape formats against strict parsers, buckets that users set, and the generated page."""

import json
import math
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.utils import floatToGoString

from engine import ConfigError
from engine.config import EngineConfig
from engine.frontend.observer import EngineObserver
from engine.frontend.output_processor import ProcessedOutputs
from engine.types.messages import EngineCoreOutputs
from instrumentation import ConsoleStatus, Metric, Metrics, RequestTimeline, SinkName
from instrumentation.metrics.accumulators import bound_text
from instrumentation.metrics.buckets import parse_buckets
from instrumentation.metrics.docs import render
from instrumentation.metrics.info import METRICS
from instrumentation.metrics.prometheus import MetricsServer, SnapshotCollector
from instrumentation.metrics.server import SERVER_METRICS
from instrumentation.metrics.types import Counter, Gauge, Histogram
from instrumentation.metrics.vllm_names import to_vllm
from tests.support.scrapes import (
    LABELS,
    OPENMETRICS,
    TRACEPARENT,
    Samples,
    made_up_metrics,
    samples_of,
    scrape_of,
)
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def metrics() -> Metrics:
    return made_up_metrics()


@pytest.fixture
def server(metrics: Metrics) -> Iterator[MetricsServer]:
    """A scrape endpoint over them, vLLM's names included."""
    collector = SnapshotCollector([metrics.snapshot], translations=[to_vllm])
    server = MetricsServer(collector, host="127.0.0.1", port=0)
    yield server
    server.close()
    assert collector.num_errors == 0


def scrape(url: str, accept: str = "*/*") -> str:
    """One scrape's text."""
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        assert response.status == 200
        is_openmetrics = response.headers["Content-Type"].startswith("application/openmetrics")
        assert is_openmetrics == (accept == OPENMETRICS)
        return response.read().decode()


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


def broken(*_: Any) -> list[Any]:
    """What a part of a scrape may come to be, by a defect."""
    raise RuntimeError("no numbers today")


def unwritable(_: Sequence[Metric]) -> Iterable[GaugeMetricFamily]:
    """A good family, and one of a label that is no text."""
    yield GaugeMetricFamily("good", "As all are.", value=1)
    bad = GaugeMetricFamily("bad", "Not text.", labels=["what"])
    bad.add_metric([1], 1)  # type: ignore[list-item]
    yield bad


def test_a_scrape_lacks_the_part_that_fails_and_no_other(
    metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    alone = SnapshotCollector([metrics.snapshot])
    ours = {name for name, _ in samples_of(parse_text(scrape_of(alone)))}
    both = ours | {sample.name for one in to_vllm(metrics.snapshot()) for sample in one.samples}
    for snapshots, translations, expected in (
        ([broken, metrics.snapshot], [to_vllm], both),
        ([metrics.snapshot], [broken, to_vllm], both),
        ([metrics.snapshot], [unwritable, to_vllm], both | {"good"}),
        ([broken], [], set()),
    ):
        caplog.clear()
        collector = SnapshotCollector(snapshots, translations=translations)
        metrics.engine.watch(SinkName.PROMETHEUS, collector)
        for number in (1, 2, 3):
            for parse, accept in ((parse_text, "*/*"), (parse_openmetrics, OPENMETRICS)):
                samples = samples_of(parse(scrape_of(collector, accept)))
                assert {name for name, _ in samples} == expected
            assert collector.num_errors == 2 * number
        assert len(caplog.records) == 1, "the first is logged, with where it came from"
        assert caplog.records[0].exc_info is not None
    counted = [
        metric.value
        for metric in metrics.snapshot()
        if metric.name == "isinglass_telemetry_errors_total"
        and metric.labels["sink"] == "prometheus"
        and isinstance(metric, Counter)
    ]
    assert counted == [4 * 6]


def test_other_paths_and_a_taken_port(server: MetricsServer) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(server.url.replace("/metrics", "/"), timeout=PATIENCE_S)
    collector = SnapshotCollector([])
    with pytest.raises(OSError, match="in use"):
        MetricsServer(collector, host="127.0.0.1", port=server.port)


# Buckets.


def test_bounds_are_written_as_prometheus_writes_them() -> None:
    for info in METRICS.values():
        for bound in info.buckets:
            assert bound_text(bound) == floatToGoString(bound)
    assert [bound_text(bound) for bound in (0.25, 1.0, 2.5e5, 1e6, 12_500_000.0)] == [
        *("0.25", "1.0", "250000.0", "1e+06", "1.25e+07")
    ]


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
    assert page == render(), "run: python -m instrumentation.metrics.docs > docs/metrics.md"
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
