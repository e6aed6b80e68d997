"""The load generator against this engine's own server: both sides count the same."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.server_process import ServerProcess
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def bench(server: ServerProcess, *arguments: str) -> dict[str, Any]:
    """Run the command; its document."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "engine.cli.main", "bench", "serve"),
            *("--base-url", server.url, *arguments),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def counters(server: ServerProcess) -> dict[str, float]:
    """The server's own totals of requests and tokens."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE_S) as response:
        text = response.read().decode()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_total"):
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def test_a_poisson_load_is_counted_alike_on_both_sides(embedded_server: ServerProcess) -> None:
    before = counters(embedded_server)
    document = bench(
        embedded_server,
        *("--num-prompts", "8", "--request-rate", "8", "--input-len", "20", "--output-len", "6"),
        *("--ignore-eos", "--goodput", "ttft:60000"),
    )
    after = counters(embedded_server)
    assert document["outcomes"] == {"ok": 8}
    assert document["model_id"] == "SmolLM2-135M-Instruct"
    assert document["tokens_counted_by"] == "usage"
    assert document["total_output_tokens"] == 48
    assert document["total_input_tokens"] == 160  # a word is a token of this model
    assert document["goodput_ratio"] == 1
    assert 0 < document["p50_ttft_ms"] < document["p50_e2el_ms"]
    name = "isinglass_generation_tokens_total"
    assert after[name] - before[name] == 48


def test_shared_prefixes_are_found_in_the_servers_cache(embedded_server: ServerProcess) -> None:
    document = bench(
        embedded_server,
        *("--num-prompts", "6", "--max-concurrency", "2", "--endpoint", "chat", "--ignore-eos"),
        *("--dataset-name", "shared-prefix", "--num-prefixes", "1", "--prefix-len", "96"),
        *("--input-len", "8", "--output-len", "4", "--num-warmups", "1"),
    )
    assert document["outcomes"] == {"ok": 6}
    assert document["total_output_tokens"] == 24
    assert document["total_cached_tokens"] >= 6 * 96


def test_token_ids_are_taken_as_they_are(embedded_server: ServerProcess) -> None:
    document = bench(
        embedded_server,
        *("--num-prompts", "4", "--max-concurrency", "4", "--token-ids", "100:20000"),
        *("--input-len", "33", "--output-len", "3", "--ignore-eos"),
    )
    assert document["outcomes"] == {"ok": 4}
    assert document["total_input_tokens"] == 4 * 33
    assert document["total_output_tokens"] == 12
