"""Steps as spans: each a trace of its own, with links to the requests that it served.

    execute_context_1(4)_generation_5(5)     start of scheduling to the end of updating
      schedule, execute, wait, update        phases of the core's loop that belong to the step
      prepare, forward, logits, sample, …    phases of the worker

Knows the records of core and worker. Steps overlap under async scheduling, so a step's span does
too; `isinglass.step.worker_duration` is the time that the worker had it. Which steps are exported
does not depend on which requests are: one in a hundred, and, once a request turns out to have been
slow, failed or preempted, those that served it, as far back as the last `capacity` steps. Choosing
is cheap; writing is not, with hundreds of links a step, so chosen steps wait for `export_waiting`,
whose caller decides what that may cost.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, Tracer, set_span_in_context

from instrumentation.labels import format_step_label, step_kind
from instrumentation.names import AdmissionStop, GraphMode, Phase, Role
from instrumentation.otel import attributes as names
from instrumentation.otel.request_spans import wall_offset_ns
from instrumentation.record.step_records import StepRecord, WorkerStepRecord

SAMPLE_EVERY = 100
CAPACITY = 2048

_PhaseTriple = tuple[int, int, int]


class _Step:
    """A step that may still be exported."""

    __slots__ = ("exported", "phases_before", "record", "worker")

    def __init__(
        self, record: StepRecord, worker: WorkerStepRecord | None, phases_before: tuple[int, ...]
    ) -> None:
        self.record = record
        self.worker = worker
        self.phases_before = phases_before
        self.exported = False


class StepSpans:
    """Chooses steps and writes their spans; for the exporting thread alone.

    Attributes:
        num_drops: chosen steps that were given up, because as many were waiting as may.
    """

    def __init__(
        self,
        tracer: Tracer,
        context_of: Callable[[int], SpanContext | None],
        *,
        mode: str,
        capacity: int = CAPACITY,
    ) -> None:
        self.num_drops = 0
        self._tracer = tracer
        self._context_of = context_of
        self._mode = mode
        self._recent: deque[_Step] = deque(maxlen=capacity)
        self._waiting: deque[tuple[_Step, str]] = deque()
        self._capacity = capacity
        self._phases_before: tuple[int, ...] = ()

    def observe(self, record: StepRecord, worker: WorkerStepRecord | None) -> None:
        """A step has ended: choose it, or keep it for a while."""
        if self._mode == "off":
            return
        step = _Step(record, worker, self._phases_before)
        self._phases_before = record.phases
        if self._mode == "all":
            self._choose(step, "all")
            return
        self._recent.append(step)
        if record.step % SAMPLE_EVERY == 0:
            self._choose(step, "rate")

    def export_served(self, request_nums: set[int], *, since_ns: int) -> None:
        """Choose the kept steps that served one of these requests; each step at most once.

        `since_ns` is when the first of them arrived: steps that ended before are not looked at.
        """
        if self._mode != "sampled" or not request_nums:
            return
        served = []
        for step in reversed(self._recent):
            if step.record.end_ns < since_ns:
                break
            if not step.exported and not request_nums.isdisjoint(_involved(step.record)):
                served.append(step)
        for step in reversed(served):
            self._choose(step, "tail")

    def export_waiting(self, may_go_on: Callable[[], bool]) -> None:
        """Write spans of chosen steps as long as that is allowed."""
        while self._waiting and may_go_on():
            self._export(*self._waiting.popleft())

    def drop_waiting(self) -> None:
        """Give up what is still waiting."""
        self.num_drops += len(self._waiting)
        self._waiting.clear()

    def _choose(self, step: _Step, sampled_by: str) -> None:
        step.exported = True
        if len(self._waiting) < self._capacity:
            self._waiting.append((step, sampled_by))
        else:
            self.num_drops += 1

    def _export(self, step: _Step, sampled_by: str) -> None:
        record, worker = step.record, step.worker
        offset_ns = wall_offset_ns()
        phases = [(Role.CORE, *one) for one in _own_phases(record, step.phases_before)]
        if worker is not None:
            phases += [(Role.WORKER, *one) for one in _triples(worker.phases)]
        # A phase is left a moment after the stamp that was taken within it.
        begin_ns = min([record.begin_ns, *(phase[2] for phase in phases)])
        end_ns = max([begin_ns, record.end_ns, *(phase[3] for phase in phases)])
        span = self._tracer.start_span(
            format_step_label(record.label),
            context=Context(),
            links=list(self._links(record)),
            attributes=_attributes(record, worker) | {names.STEP_SAMPLED_BY: sampled_by},
            start_time=begin_ns + offset_ns,
        )
        parent = set_span_in_context(span, Context())
        for role, phase, phase_begin_ns, phase_end_ns in phases:
            child = self._tracer.start_span(
                Phase(phase).label,
                context=parent,
                attributes={names.PROCESS_ROLE: role.value},
                start_time=phase_begin_ns + offset_ns,
            )
            child.end(phase_end_ns + offset_ns)
        span.end(end_ns + offset_ns)

    def _links(self, record: StepRecord) -> Iterator[Link]:
        for request_num in record.scheduled[::2]:
            context = self._context_of(request_num)
            # A request that is not sampled has no span to look at. No attributes: they would
            # double the cost of a link, and there are hundreds.
            if context is not None and context.trace_flags.sampled:
                yield Link(context)


def _involved(record: StepRecord) -> Iterable[int]:
    """Requests that a step served or threw out."""
    thrown_out = tuple(one.request_num for one in record.preempted)
    return (*record.scheduled[::2], *thrown_out) if thrown_out else record.scheduled[::2]


def _triples(phases: tuple[int, ...]) -> Iterator[_PhaseTriple]:
    return zip(phases[::3], phases[1::3], phases[2::3], strict=True)


def _own_phases(record: StepRecord, phases_before: tuple[int, ...]) -> list[_PhaseTriple]:
    """The core loop's phases that belong to a step.

    A record carries the loop's phases since the record before; under async scheduling that holds
    the scheduling of the next step, and this step's is in the record before.
    """
    own: list[_PhaseTriple] = []
    for one in (*_triples(phases_before), *_triples(record.phases)):
        phase, begin_ns, end_ns = one
        is_scheduling = phase == Phase.SCHEDULE and begin_ns <= record.begin_ns <= end_ns
        is_next = phase == Phase.EXECUTE and bool(own) and own[-1][0] == Phase.SCHEDULE
        if is_scheduling or is_next:
            own.append(one)
    last: dict[int, _PhaseTriple] = {one[0]: one for one in _triples(record.phases)}
    own += [last[phase] for phase in (Phase.WAIT, Phase.UPDATE) if phase in last]
    return own


def _attributes(record: StepRecord, worker: WorkerStepRecord | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        names.STEP: record.step,
        names.STEP_KIND: step_kind(record.label),
        names.STEP_CONTEXT_REQUESTS: record.num_context_requests,
        names.STEP_CONTEXT_TOKENS: record.num_context_tokens,
        names.STEP_GENERATION_REQUESTS: record.num_generation_requests,
        names.STEP_GENERATION_TOKENS: record.num_generation_tokens,
        names.STEP_RUNNING: record.num_running,
        names.STEP_WAITING: record.num_waiting,
        names.STEP_PREEMPTED: record.num_preempted,
        names.STEP_BLOCKS_USED: record.num_blocks_used,
        names.STEP_ADMISSION_STOP: AdmissionStop(record.admission_stop).label,
    }
    if worker is not None:
        attributes[names.STEP_WORKER_DURATION] = worker.duration_ns / 1e9
        attributes[names.STEP_GRAPH_MODE] = GraphMode(worker.graph_mode).label
    return attributes
