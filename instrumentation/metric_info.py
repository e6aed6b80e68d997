"""The catalogue of metrics: name, kind, unit, help, labels and buckets of each.

Knows every metric. Does not know who counts or reads it. Names are API: renaming one is a breaking
change. Base units only (seconds, tokens, blocks); counters end in `_total`.
"""

from dataclasses import dataclass
from enum import StrEnum

from instrumentation.names import (
    PHASES,
    AdmissionStop,
    GraphMode,
    Role,
    WaitingReason,
)

PREFIX = "isinglass_"

SECONDS_BUCKETS = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 7200.0),
)
"""From a fast small model's token to a batch job's hours."""

TOKENS_BUCKETS = (1.0, *(float(2**exponent) for exponent in range(1, 21)))

STEP_KINDS = ("context", "generation", "mixed")
FINISH_REASONS = ("stop", "length", "abort", "error")
BLOCK_STATES = ("used", "cached_free", "free")
ADMISSIONS = ("first", "preempted")


class MetricKind(StrEnum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Unit(StrEnum):
    """What a metric counts; seconds are kept as integer nanoseconds until they are read."""

    SECONDS = "seconds"
    TOKENS = "tokens"
    BLOCKS = "blocks"
    REQUESTS = "requests"
    STEPS = "steps"
    ENTRIES = "entries"

    def to_base(self, number: int) -> int | float:
        """Convert a number as it is kept to the base unit."""
        return number / 10**9 if self is Unit.SECONDS else number

    def from_base(self, amount: float) -> int:
        """Convert an amount in the base unit to the number that is kept, to the nearest."""
        return round(amount * 10**9) if self is Unit.SECONDS else round(amount)


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """What the catalogue says of one metric; `labels` maps each label to its usual values."""

    name: str
    kind: MetricKind
    unit: Unit
    help: str
    labels: dict[str, tuple[str, ...]]
    buckets: tuple[float, ...] = ()


METRICS: dict[str, MetricInfo] = {}


def _add(
    name: str, kind: MetricKind, /, *, unit: Unit, help: str, **labels: tuple[str, ...]
) -> MetricInfo:
    buckets: tuple[float, ...] = ()
    if kind is MetricKind.HISTOGRAM:
        buckets = SECONDS_BUCKETS if unit is Unit.SECONDS else TOKENS_BUCKETS
    assert (kind is MetricKind.COUNTER) == name.endswith("_total"), name
    info = MetricInfo(PREFIX + name, kind, unit, help, labels, buckets)
    METRICS[info.name] = info
    return info


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

# Tokens and requests, counted in the frontend as they are delivered.
PROMPT_TOKENS = _add(
    "prompt_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Prompt tokens of requests that got their first token, cached ones included",
)
CACHED_PROMPT_TOKENS = _add(
    "cached_prompt_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Those of the prompt tokens that the prefix cache served",
)
GENERATION_TOKENS = _add(
    "generation_tokens_total", _COUNTER, unit=Unit.TOKENS, help="Output tokens delivered"
)
REQUESTS_FINISHED = _add(
    "requests_finished_total",
    _COUNTER,
    unit=Unit.REQUESTS,
    help="Requests ended, by the reason of it",
    finish_reason=FINISH_REASONS,
)

# Steps, counted from step records.
STEPS = _add(
    "steps_total", _COUNTER, unit=Unit.STEPS, help="Steps, by kind of work", kind=STEP_KINDS
)
SCHEDULED_TOKENS = _add(
    "scheduled_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Tokens computed in steps, by what their request was doing",
    kind=("context", "generation"),
)
STEP_DURATION = _add(
    "step_duration_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Time a worker took for a step, from preparing its batch to having the sampled tokens on "
    "the host, by kind of work",
    kind=STEP_KINDS,
)
STEP_TOKENS = _add(
    "step_tokens",
    _HISTOGRAM,
    unit=Unit.TOKENS,
    help="Tokens computed in a step, by kind of work",
    kind=STEP_KINDS,
)
PHASE_SECONDS = _add(
    "phase_seconds_total",
    _COUNTER,
    unit=Unit.SECONDS,
    help="Time spent in each phase of core, worker and frontend",
    phase=tuple(phase.label for phase in PHASES),
)
ADMISSION_STOPS = _add(
    "admission_stops_total",
    _COUNTER,
    unit=Unit.STEPS,
    help="Steps in which requests were left waiting, by what stopped admission",
    reason=tuple(reason.label for reason in AdmissionStop if reason),
)
GRAPH_STEPS = _add(
    "graph_steps_total",
    _COUNTER,
    unit=Unit.STEPS,
    help="Worker steps, by how their forward pass was launched",
    mode=tuple(mode.label for mode in GraphMode),
)
PADDED_TOKENS = _add(
    "padded_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Tokens computed only to fill a graph's bucket",
)
DEVICE_SECONDS = _add(
    "device_seconds_total",
    _COUNTER,
    unit=Unit.SECONDS,
    help="Time of steps on the device, where it is measured",
)

# Queues and blocks.
REQUESTS_RUNNING = _add(
    "requests_running", _GAUGE, unit=Unit.REQUESTS, help="Requests in the running list"
)
REQUESTS_WAITING = _add(
    "requests_waiting", _GAUGE, unit=Unit.REQUESTS, help="Requests in the waiting queue"
)
REQUESTS_WAITING_BY_REASON = _add(
    "requests_waiting_by_reason",
    _GAUGE,
    unit=Unit.REQUESTS,
    help="Requests in the waiting queue, by what they wait for",
    reason=tuple(reason.label for reason in WaitingReason),
)
KV_BLOCKS = _add(
    "kv_blocks", _GAUGE, unit=Unit.BLOCKS, help="Blocks of the KV pool", state=BLOCK_STATES
)
KV_BLOCK_EVICTIONS = _add(
    "kv_block_evictions_total",
    _COUNTER,
    unit=Unit.BLOCKS,
    help="Cached blocks whose contents were given up to make room",
)
PREFIX_QUERY_TOKENS = _add(
    "prefix_cache_query_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Tokens looked up in the prefix cache, by whether the request was preempted before",
    admission=ADMISSIONS,
)
PREFIX_HIT_TOKENS = _add(
    "prefix_cache_hit_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Tokens found in the prefix cache, by whether the request was preempted before",
    admission=ADMISSIONS,
)
PREEMPTIONS = _add(
    "preemptions_total", _COUNTER, unit=Unit.REQUESTS, help="Running requests thrown out"
)
PREEMPTION_LOST_TOKENS = _add(
    "preemption_lost_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Computed tokens that preempted requests lost; all are recomputed that the prefix "
    "cache does not find again",
)

# Latencies of requests, from their timelines.
TIME_TO_FIRST_TOKEN = _add(
    "time_to_first_token_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Arrival to first token",
)
INTER_TOKEN_LATENCY = _add(
    "inter_token_latency_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Time between two tokens of a request",
)
TIME_PER_OUTPUT_TOKEN = _add(
    "request_time_per_output_token_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="A request's mean time between two tokens",
)
E2E_SECONDS = _add(
    "request_e2e_seconds", _HISTOGRAM, unit=Unit.SECONDS, help="Arrival to last token"
)
QUEUE_SECONDS = _add(
    "request_queue_seconds", _HISTOGRAM, unit=Unit.SECONDS, help="Arrival to first scheduled"
)
PREFILL_SECONDS = _add(
    "request_prefill_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="First scheduled to first token, less preemptions",
)
DECODE_SECONDS = _add(
    "request_decode_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="First to last token, less preemptions",
)
PREEMPTED_SECONDS = _add(
    "request_preempted_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Time thrown out of the running list",
)
REQUEST_PROMPT_TOKENS = _add(
    "request_prompt_tokens", _HISTOGRAM, unit=Unit.TOKENS, help="Prompt length of ended requests"
)
REQUEST_GENERATION_TOKENS = _add(
    "request_generation_tokens",
    _HISTOGRAM,
    unit=Unit.TOKENS,
    help="Output length of ended requests",
)

# Observability itself.
TELEMETRY_DROPS = _add(
    "telemetry_drops_total",
    _COUNTER,
    unit=Unit.ENTRIES,
    help="Telemetry entries lost for want of room or of a working sink, by process",
    process=(Role.CALLER.value, Role.CORE.value),
)
TELEMETRY_NEGATIVE_VALUES = _add(
    "telemetry_negative_values_total",
    _COUNTER,
    unit=Unit.ENTRIES,
    help="Negative values that were left uncounted; any is a defect",
)
