"""vLLM's names, labels and bounds, with our values."""

import pytest
from prometheus_client import ProcessCollector
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.utils import floatToGoString

from instrumentation import Metrics
from instrumentation.metrics.info import MetricKind
from instrumentation.metrics.prometheus import SnapshotCollector
from instrumentation.metrics.server import ServerMetrics
from instrumentation.metrics.types import Gauge
from instrumentation.metrics.vllm_names import DERIVED, SAME_VALUES, STEP_TOKENS, to_vllm
from instrumentation.metrics.vllm_server_names import PROCESS_NAMES
from tests.support.scrapes import LABELS, OPENMETRICS, made_up_metrics, samples_of, scrape_of


@pytest.fixture
def metrics() -> Metrics:
    return made_up_metrics()


def test_names_with_a_colon_survive_every_format(metrics: Metrics) -> None:
    collector = SnapshotCollector([metrics.snapshot], translations=[to_vllm])
    for accept in ("*/*", OPENMETRICS, "text/plain; version=0.0.4", "text/plain; version=1.0.0"):
        text = scrape_of(collector, accept)
        for name in (*SAME_VALUES, *DERIVED, STEP_TOKENS):
            lines = [line for line in text.splitlines() if line.startswith(name)]
            assert lines, (name, accept)


def test_vllm_names_have_vllms_labels_and_our_values(metrics: Metrics) -> None:
    collector = SnapshotCollector([metrics.snapshot], translations=[to_vllm])
    samples = samples_of(parse_text(scrape_of(collector)))
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
    hits = samples["vllm:prefix_cache_hits_total", base]
    for tier in ("device", "host", "p2p", "disk", "external_unspecified"):
        found = samples["vllm:prompt_tokens_cached_by_source_total", base | {("source", tier)}]
        assert found == (hits if tier == "device" else 0)
    sources = [
        samples["vllm:prompt_tokens_by_source_total", base | {("source", source)}]
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    ]
    assert sum(sources) == samples["vllm:prompt_tokens_total", base] > 0
    for reason in ("stop", "length", "abort", "error"):
        ours = samples["isinglass_requests_finished_total", base | {("finish_reason", reason)}]
        theirs = samples["vllm:request_success_total", base | {("finished_reason", reason)}]
        assert ours == theirs


def test_an_engine_that_is_not_there_has_no_series_of_vllms() -> None:
    """Zeros would look idle, and draw a router's requests."""
    server = ServerMetrics(LABELS)
    up = Gauge("isinglass_engine_up", LABELS, 0)
    names = {one.name for one in to_vllm([up, *server.snapshot()])}
    assert names == {name.removesuffix("_total") for name in PROCESS_NAMES}
    assert not list(to_vllm([]))


VLLM_BOUNDS = {
    (".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"): (
        "vllm:time_to_first_token_seconds",
    ),
    (".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"): (
        "vllm:inter_token_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
    ),
    (".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"): (
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_inference_time_seconds",
    ),
    (".001 .002 .005 .01 .02 .05 .1 .2 .5 1 2 5 10 20 30 60 120 300 600 1200 1800"): (
        "vllm:kv_block_lifetime_seconds",
        "vllm:kv_block_idle_before_evict_seconds",
        "vllm:kv_block_reuse_gap_seconds",
    ),
    ("1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384"): ("vllm:iteration_tokens_total",),
    ("1 2 5 10 20"): ("vllm:request_params_n",),
    ("1 2 3 4 5 10 20"): ("vllm:request_num_preemptions",),
    (".1 .5 1"): ("http_request_duration_seconds",),
    (".01 .025 .05 .075 .1 .25 .5 .75 1 1.5 2 2.5 3 3.5 4 4.5 5 7.5 10 30 60"): (
        "http_request_duration_highr_seconds",
    ),
}
"""vLLM 0.32's bounds, and those of its HTTP server, by the histograms that have them."""


