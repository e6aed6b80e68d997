"""Every setting of observability: documented, and plain, so that it crosses to child processes.

Knows the options and their allowed ranges. Does not know how they are carried out; whoever does
says so in the audit at start-up (`instrumentation.audit`).
"""

from dataclasses import dataclass, field
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare one setting: its default, what it does, and what it allows."""
    metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """What is recorded, where it goes, and what it may cost."""

    # Metrics and logs.
    disable_log_stats: bool = option(
        False, "Keep no metrics and log no status lines (traces are separate: trace_dir)."
    )
    log_stats_interval_s: float = option(
        10.0, "Seconds between status lines while requests are running.", minimum=0.1, maximum=1e6
    )
    log_format: str = option(
        "text",
        "Form of the engine's own log lines; json: one object a line, with request and trace id "
        "where there is one.",
        choices=("text", "json"),
    )
    metrics_port: int | None = option(
        None,
        "Port of a Prometheus endpoint (/metrics) in the caller's process; 0: any free one. "
        "Default: none; LLM.get_metrics() works without.",
        minimum=0,
        maximum=65535,
    )
    metrics_host: str = option("127.0.0.1", "Address that the Prometheus endpoint listens on.")
    metrics_compat: str = option(
        "none",
        "Other names that the same values are exported under as well; vllm: vLLM's, for dashboards "
        "made for it.",
        choices=("none", "vllm"),
    )
    custom_histogram_buckets: str | None = option(
        None,
        "Other bucket bounds, as JSON: an object from metric name to a rising list of numbers.",
    )
    # Recording.
    trace_dir: str | None = option(
        None,
        "Record every step and request into a new run folder below this one; turn it into a "
        "Perfetto file with `isinglass trace convert`.",
    )
    trace_max_bytes: int = option(
        1 << 30, "Size at which each process's recording ends.", minimum=1 << 16
    )
    trace_ring_s: float | None = option(
        None,
        "Keep only about the last so many seconds of a recording (ring mode). Default: all.",
        minimum=1.0,
        maximum=1e6,
    )
    telemetry_max_share: float = option(
        0.05,
        "Share of one processor that recording may take in each process. Above it, over ten "
        "seconds, phases outside of steps are left out of recordings first, then those of steps, "
        "which the metrics of phases then lack too.",
        minimum=0.0,
        maximum=1.0,
    )
    # OpenTelemetry.
    otlp_traces_endpoint: str | None = option(
        None,
        "Address of an OTLP receiver for traces and metrics, as http://host:4317. The standard "
        "OTEL_* variables work too; without either nothing is exported.",
    )
    trace_steps: str = option(
        "sampled",
        "Which steps become OpenTelemetry spans. sampled: those of requests that are slow, failed "
        "or preempted, and one step in a hundred; all: every one.",
        choices=("off", "sampled", "all"),
    )
    trace_slow_request_s: float | None = option(
        None,
        "A request that takes at least so many seconds counts as slow, for trace_steps=sampled.",
        minimum=0.0,
    )
    # NVTX and profiler.
    nvtx: str = option(
        "auto",
        "NVTX ranges (domain isinglass) for steps and phases. auto: when a tool is attached that "
        "listens (NVTX_INJECTION64_PATH is set).",
        choices=("auto", "on", "off"),
    )
    enable_layerwise_nvtx_tracing: bool = option(
        False, "An NVTX range for every layer of the model too, wherever NVTX is on."
    )
    profiler_dir: str | None = option(
        None,
        "Folder for torch profiler traces of start_profile(). Default: the run folder, or a new "
        "folder below the temporary folder.",
    )
    profiler_max_steps: int = option(
        100, "Steps after which a torch profile ends by itself.", minimum=1, maximum=1 << 50
    )
    profiler_max_bytes: int = option(
        1 << 30,
        "Estimated size of the events at which a torch profile ends by itself.",
        minimum=1 << 20,
        maximum=1 << 50,
    )
    # Flight recorder.
    flight_recorder_steps: int = option(
        512,
        "Steps that the flight recorder holds, with all decisions; 0: no flight recorder.",
        minimum=0,
        maximum=1 << 20,
    )
    flight_dir: str | None = option(
        None,
        "Folder for flight records. Default: the run folder, or isinglass-flight below the "
        "temporary folder.",
    )
    flight_slow_step_s: float | None = option(
        None,
        "Write a flight record when a step takes at least so many seconds.",
        minimum=0.0,
        maximum=1e6,
    )
    flight_slow_step_factor: float | None = option(
        None,
        "Write a flight record when a step takes so many times the median of its kind (known after "
        "32 steps of it), at most one a minute.",
        minimum=1.0,
    )
    # Objectives.
    slo_ttft_s: float | None = option(
        None, "Objective for the time to first token; misses are counted by cause.", minimum=0.0
    )
    slo_itl_s: float | None = option(
        None, "Objective for a request's mean time between tokens, likewise.", minimum=0.0
    )
