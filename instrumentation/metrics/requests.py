"""Metrics of requests: arrivals and ends, tokens, and the intervals of each one's life.

Knows which field of a request's timeline feeds which metric; the timeline alone defines the
intervals. Latencies carry the request's trace as an exemplar, where it has one.
"""

import time
from collections.abc import Iterable
from typing import NamedTuple

from instrumentation.explain.slo import MissCause, Objective
from instrumentation.metrics.accumulators import Families, HistogramFamily
from instrumentation.metrics.info import (
    BETWEEN_TOKENS_BUCKETS,
    FIRST_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    SMALL_COUNT_BUCKETS,
    AfterDeath,
    MetricKind,
    Unit,
    declare,
)
from instrumentation.metrics.types import Exemplar
from instrumentation.record.request_records import RequestTimeline
from instrumentation.trace_context import parse_traceparent

FINISH_REASONS = ("stop", "length", "abort", "error")

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

REQUESTS_ARRIVED = declare(
    "requests_arrived_total",
    _COUNTER,
    unit=Unit.REQUESTS,
    help="Sequences handed to the engine, rejected ones included (a request with n samples counts "
    "n times once it is accepted). Arrived = finished + rejected + in flight",
)
REQUESTS_REJECTED = declare(
    "requests_rejected_total",
    _COUNTER,
    unit=Unit.REQUESTS,
    help="Requests refused before they reached the core, by the error's class",
    error=("PromptError", "SamplingParamsError", "ConfigError", "QueueFullError"),
)
REQUESTS_FINISHED = declare(
    "requests_finished_total",
    _COUNTER,
    unit=Unit.REQUESTS,
    help="Sequences ended, by the reason of it",
    finish_reason=FINISH_REASONS,
)
REQUESTS_IN_FLIGHT = declare(
    "requests_in_flight",
    _GAUGE,
    unit=Unit.REQUESTS,
    help="Sequences that have arrived and neither finished nor were rejected",
    adds_up=True,
    after_death=AfterDeath.LIVE,
)
PROMPT_TOKENS = declare(
    "prompt_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Prompt tokens of sequences that got their first token, cached ones included",
)
CACHED_PROMPT_TOKENS = declare(
    "cached_prompt_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Those of the prompt tokens that the prefix cache served",
)
GENERATION_TOKENS = declare(
    "generation_tokens_total", _COUNTER, unit=Unit.TOKENS, help="Output tokens delivered"
)
TIME_TO_FIRST_TOKEN = declare(
    "time_to_first_token_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Arrival (not first schedule) to first token; counted once that token is there",
    buckets=FIRST_TOKEN_BUCKETS,
)
INTER_TOKEN_LATENCY = declare(
    "inter_token_latency_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Time between two tokens of a request",
    buckets=BETWEEN_TOKENS_BUCKETS,
)
TIME_PER_OUTPUT_TOKEN = declare(
    "request_time_per_output_token_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="A request's mean time between two tokens",
    buckets=BETWEEN_TOKENS_BUCKETS,
)
E2E_SECONDS = declare(
    "request_e2e_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Arrival to last token (or to giving up); queue + prefill + decode + preempted",
    buckets=REQUEST_BUCKETS,
)
QUEUE_SECONDS = declare(
    "request_queue_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Arrival to first scheduled",
    buckets=REQUEST_BUCKETS,
)
PREFILL_SECONDS = declare(
    "request_prefill_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="First scheduled to first token, less preemptions",
    buckets=REQUEST_BUCKETS,
)
DECODE_SECONDS = declare(
    "request_decode_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="First to last token, less preemptions",
    buckets=REQUEST_BUCKETS,
)
PREEMPTED_SECONDS = declare(
    "request_preempted_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Time thrown out of the running list",
)
INFERENCE_SECONDS = declare(
    "request_inference_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="First scheduled to last token: prefill + decode + preempted",
    buckets=REQUEST_BUCKETS,
)
INTAKE_SECONDS = declare(
    "request_intake_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Arrival to the core's waiting queue: checking, tokenising, transport. Part of queue",
)
DELIVERY_SECONDS = declare(
    "request_delivery_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Last token to its delivery: transport, detokenising. Comes after e2e",
)
REQUEST_PREEMPTIONS = declare(
    "request_preemptions",
    _HISTOGRAM,
    unit=Unit.REQUESTS,
    help="How often an ended request had been thrown out",
    buckets=SMALL_COUNT_BUCKETS,
)
REQUEST_PROMPT_TOKENS = declare(
    "request_prompt_tokens", _HISTOGRAM, unit=Unit.TOKENS, help="Prompt length of ended requests"
)
REQUEST_COMPUTED_PROMPT_TOKENS = declare(
    "request_computed_prompt_tokens",
    _HISTOGRAM,
    unit=Unit.TOKENS,
    help="Prompt tokens that the prefix cache did not serve, of ended requests",
)
REQUEST_GENERATION_TOKENS = declare(
    "request_generation_tokens",
    _HISTOGRAM,
    unit=Unit.TOKENS,
    help="Output length of ended requests",
)
REQUEST_MAX_TOKENS = declare(
    "request_params_max_tokens",
    _HISTOGRAM,
    unit=Unit.TOKENS,
    help="max_tokens of arrived sequences whose request set one",
)
REQUEST_N = declare(
    "request_params_n",
    _HISTOGRAM,
    unit=Unit.REQUESTS,
    help="Samples asked for (n) by arrived requests",
    buckets=SMALL_COUNT_BUCKETS,
)
SLO_REQUESTS = declare(
    "slo_requests_total",
    _COUNTER,
    unit=Unit.REQUESTS,
    help="Completed requests held against an objective (settings slo_ttft_s, slo_itl_s)",
    objective=tuple(map(str, Objective)),
)
SLO_MISSES = declare(
    "slo_misses_total",
    _COUNTER,
    unit=Unit.REQUESTS,
    help="Those that missed it, by the largest cause",
    objective=tuple(map(str, Objective)),
    cause=tuple(map(str, MissCause)),
)