def test_our_bounds_have_vllms_among_them(metrics: Metrics) -> None:
    """A panel of an objective asks for one bound, by its text (`le="0.25"`)."""
    metrics.sources.append(busy_server().snapshot)
    bounds: dict[str, set[str]] = {}
    for one in to_vllm(metrics.snapshot()):
        for sample in one.samples:
            if sample.name.endswith("_bucket"):
                bounds.setdefault(one.name, set()).add(sample.labels["le"])
    for text, names in VLLM_BOUNDS.items():
        theirs = {floatToGoString(float(bound)) for bound in text.split()}
        for name in names:
            assert not theirs - bounds[name], name


# A server's.


def busy_server() -> ServerMetrics:
    """A server that has answered some."""
    server = ServerMetrics(LABELS)
    for method, route, status, num_bytes in (
        ("POST", "/v1/completions", 200, 300),
        ("POST", "/v1/completions", 200, 100),
        ("POST", "/v1/completions", 400, 7),
        ("POST", "/v1/chat/completions", 499, 50),
        ("GET", "/v1/models", 200, 0),
        ("GET", "other", 404, 0),
        ("GET", "/health", 503, 0),
        ("GET", "/metrics", 200, 0),
    ):
        server.observe_arrival()
        server.num_response_bytes[route] += 10 * num_bytes
        server.observe_end(
            method=method,
            route=route,
            status=status,
            outcome="completed",
            duration_ns=status * 10**6,
            num_request_bytes=num_bytes,
        )
    return server


def test_a_servers_names_are_those_of_vllms_server() -> None:
    server = busy_server()
    collector = SnapshotCollector([server.snapshot], translations=[to_vllm])
    for parse, accept in ((parse_text, "*/*"), (parse_openmetrics, OPENMETRICS)):
        samples = samples_of(parse(scrape_of(collector, accept)))

        def of(name: str) -> dict[tuple[str, ...], float]:
            """Values by the labels' values, in the order of their names."""
            return {
                tuple(value for _, value in sorted(labels)): number
                for (one, labels), number in samples.items()
                if one == name
            }

        assert of("http_requests_total") == {
            ("/v1/completions", "POST", "2xx"): 2,
            ("/v1/completions", "POST", "4xx"): 1,
            ("/v1/chat/completions", "POST", "4xx"): 1,
            ("/v1/models", "GET", "2xx"): 1,
            ("none", "GET", "4xx"): 1,
        }
        durations = of("http_request_duration_seconds_sum")
        assert durations["/v1/completions", "POST"] == pytest.approx(0.8)
        assert of("http_request_duration_highr_seconds_count") == {(): 6}
        in_half = of("http_request_duration_highr_seconds_bucket")
        assert in_half["0.5",] == 6
        assert in_half["0.25",] == 3
        assert of("http_request_size_bytes_sum")["/v1/completions",] == 407
        assert of("http_request_size_bytes_count")["/v1/completions",] == 3
        assert of("http_response_size_bytes_sum")["/v1/completions",] == 4070
        assert {handler for (handler,) in of("http_response_size_bytes_count")} == {
            *("/v1/completions", "/v1/chat/completions", "/v1/models", "none")
        }


def test_a_servers_process_is_told_of_as_prometheus_clients_do() -> None:
    server = busy_server()
    samples = {
        sample.name: sample
        for one in to_vllm(server.snapshot())
        for sample in one.samples
        if sample.name.startswith("process_")
    }
    theirs = {
        sample.name: sample.value
        for one in ProcessCollector(registry=None).collect()
        for sample in one.samples
    }
    assert set(samples) == set(PROCESS_NAMES) == set(theirs)
    for name, sample in samples.items():
        assert sample.labels == {}
        assert sample.value == pytest.approx(theirs[name], rel=0.5), name
    assert samples["process_max_fds"].value == theirs["process_max_fds"]
    began_s = samples["process_start_time_seconds"].value
    assert began_s == pytest.approx(theirs["process_start_time_seconds"], abs=3)
