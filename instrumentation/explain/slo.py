"""Objectives missed, each put down to a cause.

Knows how the time of a request divides among causes. Does not know who counts the misses. Looks
only at the steps of the request's own time, when it ends.
"""

from collections.abc import Sequence
from enum import StrEnum
from statistics import median_low

from instrumentation.config import ObservabilityConfig
from instrumentation.explain.step_history import HistoricStep, StepHistory
from instrumentation.labels import step_kind
from instrumentation.names import PrefixMiss
from instrumentation.record.request_records import RequestTimeline


class Objective(StrEnum):
    """What was promised."""

    TTFT = "ttft"
    """Time to first token: `slo_ttft_s`."""
    ITL = "itl"
    """Mean time between tokens: `slo_itl_s`."""


class MissCause(StrEnum):
    """What took most of the time of a request that missed an objective."""

    QUEUE = "queue"
    """Waiting to be scheduled for the first time."""
    PREFILL = "prefill"
    """Computing the prompt."""
    PREFILL_INTERFERENCE = "prefill_interference"
    """Steps that also computed others' prompts took longer than steps that did not."""
    PREEMPTION = "preemption"
    """Thrown out for want of blocks, until scheduled again."""
    CACHE_MISS = "cache_miss"
    """Computing a prompt whose prefix had been cached and was evicted."""
    HOST_GAP = "host_gap"
    """No worker ran a step."""
    DECODE = "decode"
    """The steps themselves."""


def objectives_of(config: ObservabilityConfig) -> list[Objective]:
    """The objectives that are set."""
    limits = {Objective.TTFT: config.slo_ttft_s, Objective.ITL: config.slo_itl_s}
    return [objective for objective, limit in limits.items() if limit is not None]


def slo_misses(
    timeline: RequestTimeline, history: StepHistory, config: ObservabilityConfig
) -> list[tuple[Objective, MissCause]]:
    """The objectives that a request which has ended has missed, each with its main cause.

    One that ended without any token misses `slo_ttft_s` once it has lasted that long.
    """
    misses: list[tuple[Objective, MissCause]] = []
    ttft_ns = timeline.ttft_ns if timeline.ttft_ns is not None else timeline.e2e_ns
    if config.slo_ttft_s is not None and ttft_ns > config.slo_ttft_s * 1e9:
        steps = history.steps(since_ns=timeline.first_scheduled_ns or timeline.end_ns)
        misses.append((Objective.TTFT, _ttft_cause(timeline, steps)))
    mean_ns = timeline.mean_inter_token_ns
    if config.slo_itl_s is not None and mean_ns is not None and mean_ns > config.slo_itl_s * 1e9:
        steps = history.steps(since_ns=timeline.first_token_ns)
        misses.append((Objective.ITL, _itl_cause(timeline, steps)))
    return misses


def _ttft_cause(timeline: RequestTimeline, steps: Sequence[HistoricStep]) -> MissCause:
    begin_ns = timeline.first_scheduled_ns or timeline.end_ns
    end_ns = timeline.first_token_ns or timeline.end_ns
    gap_ns = _gaps_ns(timeline, steps, begin_ns, end_ns)
    has_been_evicted = any(
        admission.request_num == timeline.request_num
        and not admission.is_resumed
        and admission.miss is PrefixMiss.EVICTED
        for one in steps
        for admission in one.step.admissions
    )
    prefill = MissCause.CACHE_MISS if has_been_evicted else MissCause.PREFILL
    return _largest(
        {
            MissCause.QUEUE: timeline.queue_ns,
            MissCause.PREEMPTION: timeline.preempted_between_ns(begin_ns, end_ns),
            prefill: timeline.prefill_ns - gap_ns,
            MissCause.HOST_GAP: gap_ns,
        }
    )


def _itl_cause(timeline: RequestTimeline, steps: Sequence[HistoricStep]) -> MissCause:
    begin_ns, end_ns = timeline.first_token_ns, timeline.last_token_ns
    gap_ns = _gaps_ns(timeline, steps, begin_ns, end_ns)
    interference_ns = _interference_ns(timeline.request_num, steps, begin_ns, end_ns)
    decode_ns = timeline.decode_ns - gap_ns - interference_ns
    return _largest(
        {
            MissCause.PREEMPTION: timeline.preempted_between_ns(begin_ns, end_ns),
            MissCause.HOST_GAP: gap_ns,
            MissCause.PREFILL_INTERFERENCE: interference_ns,
            MissCause.DECODE: decode_ns,
        }
    )


def _largest(times_ns: dict[MissCause, int]) -> MissCause:
    return max(times_ns, key=lambda cause: times_ns[cause])


def _gaps_ns(
    timeline: RequestTimeline, steps: Sequence[HistoricStep], begin_ns: int, end_ns: int
) -> int:
    """Time of an interval, outside of preemptions, in which no worker ran a step.

    What lies before the oldest step that is remembered is no gap: nothing is known of it.
    """
    if not steps:
        return 0
    covered = [(one.begin_ns, one.end_ns) for one in steps]
    covered += [(begin, end or timeline.end_ns) for begin, end in timeline.preemptions]
    position_ns = max(begin_ns, min(begin for begin, _ in covered))
    gaps_ns = 0
    for from_ns, to_ns in sorted(covered):
        if from_ns >= end_ns:
            break
        gaps_ns += max(0, from_ns - position_ns)
        position_ns = max(position_ns, to_ns)
    return gaps_ns + max(0, end_ns - position_ns)


def _interference_ns(
    request_num: int, steps: Sequence[HistoricStep], begin_ns: int, end_ns: int
) -> int:
    """How much longer than a usual step without prompts the request's steps with prompts took."""
    usual = [one.duration_ns for one in steps if step_kind(one.step.label) == "generation"]
    usual_ns = median_low(usual) if usual else 0
    return sum(
        max(0, one.duration_ns - usual_ns)
        for one in steps
        if begin_ns <= one.begin_ns < end_ns
        and step_kind(one.step.label) == "mixed"
        and request_num in one.step.scheduled[::2]
    )
