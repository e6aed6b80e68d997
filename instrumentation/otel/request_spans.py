"""A request as a tree of spans: the request, its samples, and the stages of each.

    text_completion model            arrival to delivery; n > 1: one child span for each sample
      queue                          arrival to first scheduled
      prefill                        to the first token; each chunk of the prompt is an event
      preempted                      thrown out, to scheduled again; stages around it are in parts
      decode                         first to last token
      deliver                        last token to its delivery: transport, detokenising

Knows `RequestTimeline`, whose definitions of the intervals these are. The request's own span begins
in the caller's thread, since its identity travels with the request; all others are written when
the request has ended, with explicit times, in the exporting thread.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from opentelemetry import context as context_api
from opentelemetry.context import Context
from opentelemetry.trace import (
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from instrumentation.otel import attributes as names
from instrumentation.record.request_records import RequestTimeline

_PROPAGATOR = TraceContextTextMapPropagator()
_MAX_ENDED_CONTEXTS = 8192


class Stage(NamedTuple):
    """One interval of a request's life."""

    name: str
    begin_ns: int
    end_ns: int
    is_resumed: bool = False
    """Whether it goes on with what a preemption has interrupted."""


class Chunk(NamedTuple):
    """A part of a prompt that one step computed."""

    time_ns: int
    step: int
    num_tokens: int


def stages_of(timeline: RequestTimeline) -> list[Stage]:
    """The intervals of a request's life, in order, without gaps; empty ones are left out."""
    end_ns = timeline.end_ns
    scheduled_ns = timeline.first_scheduled_ns or end_ns
    first_token_ns = timeline.first_token_ns or end_ns
    stages = [Stage(names.QUEUE_SPAN, timeline.arrival_ns, scheduled_ns)]
    for name, begin_ns, until_ns in (
        (names.PREFILL_SPAN, scheduled_ns, first_token_ns),
        (names.DECODE_SPAN, first_token_ns, end_ns),
    ):
        at_ns, is_resumed = begin_ns, False
        for preempted_ns, resumed_ns in timeline.preemptions:
            out_ns = max(preempted_ns, begin_ns)
            back_ns = min(resumed_ns or end_ns, until_ns)
            if out_ns >= back_ns:
                continue
            stages.append(Stage(name, at_ns, out_ns, is_resumed))
            stages.append(Stage(names.PREEMPTED_SPAN, out_ns, back_ns))
            at_ns, is_resumed = back_ns, True
        stages.append(Stage(name, at_ns, until_ns, is_resumed))
    stages.append(Stage(names.DELIVER_SPAN, end_ns, timeline.delivered_ns))
    return _joined(stage for stage in stages if stage.begin_ns < stage.end_ns)


def _joined(stages: Iterable[Stage]) -> list[Stage]:
    """One preemption is one stage, also where the first token came meanwhile: from a step that
    was under way."""
    joined: list[Stage] = []
    for stage in stages:
        if joined and joined[-1].name == stage.name == names.PREEMPTED_SPAN:
            stage = joined.pop()._replace(end_ns=stage.end_ns)
        joined.append(stage)
    return joined


def wall_offset_ns() -> int:
    """What to add to a monotonic time to get the time of day."""
    return time.time_ns() - time.monotonic_ns()


def traceparent_of(context: SpanContext) -> str | None:
    """The header that names a span; None for a context that names none."""
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


class RequestSpan:
    """One request's span while it is open, and what has been learned for its children."""

    __slots__ = ("chunks", "context", "num_open", "offset_ns", "span", "timelines", "traceparent")

    def __init__(self, span: Span, *, offset_ns: int, num_samples: int) -> None:
        self.span = span
        self.offset_ns = offset_ns
        self.num_open = num_samples
        self.timelines: list[RequestTimeline] = []
        self.chunks: dict[int, list[Chunk]] = {}
        self.context: SpanContext = span.get_span_context()
        self.traceparent = traceparent_of(self.context)


