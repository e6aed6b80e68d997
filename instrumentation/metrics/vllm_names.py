"""The same values under vLLM's names, for dashboards that were made for vLLM.

Knows vLLM 0.32's metric names, labels and units for everything that has a meaning here; those of
its HTTP server are in `vllm_server_names`. Values are ours, and so are definitions:
`vllm:request_queue_time_seconds` starts at arrival here, in vLLM at the core's queue. Bounds are
ours too; latencies have vLLM's among them. A name is there as soon as what it is made of: a server
whose engine is still starting has none of an engine's, rather than zeros that look idle.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from instrumentation.metrics import cache as cache_metrics
from instrumentation.metrics import engine as engine_metrics
from instrumentation.metrics import requests as request_metrics
from instrumentation.metrics import steps as step_metrics
from instrumentation.metrics.info import MetricInfo
from instrumentation.metrics.merge import regroup
from instrumentation.metrics.prometheus import family
from instrumentation.metrics.types import Counter, Gauge, Metric
from instrumentation.metrics.vllm_server_names import server_families

_BASE_LABELS = ("model_name", "engine")

SAME_VALUES: dict[str, MetricInfo] = {
    "vllm:num_requests_running": step_metrics.REQUESTS_RUNNING,
    "vllm:num_requests_waiting": step_metrics.REQUESTS_WAITING,
    "vllm:num_preemptions_total": cache_metrics.PREEMPTIONS,
    "vllm:prompt_tokens_total": request_metrics.PROMPT_TOKENS,
    "vllm:prompt_tokens_cached_total": request_metrics.CACHED_PROMPT_TOKENS,
    "vllm:generation_tokens_total": request_metrics.GENERATION_TOKENS,
    "vllm:time_to_first_token_seconds": request_metrics.TIME_TO_FIRST_TOKEN,
    "vllm:inter_token_latency_seconds": request_metrics.INTER_TOKEN_LATENCY,
    "vllm:request_time_per_output_token_seconds": request_metrics.TIME_PER_OUTPUT_TOKEN,
    "vllm:e2e_request_latency_seconds": request_metrics.E2E_SECONDS,
    "vllm:request_queue_time_seconds": request_metrics.QUEUE_SECONDS,
    "vllm:request_prefill_time_seconds": request_metrics.PREFILL_SECONDS,
    "vllm:request_decode_time_seconds": request_metrics.DECODE_SECONDS,
    "vllm:request_inference_time_seconds": request_metrics.INFERENCE_SECONDS,
    "vllm:request_prompt_tokens": request_metrics.REQUEST_PROMPT_TOKENS,
    "vllm:request_generation_tokens": request_metrics.REQUEST_GENERATION_TOKENS,
    "vllm:request_max_num_generation_tokens": request_metrics.REQUEST_GENERATION_TOKENS,
    "vllm:request_params_max_tokens": request_metrics.REQUEST_MAX_TOKENS,
    "vllm:request_params_n": request_metrics.REQUEST_N,
    "vllm:request_num_preemptions": request_metrics.REQUEST_PREEMPTIONS,
    "vllm:request_prefill_kv_computed_tokens": request_metrics.REQUEST_COMPUTED_PROMPT_TOKENS,
    "vllm:kv_block_lifetime_seconds": cache_metrics.KV_BLOCK_LIFETIME,
    "vllm:kv_block_idle_before_evict_seconds": cache_metrics.KV_BLOCK_IDLE,
    "vllm:kv_block_reuse_gap_seconds": cache_metrics.KV_BLOCK_REUSE_GAP,
}
"""Metrics that differ by name alone."""

_CACHE_SETTINGS = (
    *("block_size", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    *("num_gpu_blocks_override", "enable_prefix_caching"),
)


class _Engine(NamedTuple):
    """The series of one engine, by name."""

    labels: dict[str, str]
    series: dict[str, list[Metric]]

    def sum(self, info: MetricInfo, **labels: str) -> float:
        """The values of all series with these labels."""
        total = 0.0
        for metric in self.series[info.name]:
            if all(metric.labels[name] == value for name, value in labels.items()):
                assert isinstance(metric, Counter | Gauge)
                total += metric.value
        return total


class Derived(NamedTuple):
    """A metric of vLLM's whose labels or unit are not those of any of ours."""

    sources: tuple[MetricInfo, ...]
    """What it is made of; without them it is not there."""
    help: str
    labels: tuple[str, ...]
    """Beside those that every series has."""
    values: Callable[[_Engine], Iterable[tuple[tuple[str, ...], float]]]
    """Of one engine, by the labels' values."""


def _waiting(engine: _Engine) -> Iterable[tuple[tuple[str, ...], float]]:
    num_deferred = engine.sum(step_metrics.REQUESTS_WAITING_BY_REASON, reason="grammar")
    yield ("capacity",), engine.sum(step_metrics.REQUESTS_WAITING) - num_deferred
    yield ("deferred",), num_deferred


def _usage(engine: _Engine) -> Iterable[tuple[tuple[str, ...], float]]:
    num_blocks = engine.sum(cache_metrics.KV_BLOCKS)
    yield (), engine.sum(cache_metrics.KV_BLOCKS, state="used") / num_blocks if num_blocks else 0


