"""Metrics of steps: how many, how large, how long, and in which phase the time went.

Knows which field of a step's two records feeds which metric.
"""

import msgspec

from instrumentation.labels import step_kind
from instrumentation.metrics.accumulators import Families
from instrumentation.metrics.info import AfterDeath, MetricKind, Unit, declare
from instrumentation.names import (
    HEAD_OF_LINE,
    PHASES,
    AdmissionStop,
    GraphMode,
    Phase,
    ThreadName,
    WaitingReason,
)
from instrumentation.record.step_records import StepRecord, WorkerStepRecord

STEP_KINDS = ("context", "generation", "mixed")

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_STOPS = tuple(reason.label for reason in AdmissionStop if reason)
_PASSED_OVER = (WaitingReason.GRAMMAR.label,)
_STEP_PHASES = tuple(
    phase
    for phase, info in PHASES.items()
    if info.thread in (ThreadName.CORE_LOOP, ThreadName.WORKER)
)

_PHASE_LABELS = [phase.label for phase in Phase]

STEPS = declare(
    "steps_total", _COUNTER, unit=Unit.STEPS, help="Steps, by kind of work", kind=STEP_KINDS
)
SCHEDULED_TOKENS = declare(
    "scheduled_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Tokens computed in steps, by what their request was doing",
    kind=("context", "generation"),
)
SAMPLED_TOKENS = declare(
    "sampled_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Output tokens that steps made for requests that still wanted them",
)
STEP_DURATION = declare(
    "step_duration_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Time a worker took for a step, from preparing its batch to having the sampled tokens on "
    "the host, by kind of work",
    kind=STEP_KINDS,
)
STEP_TOKENS = declare(
    "step_tokens",
    _HISTOGRAM,
    unit=Unit.TOKENS,
    help="Tokens computed in a step, by kind of work",
    kind=STEP_KINDS,
)
STEP_PHASE_DURATION = declare(
    "step_phase_duration_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Time of one run through a phase of the core's loop or of the worker",
    phase=tuple(phase.label for phase in _STEP_PHASES),
)
PHASE_SECONDS = declare(
    "phase_seconds_total",
    _COUNTER,
    unit=Unit.SECONDS,
    help="Time spent in each phase of core, worker and frontend",
    phase=tuple(phase.label for phase in PHASES),
)
ADMISSION_STOPS = declare(
    "admission_stops_total",
    _COUNTER,
    unit=Unit.STEPS,
    help="Steps in which requests were left waiting, by what stopped admission",
    reason=_STOPS,
)
GRAPH_STEPS = declare(
    "graph_steps_total",
    _COUNTER,
    unit=Unit.STEPS,
    help="Worker steps, by how their forward pass was launched and the batch size of the graph "
    "(0: no graph). Replays and eager steps add up to steps",
    mode=(),
    bucket=(),
)
PADDED_TOKENS = declare(
    "padded_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Tokens computed only to fill a graph's bucket",
)
DEVICE_SECONDS = declare(
    "device_seconds_total",
    _COUNTER,
    unit=Unit.SECONDS,
    help="Time of steps on the device, where it is measured",
)
REQUESTS_RUNNING = declare(
    "requests_running",
    _GAUGE,
    unit=Unit.REQUESTS,
    help="Requests in the running list; 0 after the core's death",
    after_death=AfterDeath.RESET,
)
REQUESTS_WAITING = declare(
    "requests_waiting",
    _GAUGE,
    unit=Unit.REQUESTS,
    help="Requests in the waiting queue; 0 after the core's death",
    after_death=AfterDeath.RESET,
)
REQUESTS_WAITING_BY_REASON = declare(
    "requests_waiting_by_reason",
    _GAUGE,
    unit=Unit.REQUESTS,
    help="Requests in the waiting queue: the one at which admission stopped by what stopped it, "
    "those behind it as head_of_line, those passed over by what they lack (grammar: their "
    "structured output is being compiled); 0 after the core's death",
    after_death=AfterDeath.RESET,
    reason=(*_STOPS, *_PASSED_OVER, HEAD_OF_LINE),
)
REQUESTS_WAITING_PREEMPTED = declare(
    "requests_waiting_preempted",
    _GAUGE,
    unit=Unit.REQUESTS,
    help="Requests in the waiting queue that were running before; 0 after the core's death",
    after_death=AfterDeath.RESET,
)
WAITING_TOKENS = declare(
    "waiting_tokens",
    _GAUGE,
    unit=Unit.TOKENS,
    help="Tokens that waiting requests have still to compute; the number to scale on. 0 after the "
    "core's death",
    after_death=AfterDeath.RESET,
)
WAITING_TOKENS_BY_REASON = declare(
    "waiting_tokens_by_reason",
    _GAUGE,
    unit=Unit.TOKENS,
    help="The same by reason, as in isinglass_requests_waiting_by_reason; 0 after the core's death",
    after_death=AfterDeath.RESET,
    reason=(*_STOPS, *_PASSED_OVER, HEAD_OF_LINE),
)
OLDEST_WAITING = declare(
    "oldest_waiting_age_seconds",
    _GAUGE,
    unit=Unit.SECONDS,
    help="How long the request has waited so far that has waited longest; 0 with none, as after "
    "the core's death",
    after_death=AfterDeath.RESET,
)
OLDEST_RUNNING = declare(
    "oldest_running_age_seconds",
    _GAUGE,
    unit=Unit.SECONDS,
    help="How long the request has been running that has been so longest; 0 with none, as after "
    "the core's death",
    after_death=AfterDeath.RESET,
)
LAST_STEP_AGE = declare(
    "last_step_age_seconds",
    _GAUGE,
    unit=Unit.SECONDS,
    help="Time since the last step ended, as of the scrape; 0 before the first. With requests "
    "unfinished, a growing age is a stall. It grows on after the core's death",
    after_death=AfterDeath.LIVE,
)