class RequestSpans:
    """All requests' spans. `begin`, `expect` and `fail` are for the caller's thread.

    `parent_of` gives the open span that a traceparent names, if it is one of this process, and the
    offset of its times: a child that measured its own could begin before its parent.
    """

    def __init__(
        self,
        tracer: Tracer,
        *,
        parent_of: Callable[[str], tuple[Context, int] | None] = lambda traceparent: None,
    ) -> None:
        self._tracer = tracer
        self._parent_of = parent_of
        self._by_num: dict[int, RequestSpan] = {}
        self._ended_contexts: dict[int, SpanContext] = {}
        self._prefilling: dict[int, RequestSpan] = {}
        self._open: dict[int, RequestSpan] = {}
        self._lock = threading.Lock()

    def begin(
        self,
        attributes: Mapping[str, Any],
        *,
        arrival_ns: int,
        num_samples: int,
        traceparent: str | None,
    ) -> RequestSpan:
        """Open a request's span: below the traceparent, else below the caller's current span."""
        parent, offset_ns = context_api.get_current(), wall_offset_ns()
        if traceparent is not None:
            parent, offset_ns = self._parent_of(traceparent) or (
                _PROPAGATOR.extract({"traceparent": traceparent}, Context()),
                offset_ns,
            )
        span = self._tracer.start_span(
            f"{attributes[names.OPERATION_NAME]} {attributes[names.REQUEST_MODEL]}",
            context=parent,
            kind=SpanKind.INTERNAL,
            attributes=attributes,
            start_time=arrival_ns + offset_ns,
        )
        request = RequestSpan(span, offset_ns=offset_ns, num_samples=num_samples)
        self._open[id(request)] = request
        return request

    def expect(self, request: RequestSpan, request_num: int) -> None:
        """A sample of the request goes to the core under that number."""
        self._by_num[request_num] = self._prefilling[request_num] = request

    def fail(self, request: RequestSpan, error_type: str, message: str) -> None:
        """End a request that never got to its end; nothing happens where it has ended."""
        with self._lock:
            if self._open.pop(id(request), None) is None:
                return
        request.span.set_attribute(names.ERROR_TYPE, error_type)
        request.span.set_attribute(names.RESPONSE_FINISH_REASONS, ("error",))
        request.span.set_status(Status(StatusCode.ERROR, message))
        request.span.end(time.monotonic_ns() + request.offset_ns)

    def fail_all(self, error_type: str, message: str) -> None:
        """End every open request that way."""
        for request in list(self._open.values()):
            self.fail(request, error_type, message)

    def context_of(self, request_num: int) -> SpanContext | None:
        """The span that served a request, also a while after its end; None if not recorded."""
        request = self._by_num.get(request_num)
        return self._ended_contexts.get(request_num) if request is None else request.context

    # -- the exporting thread --------------------------------------------------------------------

    def add_chunks(
        self, scheduled: Sequence[int], first_tokens: Sequence[int], *, step: int, begin_ns: int
    ) -> None:
        """Note the parts of prompts that a step computed; `scheduled` are a record's flat pairs."""
        for request_num, num_tokens in zip(scheduled[::2], scheduled[1::2], strict=True):
            request = self._prefilling.get(request_num)
            if request is not None and request.span.is_recording():
                chunks = request.chunks.setdefault(request_num, [])
                chunks.append(Chunk(begin_ns, step, num_tokens))
        for request_num in first_tokens:
            self._prefilling.pop(request_num, None)

    def end(self, timeline: RequestTimeline) -> None:
        """A sample has ended; its request ends with the last of them."""
        request = self._by_num.pop(timeline.request_num, None)
        self._prefilling.pop(timeline.request_num, None)
        if request is None:
            return
        self._ended_contexts[timeline.request_num] = request.context
        if len(self._ended_contexts) > _MAX_ENDED_CONTEXTS:
            del self._ended_contexts[next(iter(self._ended_contexts))]
        request.timelines.append(timeline)
        request.num_open -= 1
        if request.num_open > 0:
            return
        with self._lock:
            if self._open.pop(id(request), None) is None:
                return
        if request.span.is_recording():
            self._write(request)
        request.span.end(
            max(one.delivered_ns or one.end_ns for one in request.timelines) + request.offset_ns
        )

    def _write(self, request: RequestSpan) -> None:
        """Everything below a request's span, and what its end has told about it."""
        timelines = sorted(request.timelines, key=lambda timeline: timeline.index)
        parent = set_span_in_context(request.span, Context())
        if timelines[0].parent_id is None:
            self._write_stages(request, timelines[0], parent)
        else:
            for timeline in timelines:
                self._write_sample(request, timeline, parent)
        request.span.set_attributes(_outcome(timelines))
        failed = next((one for one in timelines if one.finish_reason == "error"), None)
        if failed is not None:
            request.span.set_attribute(names.ERROR_TYPE, "engine_error")
            request.span.set_status(Status(StatusCode.ERROR, failed.error or "the engine failed"))

    def _write_sample(
        self, request: RequestSpan, timeline: RequestTimeline, parent: Context
    ) -> None:
        offset_ns = request.offset_ns
        sample = self._tracer.start_span(
            f"{names.SAMPLE_SPAN} {timeline.index}",
            context=parent,
            attributes={
                names.SAMPLE_INDEX: timeline.index,
                names.USAGE_OUTPUT_TOKENS: timeline.num_generation_tokens,
                names.SAMPLE_FINISH_REASON: timeline.finish_reason or "error",
                **_latencies(timeline),
            },
            start_time=timeline.arrival_ns + offset_ns,
        )
        self._write_stages(request, timeline, set_span_in_context(sample, Context()))
        if timeline.finish_reason == "error":
            sample.set_status(Status(StatusCode.ERROR, timeline.error or "the engine failed"))
        sample.end((timeline.delivered_ns or timeline.end_ns) + offset_ns)

    def _write_stages(
        self, request: RequestSpan, timeline: RequestTimeline, parent: Context
    ) -> None:
        offset_ns = request.offset_ns
        chunks = request.chunks.pop(timeline.request_num, [])
        for stage in stages_of(timeline):
            span = self._tracer.start_span(
                stage.name,
                context=parent,
                attributes={names.RESUMED: True} if stage.is_resumed else None,
                start_time=stage.begin_ns + offset_ns,
            )
            if stage.name == names.PREFILL_SPAN:
                while chunks and chunks[0].time_ns < stage.end_ns:
                    chunk = chunks.pop(0)
                    span.add_event(
                        names.CHUNK_EVENT,
                        {names.CHUNK_STEP: chunk.step, names.CHUNK_TOKENS: chunk.num_tokens},
                        timestamp=max(chunk.time_ns, stage.begin_ns) + offset_ns,
                    )
            span.end(stage.end_ns + offset_ns)