def _cache_settings(engine: _Engine) -> Iterable[tuple[tuple[str, ...], float]]:
    settings = {
        metric.labels["setting"]: metric.labels["value"]
        for metric in engine.series[engine_metrics.CONFIG_INFO.name]
    }
    capacity = engine.sum(engine_metrics.KV_CACHE_CAPACITY)
    block_size = settings.get("block_size")
    num_blocks = str(int(capacity) // int(block_size)) if block_size else ""
    yield (*(settings.get(name, "") for name in _CACHE_SETTINGS), num_blocks), 1


def _first_queries(engine: _Engine) -> Iterable[tuple[tuple[str, ...], float]]:
    yield (), engine.sum(cache_metrics.PREFIX_QUERY_TOKENS, admission="first")


def _first_hits(engine: _Engine) -> Iterable[tuple[tuple[str, ...], float]]:
    yield (), engine.sum(cache_metrics.PREFIX_HIT_TOKENS, admission="first")


def _prompt_sources(engine: _Engine) -> Iterable[tuple[tuple[str, ...], float]]:
    num_cached = engine.sum(request_metrics.CACHED_PROMPT_TOKENS)
    yield ("local_compute",), engine.sum(request_metrics.PROMPT_TOKENS) - num_cached
    yield ("local_cache_hit",), num_cached
    yield ("external_kv_transfer",), 0


def _cache_tiers(engine: _Engine) -> Iterable[tuple[tuple[str, ...], float]]:
    yield ("device",), engine.sum(cache_metrics.PREFIX_HIT_TOKENS, admission="first")
    for tier in ("host", "p2p", "disk", "external_unspecified"):
        yield (tier,), 0


def _ended(engine: _Engine) -> Iterable[tuple[tuple[str, ...], float]]:
    for reason in request_metrics.FINISH_REASONS:
        yield (reason,), engine.sum(request_metrics.REQUESTS_FINISHED, finish_reason=reason)


DERIVED: dict[str, Derived] = {
    "vllm:num_requests_waiting_by_reason": Derived(
        (step_metrics.REQUESTS_WAITING, step_metrics.REQUESTS_WAITING_BY_REASON),
        "Waiting requests: for capacity, or for a grammar (deferred); 0 after the core's death.",
        ("reason",),
        _waiting,
    ),
    "vllm:kv_cache_usage_perc": Derived(
        (cache_metrics.KV_BLOCKS,),
        "Share of KV blocks in use, 0 to 1; 0 after the core's death.",
        (),
        _usage,
    ),
    "vllm:cache_config_info": Derived(
        (engine_metrics.CONFIG_INFO, engine_metrics.KV_CACHE_CAPACITY),
        "Settings of the KV cache, in labels.",
        (*_CACHE_SETTINGS, "num_gpu_blocks"),
        _cache_settings,
    ),
    "vllm:prefix_cache_queries_total": Derived(
        (cache_metrics.PREFIX_QUERY_TOKENS,),
        "Tokens looked up in the prefix cache.",
        (),
        _first_queries,
    ),
    "vllm:prefix_cache_hits_total": Derived(
        (cache_metrics.PREFIX_HIT_TOKENS,), "Tokens found in the prefix cache.", (), _first_hits
    ),
    "vllm:prompt_tokens_by_source_total": Derived(
        (request_metrics.PROMPT_TOKENS, request_metrics.CACHED_PROMPT_TOKENS),
        "Prompt tokens, by source; none comes by a transfer from elsewhere.",
        ("source",),
        _prompt_sources,
    ),
    "vllm:prompt_tokens_cached_by_source_total": Derived(
        (cache_metrics.PREFIX_HIT_TOKENS,),
        "Tokens found in the prefix cache, by where they lay: all of them on the device.",
        ("source",),
        _cache_tiers,
    ),
    "vllm:request_success_total": Derived(
        (request_metrics.REQUESTS_FINISHED,),
        "Requests ended, by reason; as in vLLM, aborts and errors are among them.",
        ("finished_reason",),
        _ended,
    ),
}
"""By name; a name in `_total` is a counter's, any other a gauge's."""

STEP_TOKENS = "vllm:iteration_tokens_total"
"""A histogram of the tokens of a step, in spite of its name; ours tells kinds of steps apart."""


def to_vllm(series: Sequence[Metric]) -> Iterable[Family]:
    """The families of vLLM's names that these series make up."""
    by_name: dict[str, list[Metric]] = {}
    for metric in series:
        by_name.setdefault(metric.name, []).append(metric)
    for name, info in SAME_VALUES.items():
        if info.name in by_name:
            yield family(info, by_name[info.name], name=name)
    engines = _by_engine(series)
    for name, derived in DERIVED.items():
        having = [one for one in engines if all(i.name in one.series for i in derived.sources)]
        if having:
            yield _derived(name, derived, having)
    info = step_metrics.STEP_TOKENS
    if info.name in by_name:
        yield family(info, regroup(by_name[info.name], _base_labels), name=STEP_TOKENS)
    yield from server_families(by_name)


def _by_engine(series: Sequence[Metric]) -> list[_Engine]:
    engines: dict[tuple[str, ...], _Engine] = {}
    for metric in series:
        labels = _base_labels(metric.labels)
        engine = engines.setdefault(tuple(labels.values()), _Engine(labels, {}))
        engine.series.setdefault(metric.name, []).append(metric)
    return list(engines.values())


def _base_labels(labels: dict[str, str]) -> dict[str, str]:
    return {name: labels.get(name, "") for name in _BASE_LABELS}


def _derived(name: str, derived: Derived, engines: Sequence[_Engine]) -> Family:
    kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    result = kind(name, derived.help, labels=[*_BASE_LABELS, *derived.labels])
    for engine in engines:
        for values, value in derived.values(engine):
            result.add_metric([*engine.labels.values(), *values], value)
    return result
