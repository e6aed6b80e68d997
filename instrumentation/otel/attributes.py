"""Every name that OpenTelemetry shows of the engine: spans, attributes, events, metrics.

Knows the semantic conventions for generative AI, version 1.41 (status: development), and the
engine's own names where they have none. Does not know who sets them. The conventions still move:
a rename is a change of this file alone.
"""

from typing import Final

from instrumentation.metrics import requests as request_metrics

SCOPE: Final = "isinglass"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.41.0"
DEFAULT_SERVICE_NAME: Final = "isinglass"

# Generative AI conventions.
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_STOP_SEQUENCES: Final = "gen_ai.request.stop_sequences"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE: Final = "error.type"
PROVIDER: Final = "isinglass"

# HTTP conventions (stable).
HTTP_REQUEST_METHOD: Final = "http.request.method"
HTTP_REQUEST_METHOD_ORIGINAL: Final = "http.request.method_original"
HTTP_ROUTE: Final = "http.route"
HTTP_RESPONSE_STATUS_CODE: Final = "http.response.status_code"
HTTP_RESPONSE_BODY_SIZE: Final = "http.response.body.size"
URL_PATH: Final = "url.path"
URL_SCHEME: Final = "url.scheme"
CLIENT_ADDRESS: Final = "client.address"
CLIENT_PORT: Final = "client.port"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
NETWORK_PROTOCOL_VERSION: Final = "network.protocol.version"
USER_AGENT: Final = "user_agent.original"

# What they have no name for. Latencies are seconds, as `RequestTimeline` defines them.
LATENCY_E2E: Final = "isinglass.latency.e2e"
LATENCY_QUEUE: Final = "isinglass.latency.queue"
LATENCY_PREFILL: Final = "isinglass.latency.prefill"
LATENCY_DECODE: Final = "isinglass.latency.decode"
LATENCY_PREEMPTED: Final = "isinglass.latency.preempted"
LATENCY_TIME_PER_OUTPUT_TOKEN: Final = "isinglass.latency.time_per_output_token"  # noqa: S105 - no secret
NUM_PREEMPTIONS: Final = "isinglass.request.num_preemptions"
STOP_REASON: Final = "isinglass.request.stop_reason"
SAMPLE_INDEX: Final = "isinglass.sample.index"
SAMPLE_FINISH_REASON: Final = "isinglass.sample.finish_reason"
RESUMED: Final = "isinglass.resumed"
CHUNK_STEP: Final = "isinglass.chunk.step"
CHUNK_TOKENS: Final = "isinglass.chunk.num_tokens"

STEP: Final = "isinglass.step"
STEP_KIND: Final = "isinglass.step.kind"
STEP_CONTEXT_REQUESTS: Final = "isinglass.step.num_context_requests"
STEP_CONTEXT_TOKENS: Final = "isinglass.step.num_context_tokens"
STEP_GENERATION_REQUESTS: Final = "isinglass.step.num_generation_requests"
STEP_GENERATION_TOKENS: Final = "isinglass.step.num_generation_tokens"
STEP_RUNNING: Final = "isinglass.step.num_running"
STEP_WAITING: Final = "isinglass.step.num_waiting"
STEP_PREEMPTED: Final = "isinglass.step.num_preempted"
STEP_BLOCKS_USED: Final = "isinglass.step.num_blocks_used"
STEP_WORKER_DURATION: Final = "isinglass.step.worker_duration"
STEP_ADMISSION_STOP: Final = "isinglass.step.admission_stop"
STEP_GRAPH_MODE: Final = "isinglass.step.graph_mode"
STEP_SAMPLED_BY: Final = "isinglass.step.sampled_by"
REQUEST_ID: Final = "isinglass.request_id"
"""Of an HTTP exchange: its X-Request-Id, with which the ids of its engine requests begin."""
PROCESS_ROLE: Final = "isinglass.process.role"

# Spans and events.
QUEUE_SPAN: Final = "queue"
PREFILL_SPAN: Final = "prefill"
DECODE_SPAN: Final = "decode"
PREEMPTED_SPAN: Final = "preempted"
DELIVER_SPAN: Final = "deliver"
SAMPLE_SPAN: Final = "sample"
CHUNK_EVENT: Final = "chunk"
STARTUP_SPAN: Final = "isinglass.startup"

GEN_AI_METRICS: Final = {
    request_metrics.E2E_SECONDS.name: "gen_ai.server.request.duration",
    request_metrics.TIME_TO_FIRST_TOKEN.name: "gen_ai.server.time_to_first_token",
    request_metrics.TIME_PER_OUTPUT_TOKEN.name: "gen_ai.server.time_per_output_token",
}
"""Metrics of the catalogue that the conventions name too: exported under both names, with the
catalogue's bucket bounds."""

UCUM_UNITS: Final = {"seconds": "s", "bytes": "By", "ratio": "1", "info": ""}
"""Units that have a symbol; any other unit counts things and is written in braces."""


def ucum(unit: str) -> str:
    """The unit as OpenTelemetry writes it (UCUM)."""
    return UCUM_UNITS.get(unit, f"{{{unit}}}")
