"""The same values under vLLM's names, for dashboards that were made for vLLM.

Knows vLLM 0.32's metric names, labels and units for everything that has a meaning here. Values
are ours, and so are definitions and bucket bounds: `vllm:request_queue_time_seconds` starts at
arrival here, in vLLM at the core's queue.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from instrumentation import cache_metrics, engine_metrics, request_metrics, step_metrics
from instrumentation.metric_info import METRICS, MetricInfo
from instrumentation.metric_types import Counter, Gauge, Histogram, Metric
from instrumentation.prometheus import family

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

DERIVED = (
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:request_success_total",
    "vllm:iteration_tokens_total",
)
"""Metrics whose labels or units differ too."""

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


def to_vllm(series: Sequence[Metric]) -> Iterable[Family]:
    """The families of vLLM's names that these series make up."""
    by_name: dict[str, list[Metric]] = {}
    for metric in series:
        by_name.setdefault(metric.name, []).append(metric)
    families = [
        family(info, by_name.get(info.name, ()), name=name) for name, info in SAME_VALUES.items()
    ]
    return families + _derived([_Engine(*one) for one in _by_engine(series)])


def _by_engine(series: Sequence[Metric]) -> list[tuple[dict[str, str], dict[str, list[Metric]]]]:
    engines: dict[tuple[str, ...], tuple[dict[str, str], dict[str, list[Metric]]]] = {}
    for metric in series:
        labels = {name: metric.labels.get(name, "") for name in _BASE_LABELS}
        _, own = engines.setdefault(tuple(labels.values()), (labels, {}))
        own.setdefault(metric.name, []).append(metric)
    return list(engines.values())


def _derived(engines: Sequence[_Engine]) -> list[Family]:
    base = list(_BASE_LABELS)
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Waiting requests: for capacity, or for a grammar (deferred).",
        labels=[*base, "reason"],
    )
    usage = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", labels=base
    )
    config = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Settings of the KV cache, in labels.",
        labels=[*base, *_CACHE_SETTINGS, "num_gpu_blocks"],
    )
    queries = CounterMetricFamily(
        "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", labels=base
    )
    hits = CounterMetricFamily(
        "vllm:prefix_cache_hits", "Tokens found in the prefix cache.", labels=base
    )
    sources = CounterMetricFamily(
        "vllm:prompt_tokens_by_source", "Prompt tokens, by source.", labels=[*base, "source"]
    )
    success = CounterMetricFamily(
        "vllm:request_success",
        "Requests ended, by reason; as in vLLM, aborts and errors are among them.",
        labels=[*base, "finished_reason"],
    )
    step_tokens = []
    for engine in engines:
        own = list(engine.labels.values())
        num_waiting = engine.sum(step_metrics.REQUESTS_WAITING)
        num_deferred = engine.sum(step_metrics.REQUESTS_WAITING_BY_REASON, reason="grammar")
        waiting.add_metric([*own, "capacity"], num_waiting - num_deferred)
        waiting.add_metric([*own, "deferred"], num_deferred)
        num_used = engine.sum(cache_metrics.KV_BLOCKS, state="used")
        num_blocks = engine.sum(cache_metrics.KV_BLOCKS)
        usage.add_metric(own, num_used / num_blocks if num_blocks else 0)
        config.add_metric([*own, *_cache_settings(engine)], 1)
        queries.add_metric(own, engine.sum(cache_metrics.PREFIX_QUERY_TOKENS, admission="first"))
        hits.add_metric(own, engine.sum(cache_metrics.PREFIX_HIT_TOKENS, admission="first"))
        num_cached = engine.sum(request_metrics.CACHED_PROMPT_TOKENS)
        num_prompt = engine.sum(request_metrics.PROMPT_TOKENS)
        sources.add_metric([*own, "local_compute"], num_prompt - num_cached)
        sources.add_metric([*own, "local_cache_hit"], num_cached)
        for reason in request_metrics.FINISH_REASONS:
            ended = engine.sum(request_metrics.REQUESTS_FINISHED, finish_reason=reason)
            success.add_metric([*own, reason], ended)
        step_tokens.append(_merged(engine.series[step_metrics.STEP_TOKENS.name], engine.labels))
    iterations = family(
        METRICS[step_metrics.STEP_TOKENS.name], step_tokens, name="vllm:iteration_tokens_total"
    )
    return [waiting, usage, config, queries, hits, sources, success, iterations]


def _cache_settings(engine: _Engine) -> list[str]:
    settings = {
        metric.labels["setting"]: metric.labels["value"]
        for metric in engine.series.get(engine_metrics.CONFIG_INFO.name, ())
    }
    values = [settings.get(name, "") for name in _CACHE_SETTINGS]
    capacity = engine.sum(engine_metrics.KV_CACHE_CAPACITY)
    block_size = settings.get("block_size")
    num_blocks = str(int(capacity) // int(block_size)) if block_size else ""
    return [*values, num_blocks]


def _merged(series: Sequence[Metric], labels: dict[str, str]) -> Histogram:
    """Histograms of several label values as one."""
    first, *rest = (metric for metric in series if isinstance(metric, Histogram))
    buckets, count, total = dict(first.buckets), first.count, first.sum
    for histogram in rest:
        count, total = count + histogram.count, total + histogram.sum
        buckets = {bound: buckets[bound] + number for bound, number in histogram.buckets.items()}
    return replace(first, labels=labels, count=count, sum=total, buckets=buckets, exemplars={})