class ArrivedRequest(NamedTuple):
    """What is counted of a sequence when it comes in."""

    n: int | None
    """Samples of its request; None but for the first of them."""
    max_tokens: int | None


class RequestMetrics:
    """Counts requests and their tokens in the frontend."""

    def __init__(self, families: Families) -> None:
        self._arrived = families.counter(REQUESTS_ARRIVED)
        self._rejected = families.counter(REQUESTS_REJECTED)
        self._finished = families.counter(REQUESTS_FINISHED)
        self._in_flight = families.gauge(REQUESTS_IN_FLIGHT)
        self._prompt_tokens = families.counter(PROMPT_TOKENS)
        self._cached_tokens = families.counter(CACHED_PROMPT_TOKENS)
        self._generation_tokens = families.counter(GENERATION_TOKENS)
        self._first_token = families.histogram(TIME_TO_FIRST_TOKEN)
        self._inter_token = families.histogram(INTER_TOKEN_LATENCY)
        self._per_token = families.histogram(TIME_PER_OUTPUT_TOKEN)
        self._e2e = families.histogram(E2E_SECONDS)
        self._queue = families.histogram(QUEUE_SECONDS)
        self._prefill = families.histogram(PREFILL_SECONDS)
        self._decode = families.histogram(DECODE_SECONDS)
        self._preempted = families.histogram(PREEMPTED_SECONDS)
        self._inference = families.histogram(INFERENCE_SECONDS)
        self._intake = families.histogram(INTAKE_SECONDS)
        self._delivery = families.histogram(DELIVERY_SECONDS)
        self._preemptions = families.histogram(REQUEST_PREEMPTIONS)
        self._prompt_length = families.histogram(REQUEST_PROMPT_TOKENS)
        self._computed_length = families.histogram(REQUEST_COMPUTED_PROMPT_TOKENS)
        self._output_length = families.histogram(REQUEST_GENERATION_TOKENS)
        self._max_tokens = families.histogram(REQUEST_MAX_TOKENS)
        self._n = families.histogram(REQUEST_N)
        self._slo_requests = families.counter(SLO_REQUESTS)
        self._slo_misses = families.counter(SLO_MISSES)
        self._num_in_flight = 0

    def observe_arrival(self, request: ArrivedRequest) -> None:
        """Count a sequence that has been accepted: once, before it is sent."""
        self._arrived.add(1)
        self._num_in_flight += 1
        if request.n is not None:
            self._n.observe(request.n)
        if request.max_tokens is not None:
            self._max_tokens.observe(request.max_tokens)

    def observe_rejection(self, error: str) -> None:
        """Count a request that was refused, by the class of the error."""
        self._arrived.add(1)
        self._rejected.add(1, error)

    def observe_tokens(self, num_tokens: int, gaps_ns: Iterable[int] = ()) -> None:
        """Count output tokens as they are delivered: once a step, for all requests together.

        `gaps_ns` holds the time between each token and the one before it of the same request, so
        nothing for first tokens.
        """
        self._generation_tokens.add(num_tokens)
        self._inter_token.observe_many(gaps_ns)

    def observe_first_token(self, timeline: RequestTimeline) -> None:
        """Count a request's prompt and its time to first token: once, when that token is there."""
        self._prompt_tokens.add(timeline.num_prompt_tokens)
        self._cached_tokens.add(timeline.num_cached_tokens)
        if timeline.ttft_ns is not None:
            self._observe(self._first_token, timeline.ttft_ns, timeline)

    def observe_end(self, timeline: RequestTimeline) -> None:
        """Count a request that has ended: once, whatever became of it."""
        self._finished.add(1, timeline.finish_reason or "error")
        self._num_in_flight -= 1
        self._observe(self._e2e, timeline.e2e_ns, timeline)
        self._observe(self._queue, timeline.queue_ns, timeline)
        self._observe(self._prefill, timeline.prefill_ns, timeline)
        self._observe(self._decode, timeline.decode_ns, timeline)
        self._observe(self._preempted, timeline.preempted_ns, timeline)
        self._observe(self._inference, timeline.e2e_ns - timeline.queue_ns, timeline)
        self._intake.observe(timeline.intake_ns)
        self._delivery.observe(timeline.delivery_ns)
        self._preemptions.observe(len(timeline.preemptions))
        if timeline.mean_inter_token_ns is not None:
            self._observe(self._per_token, round(timeline.mean_inter_token_ns), timeline)
        self._prompt_length.observe(timeline.num_prompt_tokens)
        self._computed_length.observe(timeline.num_prompt_tokens - timeline.num_cached_tokens)
        self._output_length.observe(timeline.num_generation_tokens)

    def observe_objectives(
        self, objectives: Iterable[str], misses: Iterable[tuple[str, str]]
    ) -> None:
        """Count a completed request against its objectives; misses are (objective, cause)."""
        for objective in objectives:
            self._slo_requests.add(1, str(objective))
        for objective, cause in misses:
            self._slo_misses.add(1, str(objective), str(cause))

    def take_levels(self) -> None:
        """Bring the gauges up to date, for a reader."""
        self._in_flight.set(self._num_in_flight)

    def _observe(self, family: HistogramFamily, value_ns: int, timeline: RequestTimeline) -> None:
        family.observe(value_ns, exemplar=exemplar_of(value_ns, timeline.traceparent))


def exemplar_of(value_ns: int, traceparent: str | None) -> Exemplar | None:
    """The request's trace, where there is one that has been kept."""
    context = parse_traceparent(traceparent)
    if context is None or not context.is_sampled:
        return None
    return Exemplar(context.trace_id, context.span_id, value_ns / 1e9, time.time_ns())
