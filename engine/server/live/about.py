"""What the live page says of the engine itself: model, settings, and what its words mean.

Definitions are the catalogue's own, so the page and `docs/metrics.md` cannot differ. Nothing in
here changes while the engine runs.
"""

import time
from typing import Any

import instrumentation.metrics.frontend  # noqa: F401  it fills the catalogue
from engine.server.state import ServerState
from engine.version import __version__
from instrumentation import AdmissionStop, ThreadName
from instrumentation.metrics.info import METRICS, PREFIX
from instrumentation.names import HEAD_OF_LINE, PHASES

_DEFINED = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_e2e_seconds"),
    *("requests_running", "requests_waiting", "requests_waiting_by_reason", "kv_blocks"),
    *("sampled_tokens_total", "step_duration_seconds", "step_tokens", "request_queue_seconds"),
    *("request_prefill_seconds", "request_decode_seconds", "request_preempted_seconds"),
    *("admission_stops_total", "prefix_cache_hit_tokens_total", "kv_block_evictions_total"),
)


def about(state: ServerState, *, base_ns: int) -> dict[str, Any]:
    """The engine's name and settings, and the definitions of what is shown.

    `wall_us` is the time of day at `base_ns`, for the axis.
    """
    engine, server = state.engine, state.config
    config = engine.config
    facts: dict[str, Any] = {
        "model": state.model_names[0],
        "version": __version__,
        "uptime_s": max(0, int(time.time()) - state.started_unix_s),
        "wall_us": (time.time_ns() - (time.monotonic_ns() - base_ns)) // 1000,
        "api_server_count": server.api_server_count,
        "has_docs": server.enable_docs,
        "has_debug_routes": server.enable_debug_routes,
        "num_blocks": 0,
        "settings": {
            "scheduling policy": config.scheduler.scheduling_policy,
            "max_num_seqs": config.scheduler.max_num_seqs,
            "async scheduling": config.scheduler.async_scheduling,
            "chunked prefill": config.scheduler.enable_chunked_prefill,
            "prefix caching": config.cache.enable_prefix_caching,
        },
        "definitions": {name: METRICS[PREFIX + name].help for name in _DEFINED},
        "metric_prefix": PREFIX,
        "phases": {
            phase.label: [info.thread, info.help]
            for phase, info in PHASES.items()
            if info.thread in (ThreadName.CORE_LOOP, ThreadName.WORKER)
        },
        "reasons": {**_REASONS, HEAD_OF_LINE: "another request is before it in the queue"},
    }
    if engine.is_running or engine.dead_error is not None:
        ready = engine.llm_engine.ready
        facts["num_blocks"] = ready.num_gpu_blocks
        facts["block_size"] = ready.block_size
        facts["settings"] |= {
            "device": ready.device,
            "dtype": ready.dtype,
            "attention": ready.attention_backend,
            "max_model_len": ready.max_model_len,
            "max_num_batched_tokens": ready.max_num_batched_tokens,
            "KV tokens": ready.num_gpu_blocks * ready.block_size,
        }
    return facts


_REASONS = {
    AdmissionStop.TOKEN_BUDGET.label: "the step's token budget is spent",
    AdmissionStop.MAX_NUM_SEQS.label: "max_num_seqs requests are running",
    AdmissionStop.KV_BLOCKS.label: "too few KV blocks are free",
    AdmissionStop.CHUNKED_PREFILL_OFF.label: "its prompt is longer than what is left of the budget",
    AdmissionStop.AFTER_PREEMPTION.label: "a request was preempted in the same step",
}