def _outcome(timelines: Sequence[RequestTimeline]) -> dict[str, Any]:
    """What a request's end tells about it; `timelines` are its samples, by index."""
    first = timelines[0]
    outcome: dict[str, Any] = {
        names.USAGE_INPUT_TOKENS: first.num_prompt_tokens,
        names.USAGE_CACHE_READ_INPUT_TOKENS: first.num_cached_tokens,
        names.USAGE_OUTPUT_TOKENS: sum(one.num_generation_tokens for one in timelines),
        names.RESPONSE_FINISH_REASONS: tuple(one.finish_reason or "error" for one in timelines),
        names.NUM_PREEMPTIONS: sum(len(one.preemptions) for one in timelines),
    }
    if len(timelines) == 1:
        outcome |= _latencies(first)
        if first.stop_reason is not None:
            outcome[names.STOP_REASON] = first.stop_reason
    else:
        firsts = [one.ttft_ns for one in timelines if one.ttft_ns is not None]
        outcome[names.LATENCY_E2E] = max(one.e2e_ns for one in timelines) / 1e9
        if firsts:
            outcome[names.RESPONSE_TIME_TO_FIRST_CHUNK] = min(firsts) / 1e9
    return outcome


def _latencies(timeline: RequestTimeline) -> dict[str, float]:
    """Seconds, by the definitions that metrics use."""
    latencies = {
        names.LATENCY_E2E: timeline.e2e_ns / 1e9,
        names.LATENCY_QUEUE: timeline.queue_ns / 1e9,
        names.LATENCY_PREFILL: timeline.prefill_ns / 1e9,
        names.LATENCY_DECODE: timeline.decode_ns / 1e9,
        names.LATENCY_PREEMPTED: timeline.preempted_ns / 1e9,
    }
    if timeline.ttft_ns is not None:
        latencies[names.RESPONSE_TIME_TO_FIRST_CHUNK] = timeline.ttft_ns / 1e9
    if timeline.mean_inter_token_ns is not None:
        latencies[names.LATENCY_TIME_PER_OUTPUT_TOKEN] = timeline.mean_inter_token_ns / 1e9
    return latencies