class StepMetrics:
    """Counts steps as they come with the outputs."""

    def __init__(self, families: Families) -> None:
        self._steps = families.counter(STEPS)
        self._scheduled_tokens = families.counter(SCHEDULED_TOKENS)
        self._sampled_tokens = families.counter(SAMPLED_TOKENS)
        self._step_duration = families.histogram(STEP_DURATION)
        self._step_tokens = families.histogram(STEP_TOKENS)
        self._phase_duration = families.histogram(STEP_PHASE_DURATION)
        self._phase_seconds = families.counter(PHASE_SECONDS)
        self._admission_stops = families.counter(ADMISSION_STOPS)
        self._graph_steps = families.counter(GRAPH_STEPS)
        self._padded_tokens = families.counter(PADDED_TOKENS)
        self._device_seconds = families.counter(DEVICE_SECONDS)
        self._running = families.gauge(REQUESTS_RUNNING)
        self._waiting = families.gauge(REQUESTS_WAITING)
        self._waiting_by_reason = families.gauge(REQUESTS_WAITING_BY_REASON)
        self._waiting_preempted = families.gauge(REQUESTS_WAITING_PREEMPTED)
        self._waiting_tokens = families.gauge(WAITING_TOKENS)
        self._waiting_tokens_by_reason = families.gauge(WAITING_TOKENS_BY_REASON)
        self._oldest_waiting = families.gauge(OLDEST_WAITING)
        self._oldest_running = families.gauge(OLDEST_RUNNING)
        self._last_step_age = families.gauge(LAST_STEP_AGE)
        self._phase_totals_ns = [0] * len(Phase)
        self.last_step: StepRecord | None = None

    def observe_step(self, record: StepRecord) -> None:
        """Count one step of the core."""
        kind = step_kind(record.label)
        self._steps.add(1, kind)
        self._step_tokens.observe(record.num_scheduled_tokens, kind)
        if record.num_context_tokens:
            self._scheduled_tokens.add(record.num_context_tokens, "context")
        if record.num_generation_tokens:
            self._scheduled_tokens.add(record.num_generation_tokens, "generation")
        self._sampled_tokens.add(record.num_sampled_tokens)
        if record.admission_stop:
            self._admission_stops.add(1, AdmissionStop(record.admission_stop).label)
        self._count_phases(record.phases)
        self.last_step = record

    def observe_worker_step(self, record: WorkerStepRecord) -> None:
        """Count one step of a worker: of one worker where several share a step.

        Its duration is the step's: steps of the core overlap under async scheduling, those of a
        worker never do.
        """
        self._step_duration.observe(record.duration_ns, step_kind(record.label))
        self._count_phases(record.phases)
        self._graph_steps.add(1, GraphMode(record.graph_mode).label, str(record.bucket))
        if record.padded_tokens:
            self._padded_tokens.add(record.padded_tokens)
        if record.device_time_ns >= 0:
            self._device_seconds.add(record.device_time_ns)

    def take_levels(self, now_ns: int, other_phase_totals_ns: dict[str, int]) -> None:
        """Bring gauges, ages and the phases' totals up to date, for a reader."""
        totals_ns = dict(zip((p.label for p in Phase), self._phase_totals_ns, strict=True))
        record = self.last_step
        if record is not None:
            self._take_queue(record)
            self._take_ages(record, now_ns)
            io_totals = record.io_phase_totals_ns
            for phase, total in zip(io_totals[::2], io_totals[1::2], strict=True):
                totals_ns[Phase(phase).label] = total
        for label, total_ns in (totals_ns | other_phase_totals_ns).items():
            self._phase_seconds.raise_to(total_ns, label)

    def forget_queues(self, *, num_cached_blocks: int = 0) -> None:
        """Let the levels go, and keep the totals: no request is left, in the core or with it."""
        record = self.last_step
        if record is None:
            return
        self.last_step = msgspec.structs.replace(
            record,
            finished=(),
            num_running=0,
            num_waiting=0,
            num_waiting_tokens=0,
            num_waiting_deferred_tokens=0,
            num_waiting_preempted=0,
            waiting_by_reason=(0, 0),
            admission_stop=AdmissionStop.NONE,
            admission_stop_num_tokens=0,
            oldest_waiting_since_ns=0,
            oldest_running_since_ns=0,
            num_unfilled_slots=0,
            num_blocks_used=0,
            num_blocks_cached_free=num_cached_blocks,
            num_blocks_free=sum(record.blocks_at_end) - num_cached_blocks,
            num_blocks_used_at_end=-1,
            num_blocks_cached_free_at_end=-1,
        )

    def _count_phases(self, phases: tuple[int, ...]) -> None:
        totals_ns = self._phase_totals_ns
        for phase, begin_ns, end_ns in zip(phases[::3], phases[1::3], phases[2::3], strict=True):
            totals_ns[phase] += end_ns - begin_ns
            self._phase_duration.observe(end_ns - begin_ns, _PHASE_LABELS[phase])

    def _take_queue(self, record: StepRecord) -> None:
        self._running.set(record.num_running_at_end)
        self._waiting.set(record.num_waiting)
        self._waiting_preempted.set(record.num_waiting_preempted)
        self._waiting_tokens.set(record.num_waiting_tokens)
        is_stopped = record.admission_stop and record.num_waiting
        head = AdmissionStop(record.admission_stop).label if is_stopped else ""
        num_head, head_tokens = bool(head), record.admission_stop_num_tokens
        by_reason = record.waiting_by_reason
        num_deferred = by_reason[WaitingReason.GRAMMAR] if len(by_reason) > 2 else 0
        deferred_tokens = record.num_waiting_deferred_tokens
        for reason in _PASSED_OVER:
            self._waiting_by_reason.set(num_deferred, reason)
            self._waiting_tokens_by_reason.set(deferred_tokens, reason)
        for reason in (*_STOPS, HEAD_OF_LINE):
            if reason == HEAD_OF_LINE:
                num_requests = record.num_waiting - num_head - num_deferred
                num_tokens = record.num_waiting_tokens - head_tokens - deferred_tokens
            else:
                num_requests = int(reason == head)
                num_tokens = head_tokens if reason == head else 0
            self._waiting_by_reason.set(num_requests, reason)
            self._waiting_tokens_by_reason.set(num_tokens, reason)

    def _take_ages(self, record: StepRecord, now_ns: int) -> None:
        waiting_since_ns, running_since_ns = (
            record.oldest_waiting_since_ns,
            record.oldest_running_since_ns if record.num_running_at_end else 0,
        )
        self._oldest_waiting.set(now_ns - waiting_since_ns if waiting_since_ns else 0)
        self._oldest_running.set(now_ns - running_since_ns if running_since_ns else 0)
        self._last_step_age.set(max(0, now_ns - record.end_ns))
