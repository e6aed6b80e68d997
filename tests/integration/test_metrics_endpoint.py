"""A live engine scraped by a real Prometheus, and what the numbers must add up to."""

import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from engine import LLM, ConfigError, PromptError, SamplingParams
from instrumentation.metrics.info import METRICS
from instrumentation.metrics.server import SERVER_METRICS
from instrumentation.metrics.vllm_names import DERIVED, SAME_VALUES
from tests.integration.conftest import SMALL
from tests.waiting import PATIENCE_S, wait_until

PROMETHEUS = shutil.which("prometheus")


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    """An engine that has served, refused and run out of room."""
    with LLM(
        tiny_llama,
        metrics_port=0,
        metrics_compat="vllm",
        skip_tokenizer_init=True,
        max_num_seqs=4,
        num_gpu_blocks_override=24,
        **{k: v for k, v in SMALL.items() if k != "kv_cache_memory_bytes"},
    ) as llm:
        params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False, temperature=1.0)
        prompts = [[7 + number] * (20 + 7 * number) for number in range(9)]
        llm.generate(prompts, params, use_tqdm=False)
        llm.generate(prompts[:2], params.clone(n=3), use_tqdm=False)
        with pytest.raises(PromptError):
            llm.generate([[1] * 10**6], params, use_tqdm=False)
        yield llm


def scrape(llm: LLM) -> dict[str, float]:
    """Sums over all series, by name; counts and sums of histograms too."""
    assert llm.metrics_url is not None
    with urllib.request.urlopen(llm.metrics_url, timeout=PATIENCE_S) as response:
        text = response.read().decode()
    totals: dict[str, float] = {}
    for family in parse_text(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                totals[sample.name] = totals.get(sample.name, 0) + sample.value
    return totals


def test_a_live_scrape_has_every_metric_of_the_catalogue(llm: LLM) -> None:
    totals = scrape(llm)
    open_labels = {name for name, info in METRICS.items() if () in info.labels.values()}
    missing = {
        name
        for name in METRICS
        if name not in totals and f"{name}_count" not in totals and name not in open_labels
    }
    assert not missing - SERVER_METRICS
    unknown = {
        name
        for name in totals
        if name.startswith("isinglass_")
        and name.removesuffix("_count").removesuffix("_sum") not in METRICS
        and name not in METRICS
    }
    assert not unknown
    for name in (*SAME_VALUES, *DERIVED):
        assert name in totals or f"{name}_count" in totals


def test_counts_add_up(llm: LLM) -> None:
    totals = scrape(llm)
    num_sequences = 9 + 2 * 3
    assert totals["isinglass_requests_arrived_total"] == num_sequences + 1
    assert totals["isinglass_requests_rejected_total"] == 1
    assert totals["isinglass_requests_finished_total"] == num_sequences
    assert totals["isinglass_requests_in_flight"] == 0
    assert totals["isinglass_time_to_first_token_seconds_count"] == num_sequences
    assert totals["isinglass_generation_tokens_total"] == 40 * num_sequences
    assert totals["isinglass_sampled_tokens_total"] == 40 * num_sequences
    assert totals["isinglass_inter_token_latency_seconds_count"] == 39 * num_sequences
    assert totals["isinglass_steps_total"] == totals["isinglass_step_duration_seconds_count"]
    assert totals["isinglass_graph_steps_total"] == totals["isinglass_steps_total"]
    assert totals["isinglass_step_tokens_sum"] == totals["isinglass_scheduled_tokens_total"]
    assert totals["isinglass_kv_blocks"] == 24
    looked_up = totals["isinglass_prefix_cache_query_tokens_total"]
    found = totals["isinglass_prefix_cache_hit_tokens_total"]
    assert looked_up == found + totals["isinglass_prefix_cache_miss_tokens_total"]
    parts = sum(
        totals[f"isinglass_request_{part}_seconds_sum"]
        for part in ("queue", "prefill", "decode", "preempted")
    )
    assert parts == pytest.approx(totals["isinglass_request_e2e_seconds_sum"], abs=1e-6)


def test_a_tight_pool_shows_in_the_preemption_bill(llm: LLM) -> None:
    totals = scrape(llm)
    assert totals["isinglass_preemptions_total"] > 0
    assert totals["isinglass_preemption_lost_blocks_total"] > 0
    assert (
        0
        < totals["isinglass_preemption_recomputed_tokens_total"]
        <= totals["isinglass_preemption_lost_tokens_total"]
    )
    assert totals["isinglass_request_preemptions_sum"] == totals["isinglass_preemptions_total"]
    assert totals["isinglass_kv_block_evictions_total"] > 0
    assert totals["isinglass_kv_block_lifetime_seconds_count"] > 0


def test_facts_of_the_engine(llm: LLM) -> None:
    totals = scrape(llm)
    assert totals["isinglass_engine_up"] == totals["isinglass_engine_info"] == 1
    assert totals["isinglass_kv_cache_capacity_tokens"] == 24 * llm.config.cache.block_size
    assert totals["isinglass_max_model_len_tokens"] == llm.config.model.max_model_len
    assert totals["isinglass_memory_bytes"] > 50e6
    assert totals["isinglass_startup_phase_seconds"] > 0.1
    assert totals["isinglass_telemetry_errors_total"] == 0
    assert totals["isinglass_telemetry_negative_values_total"] == 0


def test_metrics_port_needs_metrics_and_a_free_port(llm: LLM, tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="disable_log_stats"):
        LLM(tiny_llama, metrics_port=0, disable_log_stats=True)
    assert llm.metrics_url is not None
    taken = urllib.parse.urlsplit(llm.metrics_url).port
    with pytest.raises(ConfigError, match=f"metrics_port {taken}"):
        LLM(tiny_llama, metrics_port=taken)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def prometheus(llm: LLM, tmp_path: Path) -> Iterator[str]:
    """A real Prometheus that scrapes the engine; its address."""
    if PROMETHEUS is None:
        pytest.skip("no prometheus on this machine (scripts/install_services.sh)")
    assert llm.metrics_url is not None
    target = urllib.parse.urlsplit(llm.metrics_url).netloc
    configuration = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "scrape_configs": [
            {"job_name": "isinglass", "static_configs": [{"targets": [target]}]},
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(configuration))  # JSON is YAML
    port = free_port()
    with subprocess.Popen(
        [
            PROMETHEUS,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--enable-feature=exemplar-storage",
        ],
        stderr=subprocess.DEVNULL,
    ) as process:
        yield f"http://127.0.0.1:{port}"
        process.terminate()


def query(address: str, expression: str) -> list[dict[str, Any]]:
    """The result of an instant query."""
    url = f"{address}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
        return json.load(response)["data"]["result"]


def test_a_real_prometheus_takes_everything_in(llm: LLM, prometheus: str) -> None:

    def has_scraped() -> bool:
        try:
            return bool(query(prometheus, "up{job='isinglass'} == 1"))
        except OSError:
            return False  # not listening yet

    wait_until(has_scraped, "Prometheus has not scraped the engine")
    totals = scrape(llm)
    for name in (
        "isinglass_generation_tokens_total",
        "vllm:generation_tokens_total",
        "isinglass_requests_finished_total",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:kv_cache_usage_perc",
    ):
        [result] = query(prometheus, f"sum({name})")
        assert float(result["value"][1]) == pytest.approx(totals[name])
    quantile = "histogram_quantile(0.5, sum by (le) (vllm:time_to_first_token_seconds_bucket))"
    [result] = query(prometheus, quantile)
    assert 0 < float(result["value"][1]) < 60
