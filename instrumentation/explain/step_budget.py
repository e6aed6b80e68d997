"""The step-time budget: where each nanosecond of a step went, and what nothing explains.

Knows how phases of core and worker overlap, and which of them counts. Does not know who looks.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from instrumentation.names import PHASES, Phase, ThreadName
from instrumentation.record.step_records import StepRecord, WorkerStepRecord

Interval = tuple[int, int]
Span = tuple[int, int, int]
"""begin_ns, end_ns, phase."""


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The time that one step added to the run, divided without overlap."""

    step: int
    duration_ns: int
    phases_ns: dict[Phase, int] = field(default_factory=dict)
    """Time by phase; phases that took none are left out."""
    unexplained_ns: int = 0
    """With the phases it adds up to the duration."""

    @property
    def slowest(self) -> str:
        """Where most of the time went: a phase's label, or `unexplained`."""
        phase, longest_ns = max(
            self.phases_ns.items(), key=lambda item: item[1], default=(None, -1)
        )
        if phase is None or self.unexplained_ns > longest_ns:
            return "unexplained"
        return phase.label


def step_budgets(
    steps: Sequence[StepRecord], worker_steps: Iterable[WorkerStepRecord]
) -> list[StepBudget]:
    """Divide the time of steps that followed one another.

    A step's own time is from the end of the step before (or its own scheduling, where the engine
    had been idle) to its end in the worker; the last step before an idle time has the rest too. So
    own times add up to the time in which there was work, also where steps overlap. Every instant
    counts once: for the phase that the worker was in with this step, else for the phase of the
    core loop. What is left is unexplained.
    """
    workers = {record.step: record for record in worker_steps}
    core_spans = sorted(
        span
        for step in steps
        for span in _spans(step.phases)
        if PHASES[Phase(span[2])].thread is ThreadName.CORE_LOOP
    )
    begins = [span[0] for span in core_spans]
    budgets = []
    for step, (begin_ns, end_ns) in zip(steps, _own_times(steps, workers), strict=True):
        rest: list[Interval] = [(begin_ns, end_ns)] if begin_ns < end_ns else []
        phases_ns: dict[Phase, int] = {}
        worker = workers.get(step.step)
        if worker is not None:
            rest = _take(rest, _spans(worker.phases), phases_ns)
        first = max(0, bisect_left(begins, begin_ns) - 1)
        last = bisect_left(begins, end_ns)
        rest = _take(rest, core_spans[first:last], phases_ns)
        budgets.append(
            StepBudget(
                step.step,
                max(0, end_ns - begin_ns),
                phases_ns,
                sum(end - begin for begin, end in rest),
            )
        )
    return budgets


def _own_times(
    steps: Sequence[StepRecord], workers: Mapping[int, WorkerStepRecord]
) -> Iterator[Interval]:
    """Each step's own time; those of a time without idleness follow one another without a gap."""
    previous_ns = 0
    for step, following in zip(steps, [*steps[1:], None], strict=False):
        worker = workers.get(step.step)
        is_last = following is None or following.begin_ns >= step.end_ns
        end_ns = step.end_ns if is_last or worker is None else worker.end_ns
        yield previous_ns or step.begin_ns, end_ns
        previous_ns = 0 if is_last else max(previous_ns, end_ns)


def _spans(flat: Sequence[int]) -> list[Span]:
    return [
        (begin_ns, end_ns, phase)
        for phase, begin_ns, end_ns in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    ]


def _take(
    rest: list[Interval], spans: Iterable[Span], phases_ns: dict[Phase, int]
) -> list[Interval]:
    """Count what spans cover of the rest; returns what they leave of it."""
    for begin_ns, end_ns, number in spans:
        left: list[Interval] = []
        taken_ns = 0
        for interval in rest:
            from_ns, to_ns = max(begin_ns, interval[0]), min(end_ns, interval[1])
            if from_ns >= to_ns:
                left.append(interval)
                continue
            taken_ns += to_ns - from_ns
            left += [
                piece
                for piece in ((interval[0], from_ns), (to_ns, interval[1]))
                if piece[0] < piece[1]
            ]
        rest = left
        if taken_ns:
            phase = Phase(number)
            phases_ns[phase] = phases_ns.get(phase, 0) + taken_ns
    return rest
