"""What seeing costs: everything off, Prometheus only, and everything on, in turns.

    python benchmarks/overhead.py [--rounds 24] [--batches 1 64] [--tokens 16]

Three engines live side by side and one works at a time: `off` (no statistics, no flight
recorder), `prometheus` (the default, with its endpoint scraped every five seconds) and
`everything` (besides: journals, OpenTelemetry spans of every step to a receiver that is there,
NVTX ranges). A round is the same generation on each, in random order, so that a slow spell of the
machine hits all alike. A round's ratio is a mode's time over the time of `off`; the median over
the rounds is the result.

Then the price of what runs in line with a step, in microseconds: the spans and records of one
step on the real instrument, less the same on the one that records nothing.

The last line of stdout is one JSON document.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rich.console import Console
from rich.table import Table

from engine import LLM, SamplingParams
from instrumentation import (
    NULL,
    Instrument,
    ObservabilityConfig,
    Role,
    StepLabel,
    StepRecord,
    WorkerStepRecord,
)
from instrumentation.setup import setup

MODES = ("off", "prometheus", "everything")
SCRAPE_INTERVAL_S = 5.0


class Receiver(BaseHTTPRequestHandler):
    """Takes whatever is exported and forgets it."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def otlp_receiver() -> Iterator[str]:
    """A receiver of OTLP over HTTP; its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def settings(mode: str, folder: str, receiver: str) -> dict[str, Any]:
    """The engine arguments of one mode."""
    common = {"log_level": "warning", "kv_cache_memory_bytes": 256 << 20}
    if mode == "off":
        return common | {"disable_log_stats": True, "flight_recorder_steps": 0, "nvtx": "off"}
    if mode == "prometheus":
        return common | {"metrics_port": 0}
    return common | {
        "metrics_port": 0,
        "trace_dir": folder,
        "otlp_traces_endpoint": f"{receiver}/v1/traces",  # a path means HTTP
        "trace_steps": "all",
        "nvtx": "on",
    }


def seconds(llm: LLM, prompts: list[str], params: SamplingParams) -> float:
    """Time of one generation."""
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def keep_scraping(urls: list[str], stop: threading.Event) -> None:
    """Scrape each endpoint now and then."""
    while not stop.wait(SCRAPE_INTERVAL_S):
        for url in urls:
            with urllib.request.urlopen(url, timeout=10) as response:
                response.read()


def compare(
    llms: dict[str, LLM], batch: int, *, rounds: int, params: SamplingParams
) -> dict[str, list[float]]:
    """Ratios to `off`, a round each."""
    chance = random.Random(batch)
    prompts = [f"Write a short story about a robot number {i} who" for i in range(batch)]
    for llm in llms.values():
        seconds(llm, prompts, params)
    ratios: dict[str, list[float]] = {mode: [] for mode in MODES if mode != "off"}
    for _ in range(rounds):
        order = chance.sample(MODES, len(MODES))
        times = {mode: seconds(llms[mode], prompts, params) for mode in order}
        for mode, of_mode in ratios.items():
            of_mode.append(times[mode] / times["off"])
    return ratios


def run_through_steps(obs: Instrument, num_steps: int) -> float:
    """Seconds per step of everything that the engine's stages call in one step."""
    worker = obs.for_thread("worker")
    label = StepLabel(0, 0, 1, 1)
    start = time.perf_counter()
    for number in range(num_steps):
        for span in (obs.intake, obs.schedule, obs.execute, obs.wait, obs.update, obs.publish):
            with span:
                pass
        worker.step_begin(label)
        for span in (worker.prepare, worker.forward, worker.logits, worker.sample, worker.readback):
            with span:
                pass
        worker.worker_step(WorkerStepRecord(step=number, begin_ns=1, end_ns=2))
        obs.step(StepRecord(step=number, begin_ns=1, end_ns=2))
    return (time.perf_counter() - start) / num_steps


def price_of_a_step_us() -> float:
    """Microseconds in line with a step while it is recorded; the median of several goes."""
    differences = []
    with tempfile.TemporaryDirectory() as folder:
        obs = setup(ObservabilityConfig(), role=Role.CORE, run_dir=folder)
        for _ in range(15):
            recorded, plain = run_through_steps(obs, 400), run_through_steps(NULL, 400)
            differences.append((recorded - plain) * 1e6)
            obs.flush()
        obs.close()
    return statistics.median(differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=16, help="output tokens of one generation")
    arguments = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    table = Table(title="time relative to everything off")
    for column in ("batch", "mode", "median", "quartiles"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        receiver = stack.enter_context(otlp_receiver())
        llms = {
            mode: stack.enter_context(LLM(**settings(mode, folder, receiver))) for mode in MODES
        }
        stop = threading.Event()
        urls = [llm.metrics_url for llm in llms.values() if llm.metrics_url is not None]
        scraper = threading.Thread(target=keep_scraping, args=(urls, stop))
        scraper.start()
        for batch in arguments.batches:
            ratios = compare(llms, batch, rounds=arguments.rounds, params=params)
            result[f"batch_{batch}"] = {}
            for mode, of_mode in ratios.items():
                low, median, high = statistics.quantiles(of_mode, n=4)
                table.add_row(str(batch), mode, f"{median:.4f}", f"{low:.4f} to {high:.4f}")
                result[f"batch_{batch}"][f"{mode}_ratio"] = round(median, 4)
        stop.set()
        scraper.join()
    result["in_line_us_per_step"] = round(price_of_a_step_us(), 2)
    Console().print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
