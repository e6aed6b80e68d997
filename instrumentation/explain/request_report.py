"""One request explained: its intervals, its steps, and why it waited.

Knows how a request's story follows from the steps. Does not know who asks. Costs a walk through
the history, so it is made when somebody asks, never on a step's path.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import msgspec

from instrumentation.explain.attribution import Contexts, Share, share_step
from instrumentation.explain.step_history import HistoricStep, StepHistory
from instrumentation.labels import format_step_label
from instrumentation.names import HEAD_OF_LINE, AdmissionStop, PrefixMiss, WaitingReason
from instrumentation.record.request_records import RequestTimeline
from instrumentation.record.step_records import Admission, StepRecord

_MAX_LINES = 40
_NO_OTHER_BLOCK = "the rest fills no block before the last token, which is always computed"
_MISSES = {
    PrefixMiss.NONE: _NO_OTHER_BLOCK,
    PrefixMiss.NEVER_CACHED: "the next block was never cached",
    PrefixMiss.EVICTED: "the next block was evicted",
    PrefixMiss.PARTIAL_BLOCK: _NO_OTHER_BLOCK,
    PrefixMiss.DISABLED: "it may not use the cache: that is off, or it wants prompt logprobs",
}


@dataclass(frozen=True, slots=True)
class RequestStep:
    """A step that served the request."""

    step: int
    label: str
    num_tokens: int
    """Of this request."""
    num_context_tokens: int
    """That it had computed before."""
    share_ns: int
    """Its share of the step's duration (`attribution`)."""
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class RequestWait:
    """Successive steps in which the request waited for the same cause."""

    cause: str
    """An `AdmissionStop` label where admission stopped at this request or, after a preemption, at
    nobody; `grammar` where that of its structured output was being compiled; else
    `head_of_line`."""
    first_step: int
    last_step: int
    num_steps: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class RequestPreemption:
    """One time that the request lost its blocks."""

    step: int
    time_ns: int
    by_request_num: int
    by_request_id: str | None
    """None where only the number is known; its own id if it made way for nobody but itself."""
    num_blocks_lost: int
    num_tokens_lost: int
    resumed_ns: int
    """0 if it was not resumed."""
    num_recomputed_tokens: int
    """Of the tokens lost, those that the prefix cache no longer had; -1 if it was not resumed."""


@dataclass(frozen=True, slots=True)
class RequestReport:
    """All that is known of a request. `str()` gives a table."""

    timeline: RequestTimeline
    """Intervals and stamps; those of an unfinished request end now."""
    steps: tuple[RequestStep, ...]
    waits: tuple[RequestWait, ...]
    preemptions: tuple[RequestPreemption, ...]
    admissions: tuple[Admission, ...]
    """What the prefix cache had for it, each time that it was admitted, and why it had no more."""
    intake_step: int
    """The last step that ended before the core queued it: the core takes in what has come only
    between steps. 0 where none was under way after it had arrived."""
    is_complete: bool
    """False if the history no longer holds all of its steps."""

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.timeline.finish_reason is not None

    @property
    def cost_ns(self) -> int:
        """Its shares of all its steps."""
        return sum(step.share_ns for step in self.steps)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def report_request(
    timeline: RequestTimeline, history: StepHistory, names: Mapping[int, str] | None = None
) -> RequestReport:
    """Explain a request from the steps that are remembered.

    Args:
        names: ids of other requests by number; those that have ended are known from the history.
    """
    num = timeline.request_num
    steps = history.steps()
    known = {one.request_num: one.request_id for one in history.finished_requests()}
    shares = _shares_of(num, steps)
    timeline = _with_known_start(timeline, shares)
    began_ns = timeline.first_scheduled_ns or timeline.arrival_ns
    return RequestReport(
        timeline=timeline,
        steps=tuple(
            RequestStep(
                one.step.step,
                format_step_label(one.step.label),
                share.num_tokens,
                share.num_context_tokens,
                share.duration_ns,
                one.begin_ns,
                one.end_ns,
            )
            for one, share in shares
        ),
        waits=tuple(_waits(timeline, steps)),
        preemptions=tuple(_preemptions(num, steps, known | dict(names or {}))),
        admissions=tuple(
            admission
            for one in steps
            for admission in one.step.admissions
            if admission.request_num == num
        ),
        intake_step=max(
            (
                one.step.step
                for one in steps
                if timeline.arrival_ns < one.step.end_ns <= timeline.queued_ns
            ),
            default=0,
        ),
        # Steps are numbered from 1, so that nothing can be missing before the first.
        is_complete=bool(steps) and (steps[0].step.step <= 1 or steps[0].step.begin_ns <= began_ns),
    )


def waiting_cause(timeline: RequestTimeline, step: StepRecord) -> str:
    """Why a request that waited in this step was not taken: one of the causes in `RequestWait`."""
    if step.admission_stop_request_num == timeline.request_num:
        return step.admission_stop.label
    # The step's own count decides where the stamp is only a guess.
    num_by_reason = step.waiting_by_reason[WaitingReason.GRAMMAR :]
    if step.begin_ns < timeline.grammar_ready_ns and any(num_by_reason):
        return WaitingReason.GRAMMAR.label
    if step.admission_stop is AdmissionStop.AFTER_PREEMPTION:
        return step.admission_stop.label
    return HEAD_OF_LINE


def _shares_of(num: int, steps: list[HistoricStep]) -> list[tuple[HistoricStep, Share]]:
    """Share out the steps that served the request; the others only move contexts on."""
    contexts = Contexts()
    found = []
    for one in steps:
        parts = contexts.advance(one.step)
        for index, (request_num, _, _) in enumerate(parts):
            if request_num == num:
                found.append((one, share_step(parts, one.duration_ns)[index]))
    return found


def _with_known_start(
    timeline: RequestTimeline, shares: list[tuple[HistoricStep, Share]]
) -> RequestTimeline:
    """Fill in when an unfinished request was first scheduled: the core tells that only later."""
    if timeline.first_scheduled_ns or not shares or timeline.finish_reason is not None:
        return timeline
    return msgspec.structs.replace(timeline, first_scheduled_ns=shares[0][0].step.begin_ns)


def _waits(timeline: RequestTimeline, steps: list[HistoricStep]) -> Iterator[RequestWait]:
    queued_ns = timeline.queued_ns or timeline.arrival_ns
    intervals = [(queued_ns, timeline.first_scheduled_ns or timeline.end_ns)]
    intervals += [(begin, end or timeline.end_ns) for begin, end in timeline.preemptions]
    for begin_ns, end_ns in intervals:
        inside = [one for one in steps if begin_ns <= one.step.begin_ns < end_ns]
        groups = [
            (cause, list(group))
            for cause, group in groupby(inside, key=lambda one: waiting_cause(timeline, one.step))
        ]
        # One wait ends where the next begins, so that they add up to the time of waiting.
        limits = [begin_ns, *(group[0].step.begin_ns for _, group in groups[1:]), end_ns]
        for (cause, group), from_ns, to_ns in zip(groups, limits, limits[1:], strict=False):
            first, last = group[0].step.step, group[-1].step.step
            yield RequestWait(cause, first, last, len(group), from_ns, to_ns)


def _preemptions(
    num: int, steps: list[HistoricStep], names: Mapping[int, str]
) -> Iterator[RequestPreemption]:
    for index, one in enumerate(steps):
        for lost in one.step.preempted:
            if lost.request_num != num:
                continue
            resumed_ns, num_recomputed = 0, -1
            for later in steps[index:]:
                again = [entry for entry in later.step.admissions if entry.request_num == num]
                if again:
                    resumed_ns = later.step.begin_ns
                    num_recomputed = max(0, lost.tokens_lost - again[0].num_hit_tokens)
                    break
            yield RequestPreemption(
                one.step.step,
                one.step.begin_ns,
                lost.by_request_num,
                names.get(lost.by_request_num),
                lost.blocks_lost,
                lost.tokens_lost,
                resumed_ns,
                num_recomputed,
            )


def _lines(report: RequestReport) -> Iterator[str]:
    timeline = report.timeline
    state = timeline.finish_reason or "unfinished"
    yield f"request {timeline.request_id} ({state})"
    if timeline.error:
        yield f"  error: {timeline.error}"
    yield (
        f"  {timeline.num_prompt_tokens} prompt tokens, {timeline.num_cached_tokens} of them "
        f"cached; {timeline.num_generation_tokens} output tokens"
    )
    parts = [
        f"{name} {_ms(value)}"
        for name, value in (
            ("queue", timeline.queue_ns),
            ("prefill", timeline.prefill_ns),
            ("decode", timeline.decode_ns),
            ("preempted", timeline.preempted_ns),
        )
    ]
    yield f"  end to end {_ms(timeline.e2e_ns)} = {' + '.join(parts)}"
    if timeline.ttft_ns is not None:
        yield f"  first token after {_ms(timeline.ttft_ns)}"
    yield f"  {len(report.steps)} steps, its share of their time {_ms(report.cost_ns)}"
    if not report.is_complete:
        yield "  (its first steps are forgotten: the history holds only the last ones)"
    for admission in report.admissions:
        age = f", {_ms(admission.evicted_age_ns)} before" if admission.evicted_age_ns >= 0 else ""
        yield (
            f"  {'resumed' if admission.is_resumed else 'admitted'}: the prefix cache had "
            f"{admission.num_hit_tokens} of {admission.num_query_tokens} tokens; "
            f"{_MISSES[admission.miss]}{age}"
        )
    yield from _queue_lines(report)
    for wait in report.waits:
        yield (
            f"  waited {_ms(wait.end_ns - wait.begin_ns)} (steps {wait.first_step} to "
            f"{wait.last_step}): {wait.cause}"
        )
    if report.is_complete and report.steps and timeline.first_scheduled_ns:
        behind_ns = report.steps[0].begin_ns - timeline.first_scheduled_ns
        yield (
            f"  then {_ms(behind_ns)}, part of prefill, until the worker began its first step: the "
            "next step is planned while one runs"
        )
    for preemption in report.preemptions:
        if preemption.by_request_num == timeline.request_num:
            whom = "itself"
        else:
            whom = f"request {preemption.by_request_id or preemption.by_request_num}"
        yield (
            f"  preempted in step {preemption.step} for {whom}: "
            f"{preemption.num_tokens_lost} tokens lost, {preemption.num_recomputed_tokens} "
            "recomputed"
        )
    yield from _step_lines(report)


def _queue_lines(report: RequestReport) -> Iterator[str]:
    """What of the queue time lies before the waits, which begin once the core has the request."""
    timeline = report.timeline
    if not timeline.queued_ns:
        return
    behind = f", and the end of step {report.intake_step}" if report.intake_step else ""
    yield (
        f"  {_ms(timeline.intake_ns)} until the core queued it: checking, tokenising, "
        f"transport{behind}"
    )
    rest_ns = timeline.queue_ns - timeline.intake_ns
    if rest_ns > 0 and not any(wait.begin_ns == timeline.queued_ns for wait in report.waits):
        had_grammar = timeline.grammar_ready_ns > timeline.queued_ns
        what = "its grammar was compiled" if had_grammar else "the next step was planned"
        yield f"  {_ms(rest_ns)} until {what}"


def _step_lines(report: RequestReport) -> Iterator[str]:
    if not report.steps:
        return
    width = max(len(step.label) for step in report.steps)
    yield f"  {'step':>8}  {'label':<{width}}  {'tokens':>6}  {'context':>7}  {'ms':>9}  share ms"
    half = _MAX_LINES // 2
    num_left_out = len(report.steps) - _MAX_LINES
    for index, step in enumerate(report.steps):
        if num_left_out > 0 and half <= index < len(report.steps) - half:
            if index == half:
                yield f"  {'…':>8}  ({num_left_out} steps left out)"
            continue
        yield (
            f"  {step.step:>8}  {step.label:<{width}}  {step.num_tokens:>6}  "
            f"{step.num_context_tokens:>7}  {(step.end_ns - step.begin_ns) / 1e6:>9.3f}  "
            f"{step.share_ns / 1e6:.3f}"
        )


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.3f} ms"
