"""A request's life as slices: queued, prefill, decode, with preemptions in between.

Knows which interval is called what. Does not know where it is drawn.
"""

from instrumentation.record.request_records import RequestTimeline
from traces.lanes import Slice

QUEUED, PREFILL, DECODE, PREEMPTED, DELIVERY = (
    "queued",
    "prefill",
    "decode",
    "preempted",
    "delivery",
)


def request_slices(timeline: RequestTimeline) -> list[Slice]:
    """Cut a request's life into slices that touch one another; the first begins at its arrival.

    Their durations by name are the timeline's `queue_ns`, `prefill_ns`, `decode_ns` and
    `preempted_ns`; what never happened has no slice.
    """
    end_ns = timeline.end_ns
    scheduled_ns = timeline.first_scheduled_ns or end_ns
    token_ns = timeline.first_token_ns or end_ns
    pieces = [Slice(QUEUED, timeline.arrival_ns, scheduled_ns)]
    for name, begin_ns, until_ns in (
        (PREFILL, scheduled_ns, token_ns),
        (DECODE, token_ns, end_ns),
    ):
        pieces += _cut_up(name, begin_ns, until_ns, timeline)
    if timeline.delivered_ns > end_ns:
        pieces.append(Slice(DELIVERY, end_ns, timeline.delivered_ns))
    return pieces


def _cut_up(name: str, begin_ns: int, end_ns: int, timeline: RequestTimeline) -> list[Slice]:
    """Slices from begin to end, with the preemptions that lie between cut out."""
    pieces = []
    position_ns = begin_ns
    for preempted_ns, resumed_ns in timeline.preemptions:
        from_ns = max(preempted_ns, position_ns)
        to_ns = min(resumed_ns or timeline.end_ns, end_ns)
        if from_ns >= to_ns:
            continue
        if from_ns > position_ns:
            pieces.append(Slice(name, position_ns, from_ns))
        pieces.append(Slice(PREEMPTED, from_ns, to_ns))
        position_ns = to_ns
    if position_ns < end_ns:
        pieces.append(Slice(name, position_ns, end_ns))
    return pieces


def request_annotations(timeline: RequestTimeline) -> dict[str, int | str]:
    """The request's facts, and its intervals; what is not known is left out."""
    annotations: dict[str, int | str] = {}
    for name in (
        *("request_id", "request_num", "parent_id", "index"),
        *("num_prompt_tokens", "num_cached_tokens", "num_generation_tokens"),
        *("finish_reason", "stop_reason", "error", "traceparent"),
        *("intake_ns", "queue_ns", "prefill_ns", "decode_ns", "preempted_ns", "e2e_ns"),
        *("ttft_ns", "delivery_ns"),
    ):
        value = getattr(timeline, name)
        if value is not None:
            annotations[name] = value
    annotations["num_preemptions"] = len(timeline.preemptions)
    return annotations
