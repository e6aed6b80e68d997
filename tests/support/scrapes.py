"""Made-up metrics, and what a scrape of them holds."""

import random
from typing import Any

from instrumentation import Metrics, Preemption, RequestTimeline, StartupPhase, StepRecord
from instrumentation.metrics.engine import ENGINE_INFO, MEMORY_COMPONENTS
from instrumentation.metrics.prometheus import SnapshotCollector, exposition

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
LABELS = {"model_name": "tiny", "engine": "0"}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def start(metrics: Metrics) -> None:
    """Have an engine come up, with a value in every fact."""
    metrics.engine.engine_is_ready(
        info=dict.fromkeys(ENGINE_INFO.labels, "x"),
        settings={"block_size": "16"},
        kv_cache_tokens=1600,
        max_model_len=512,
        memory_bytes=dict.fromkeys(MEMORY_COMPONENTS, 5),
        startup_ns={phase.label: 7 for phase in StartupPhase},
    )


def made_up_metrics() -> Metrics:
    """Metrics of an engine that has started, and of some made-up work."""
    chance = random.Random(3)
    metrics = Metrics(LABELS)
    start(metrics)
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
                prefix_query_tokens=chance.randrange(50, 90),
                prefix_hit_tokens=chance.randrange(50),
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


def scrape_of(collector: SnapshotCollector, accept: str = "*/*") -> str:
    """A scrape's text, without a server."""
    return exposition(collector, accept=accept)[0].decode()


def samples_of(families: Any) -> Samples:
    """Every sample by name and labels; a second one of the same is an error."""
    samples: Samples = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples
