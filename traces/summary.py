"""A run in numbers: where the time went, what was computed, how requests fared.

Knows how each number follows from the records. Does not know how it is shown.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import ceil

from instrumentation.explain.step_budget import step_budgets
from instrumentation.labels import format_step_label, step_kind
from instrumentation.names import AdmissionStop, ThreadName
from instrumentation.record.records import StartupRecord
from instrumentation.record.request_records import RequestTimeline
from instrumentation.record.step_records import StepRecord, WorkerStepRecord
from traces.beginning import cut_at_beginning
from traces.intervals import Interval, length, merge, overlap
from traces.journal_reader import PhaseSpan, Run, read_run
from traces.requests import request_timelines
from traces.run_summary import (
    BudgetSummary,
    PhaseTotal,
    PoolSummary,
    PreemptionSummary,
    PrefixSummary,
    ProcessSummary,
    Quantiles,
    RequestsSummary,
    RunSummary,
    StartupSummary,
    StepGroup,
    ThreadSummary,
)

TimedStep = StepRecord | WorkerStepRecord


def summarize(run_dir: str | os.PathLike[str]) -> RunSummary:
    """Sum a run up from its journals, finished or killed.

    Raises:
        ValueError: the folder holds no readable journal.
    """
    return summarize_run(read_run(run_dir))


def summarize_run(run: Run) -> RunSummary:
    """Sum up a run that has been read."""
    run, cut_ns = cut_at_beginning(run)
    steps = run.steps
    intervals = [(step.begin_ns, step.end_ns) for step in steps]
    elapsed_ns = max((end for _, end in intervals), default=0) - min(
        (begin for begin, _ in intervals), default=0
    )
    timelines = request_timelines(run)
    timed_steps: Sequence[TimedStep] = run.steps_of_first_worker
    are_steps_of_workers = bool(timed_steps)
    timed_steps = timed_steps or steps
    return RunSummary(
        folder=run.folder,
        processes=[
            ProcessSummary(
                role=process.header.role,
                rank=process.header.rank,
                pid=process.header.pid,
                is_truncated=process.is_truncated,
                num_dropped=process.num_dropped,
            )
            for process in run.processes
        ],
        startups=_startups(run),
        elapsed_ns=elapsed_ns,
        idle_ns=elapsed_ns - length(merge(intervals)),
        num_steps=len(steps),
        num_cut_steps=sum(begin == cut_ns for begin, _ in intervals),
        are_steps_of_workers=are_steps_of_workers,
        steps_by_kind=_step_groups(((step_kind(one.label), one) for one in timed_steps), cut_ns),
        steps_by_label=_step_groups(
            ((format_step_label(one.label), one) for one in timed_steps), cut_ns
        ),
        latency=quantiles(end - begin for begin, end in intervals if begin != cut_ns),
        threads=_threads(run),
        budget=_budget(run),
        admission_stops={
            AdmissionStop(reason).label: count
            for reason, count in Counter(step.admission_stop for step in steps).most_common()
            if reason != AdmissionStop.NONE
        },
        num_context_tokens=sum(step.num_context_tokens for step in steps),
        num_sampled_tokens=sum(step.num_sampled_tokens for step in steps),
        prefix=PrefixSummary(
            query_tokens=sum(step.prefix_query_tokens for step in steps),
            hit_tokens=sum(step.prefix_hit_tokens for step in steps),
            preempted_query_tokens=sum(step.preempted_prefix_query_tokens for step in steps),
            preempted_hit_tokens=sum(step.preempted_prefix_hit_tokens for step in steps),
        ),
        pool=_pool(steps),
        preemptions=PreemptionSummary(
            count=sum(step.num_preempted for step in steps),
            blocks_lost=sum(entry.blocks_lost for step in steps for entry in step.preempted),
            tokens_lost=sum(entry.tokens_lost for step in steps for entry in step.preempted),
        ),
        requests=_requests(timelines),
    )


def quantiles(durations_ns: Iterable[int | float]) -> Quantiles:
    """Sum a distribution up; quantiles are by nearest rank, so each is a value that occurred."""
    ordered = sorted(round(duration) for duration in durations_ns)
    if not ordered:
        return Quantiles(0, 0.0, 0, 0, 0)
    return Quantiles(
        count=len(ordered),
        mean_ns=sum(ordered) / len(ordered),
        p50_ns=_nearest_rank(ordered, 0.50),
        p99_ns=_nearest_rank(ordered, 0.99),
        max_ns=ordered[-1],
    )


def _nearest_rank(ordered: Sequence[int], share: float) -> int:
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def _startups(run: Run) -> list[StartupSummary]:
    pairs = [
        (process, startup)
        for process in run.processes
        for startup in process.of_type(StartupRecord)
    ]
    pairs.sort(key=lambda pair: (pair[1].begin_ns, pair[1].end_ns))
    return [
        StartupSummary(
            role=process.header.role,
            pid=process.header.pid,
            phase=startup.phase.label,
            offset_ns=startup.begin_ns - pairs[0][1].begin_ns,
            duration_ns=startup.end_ns - startup.begin_ns,
        )
        for process, startup in pairs
    ]


def _step_groups(named_steps: Iterable[tuple[str, TimedStep]], begin_ns: int) -> list[StepGroup]:
    """Group steps by name, those that took most time in all, from the run's begin on, first."""
    groups: dict[str, list[TimedStep]] = defaultdict(list)
    for name, step in named_steps:
        groups[name].append(step)
    summaries = []
    for name, steps in groups.items():
        durations_ns = [step.end_ns - step.begin_ns for step in steps]
        summaries.append(
            StepGroup(
                name,
                num_tokens=sum(step.num_scheduled_tokens for step in steps),
                total_ns=sum(max(0, step.end_ns - max(step.begin_ns, begin_ns)) for step in steps),
                durations=quantiles(durations_ns),
            )
        )
    return sorted(summaries, key=lambda group: -group.total_ns)


def _threads(run: Run) -> list[ThreadSummary]:
    """Sum the phases of each thread up; those of the core loop and of the workers in steps too."""
    threads = []
    for process, thread in run.threads():
        spans = thread.phase_spans()
        if not spans:
            continue
        in_steps = merge(
            [(step.begin_ns, step.end_ns) for step in thread.of_type(StepRecord)]
            + [(step.begin_ns, step.end_ns) for step in thread.of_type(WorkerStepRecord)]
        )
        explained = overlap(in_steps, merge((span.begin_ns, span.end_ns) for span in spans))
        threads.append(
            ThreadSummary(
                role=process.header.role,
                rank=process.header.rank,
                pid=process.header.pid,
                name=thread.name,
                steps_ns=length(in_steps),
                phases=_phase_totals(spans, in_steps),
                unexplained_ns=length(in_steps) - explained,
            )
        )
    order: dict[str, int] = {name: number for number, name in enumerate(ThreadName)}
    return sorted(threads, key=lambda thread: (order.get(thread.name, len(order)), thread.rank))


def _phase_totals(spans: Sequence[PhaseSpan], in_steps: Sequence[Interval]) -> list[PhaseTotal]:
    by_phase: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        by_phase[span.phase.label].append((span.begin_ns, span.end_ns))
    totals = [
        PhaseTotal(
            name,
            count=len(intervals),
            total_ns=length(intervals),
            in_steps_ns=overlap(in_steps, merge(intervals)),
        )
        for name, intervals in by_phase.items()
    ]
    return sorted(totals, key=lambda total: -total.total_ns)


def _budget(run: Run) -> BudgetSummary:
    """Add the budgets of all steps up."""
    budgets = step_budgets(run.steps, run.steps_of_first_worker)
    phases_ns: Counter[str] = Counter()
    for budget in budgets:
        for phase, time_ns in budget.phases_ns.items():
            phases_ns[phase.label] += time_ns
    return BudgetSummary(
        duration_ns=sum(budget.duration_ns for budget in budgets),
        phases_ns=dict(phases_ns.most_common()),
        unexplained_ns=sum(budget.unexplained_ns for budget in budgets),
    )


def _pool(steps: Sequence[StepRecord]) -> PoolSummary:
    return PoolSummary(
        num_blocks=max(
            (
                step.num_blocks_used + step.num_blocks_cached_free + step.num_blocks_free
                for step in steps
            ),
            default=0,
        ),
        peak_used=max((step.num_blocks_used for step in steps), default=0),
        peak_cached_free=max((step.num_blocks_cached_free for step in steps), default=0),
        peak_free=max((step.num_blocks_free for step in steps), default=0),
        num_evicted=sum(step.num_evicted_blocks for step in steps),
    )


def _requests(timelines: Sequence[RequestTimeline]) -> RequestsSummary:
    return RequestsSummary(
        count=len(timelines),
        by_finish_reason=dict(
            Counter(timeline.finish_reason or "unknown" for timeline in timelines).most_common()
        ),
        num_prompt_tokens=sum(timeline.num_prompt_tokens for timeline in timelines),
        num_cached_tokens=sum(timeline.num_cached_tokens for timeline in timelines),
        num_generation_tokens=sum(timeline.num_generation_tokens for timeline in timelines),
        ttft=quantiles(timeline.ttft_ns for timeline in timelines if timeline.ttft_ns is not None),
        inter_token=quantiles(
            timeline.mean_inter_token_ns
            for timeline in timelines
            if timeline.mean_inter_token_ns is not None
        ),
        e2e=quantiles(timeline.e2e_ns for timeline in timelines),
        queue=quantiles(timeline.queue_ns for timeline in timelines),
        prefill=quantiles(timeline.prefill_ns for timeline in timelines),
        decode=quantiles(timeline.decode_ns for timeline in timelines),
        preempted=quantiles(timeline.preempted_ns for timeline in timelines),
    )
