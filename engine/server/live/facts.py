"""Records as the live page gets them: flat rows with named columns, times in microseconds.

Knows the rows' form, which the page learns from the snapshot and so never has to guess. Does not
know when they are sent. Times count from `base_ns`, so that they stay exact in JavaScript's
numbers; a time that never was is null.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from instrumentation import (
    AdmissionStop,
    Phase,
    RequestTimeline,
    StepRecord,
    WorkerStepRecord,
    format_step_label,
    step_kind,
)

STEP_COLUMNS = (
    *("step", "planned", "begin", "end", "label", "kind"),
    *("num_context_tokens", "num_generation_tokens", "num_sampled", "num_running", "num_waiting"),
    *("used", "cached_free", "admission_stop", "stopped_request", "phases"),
    *("preempted", "admitted", "first_tokens", "finished"),
    *("num_evicted", "num_hit", "num_queried", "core_end"),
)
"""begin to end: the worker's time for the step, or the core's where that is not known. phases:
triples of phase, offset to begin, duration. preempted: triples of request, tokens lost, for
whom."""

REQUEST_COLUMNS = (
    *("num", "id", "arrival", "queued", "first_scheduled", "first_token", "last_token", "end"),
    *("preemptions", "num_prompt", "num_cached", "num_generated", "reason"),
)
"""end and reason are null while it lasts. preemptions: pairs of begin and end."""

FIRST_TOKEN_COLUMNS = ("num", "queued", "first_scheduled", "first_token", "num_cached")

_MAX_ID_LENGTH = 128


class Facts:
    """Turns records into rows; all times relative to one instant."""

    def __init__(self, base_ns: int) -> None:
        self.base_ns = base_ns

    def time(self, time_ns: int) -> int | None:
        """A stamp as the page knows it."""
        return (time_ns - self.base_ns) // 1000 if time_ns else None

    def step(self, step: StepRecord, worker_step: WorkerStepRecord | None) -> list[Any]:
        """A row of `STEP_COLUMNS`."""
        timed = step if worker_step is None else worker_step
        phases = step.phases if worker_step is None else step.phases + worker_step.phases
        label = step.label
        used, cached_free, _ = step.blocks_at_end
        return [
            step.step,
            self.time(step.begin_ns),
            self.time(timed.begin_ns),
            self.time(timed.end_ns),
            format_step_label(label),
            step_kind(label),
            step.num_context_tokens,
            step.num_generation_tokens,
            step.num_sampled_tokens,
            step.num_running_at_end,
            step.num_waiting,
            used,
            cached_free,
            AdmissionStop(step.admission_stop).label,
            step.admission_stop_request_num,
            _phases(phases, timed.begin_ns),
            [n for p in step.preempted for n in (p.request_num, p.tokens_lost, p.by_request_num)],
            [admission.request_num for admission in step.admissions],
            step.first_tokens,
            step.finished,
            step.num_evicted_blocks,
            step.prefix_hit_tokens,
            step.prefix_query_tokens,
            self.time(step.end_ns),
        ]

    def request(self, timeline: RequestTimeline) -> list[Any]:
        """A row of `REQUEST_COLUMNS`."""
        has_ended = timeline.finish_reason is not None
        return [
            timeline.request_num,
            timeline.request_id[:_MAX_ID_LENGTH],
            self.time(timeline.arrival_ns),
            self.time(timeline.queued_ns),
            self.time(timeline.first_scheduled_ns),
            self.time(timeline.first_token_ns),
            self.time(timeline.last_token_ns),
            self.time(timeline.end_ns) if has_ended else None,
            [self.time(time_ns) for pair in timeline.preemptions for time_ns in pair],
            timeline.num_prompt_tokens,
            timeline.num_cached_tokens,
            timeline.num_generation_tokens,
            timeline.finish_reason,
        ]

    def first_token(self, timeline: RequestTimeline) -> list[Any]:
        """A row of `FIRST_TOKEN_COLUMNS`."""
        return [
            timeline.request_num,
            self.time(timeline.queued_ns),
            self.time(timeline.first_scheduled_ns),
            self.time(timeline.first_token_ns),
            timeline.num_cached_tokens,
        ]


def counted(gaps_ns: Iterable[int]) -> list[int]:
    """Times between tokens in microseconds, as flat pairs: time, how often, ...

    Requests of one step have mostly the same, so this is short.
    """
    return [n for pair in Counter(gap_ns // 1000 for gap_ns in gaps_ns).items() for n in pair]


def _phases(triples: tuple[int, ...], begin_ns: int) -> list[Any]:
    """Flat triples of a name, an offset and a duration."""
    flat: list[Any] = []
    for at in range(0, len(triples), 3):
        phase, from_ns, to_ns = triples[at : at + 3]
        flat += (Phase(phase).label, (from_ns - begin_ns) // 1000, (to_ns - from_ns) // 1000)
    return flat
