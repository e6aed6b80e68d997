"""The engine's metrics, counted from its records in the frontend.

Knows which metric each field of a record feeds. Does not know how numbers are kept nor who reads
the snapshot. One thread observes; any thread may take a snapshot.
"""

from collections.abc import Iterable, Mapping

from instrumentation import metric_names as names
from instrumentation.accumulators import CounterFamily, GaugeFamily, HistogramFamily
from instrumentation.api import NULL, Instrument
from instrumentation.labels import step_kind
from instrumentation.metric_types import Metric
from instrumentation.names import AdmissionStop, GraphMode, Phase, Role, WaitingReason
from instrumentation.records import RequestTimeline, StepRecord, WorkerStepRecord

_WAITING_LABELS = [reason.label for reason in WaitingReason]


class Metrics:
    """All metrics of one engine.

    The instrument is the frontend's: the snapshot takes the times of the frontend's phases and the
    drops of its process from it.
    """

    def __init__(
        self, labels: Mapping[str, str] | None = None, *, instrument: Instrument = NULL
    ) -> None:
        self._labels = dict(labels or {})
        self._last_step: StepRecord | None = None
        self._phase_totals_ns = [0] * len(Phase)
        self._instrument = instrument
        self._counters = {
            info.name: CounterFamily(info)
            for info in names.METRICS.values()
            if info.kind is names.MetricKind.COUNTER
        }
        self._gauges = {
            info.name: GaugeFamily(info)
            for info in names.METRICS.values()
            if info.kind is names.MetricKind.GAUGE
        }
        self._histograms = {
            info.name: HistogramFamily(info)
            for info in names.METRICS.values()
            if info.kind is names.MetricKind.HISTOGRAM
        }

    def observe_step(self, record: StepRecord) -> None:
        """Count one step of the core: once each, as it comes with the outputs."""
        self._count_work(record)
        self._count_cache(record)
        self._count_phases(record.phases)
        self._last_step = record

    def observe_worker_step(self, record: WorkerStepRecord) -> None:
        """Count one step of a worker: once each, of one worker where several share a step.

        Its duration is the step's: steps of the core overlap under async scheduling, those of a
        worker never do.
        """
        kind = step_kind(record.label)
        self._histogram(names.STEP_DURATION).observe(record.duration_ns, kind)
        self._count_phases(record.phases)
        self._counter(names.GRAPH_STEPS).add(1, GraphMode(record.graph_mode).label)
        if record.padded_tokens:
            self._counter(names.PADDED_TOKENS).add(record.padded_tokens)
        if record.device_time_ns >= 0:
            self._counter(names.DEVICE_SECONDS).add(record.device_time_ns)

    def observe_tokens(self, num_tokens: int, gaps_ns: Iterable[int] = ()) -> None:
        """Count output tokens as they are delivered: once a step, for all requests together.

        `gaps_ns` holds the time between each token and the one before it of the same request, so
        nothing for first tokens.
        """
        self._counter(names.GENERATION_TOKENS).add(num_tokens)
        self._histogram(names.INTER_TOKEN_LATENCY).observe_many(gaps_ns)

    def observe_first_token(self, timeline: RequestTimeline) -> None:
        """Count a request's prompt and its time to first token: once, when that token is there."""
        self._counter(names.PROMPT_TOKENS).add(timeline.num_prompt_tokens)
        self._counter(names.CACHED_PROMPT_TOKENS).add(timeline.num_cached_tokens)
        if timeline.ttft_ns is not None:
            self._histogram(names.TIME_TO_FIRST_TOKEN).observe(timeline.ttft_ns)

    def observe_request(self, timeline: RequestTimeline) -> None:
        """Count a request that has ended: once, whatever became of it."""
        self._counter(names.REQUESTS_FINISHED).add(1, timeline.finish_reason or "error")
        self._histogram(names.E2E_SECONDS).observe(timeline.e2e_ns)
        self._histogram(names.QUEUE_SECONDS).observe(timeline.queue_ns)
        self._histogram(names.PREFILL_SECONDS).observe(timeline.prefill_ns)
        self._histogram(names.DECODE_SECONDS).observe(timeline.decode_ns)
        self._histogram(names.PREEMPTED_SECONDS).observe(timeline.preempted_ns)
        if timeline.mean_inter_token_ns is not None:
            self._histogram(names.TIME_PER_OUTPUT_TOKEN).observe(
                round(timeline.mean_inter_token_ns)
            )
        self._histogram(names.REQUEST_PROMPT_TOKENS).observe(timeline.num_prompt_tokens)
        self._histogram(names.REQUEST_GENERATION_TOKENS).observe(timeline.num_generation_tokens)

    def snapshot(self) -> list[Metric]:
        """Read every series, also those still at zero, in the catalogue's order."""
        if self._last_step is not None:
            self._take_levels(self._last_step)
        self._take_totals()
        families: dict[str, CounterFamily | GaugeFamily | HistogramFamily] = {
            **self._counters,
            **self._gauges,
            **self._histograms,
        }
        return [
            series for name in names.METRICS for series in families[name].snapshot(self._labels)
        ]

    def _count_work(self, record: StepRecord) -> None:
        kind = step_kind(record.label)
        self._counter(names.STEPS).add(1, kind)
        self._histogram(names.STEP_TOKENS).observe(record.num_scheduled_tokens, kind)
        scheduled_tokens = self._counter(names.SCHEDULED_TOKENS)
        if record.num_context_tokens:
            scheduled_tokens.add(record.num_context_tokens, "context")
        if record.num_generation_tokens:
            scheduled_tokens.add(record.num_generation_tokens, "generation")
        if record.admission_stop:
            self._counter(names.ADMISSION_STOPS).add(1, AdmissionStop(record.admission_stop).label)

    def _count_cache(self, record: StepRecord) -> None:
        if record.prefix_query_tokens or record.preempted_prefix_query_tokens:
            queries = self._counter(names.PREFIX_QUERY_TOKENS)
            queries.add(record.prefix_query_tokens, "first")
            queries.add(record.preempted_prefix_query_tokens, "preempted")
            hits = self._counter(names.PREFIX_HIT_TOKENS)
            hits.add(record.prefix_hit_tokens, "first")
            hits.add(record.preempted_prefix_hit_tokens, "preempted")
        if record.num_evicted_blocks:
            self._counter(names.KV_BLOCK_EVICTIONS).add(record.num_evicted_blocks)
        if record.preempted:
            self._counter(names.PREEMPTIONS).add(len(record.preempted))
            self._counter(names.PREEMPTION_LOST_TOKENS).add(
                sum(preemption.tokens_lost for preemption in record.preempted)
            )

    def _count_phases(self, phases: tuple[int, ...]) -> None:
        totals_ns = self._phase_totals_ns
        for phase, begin_ns, end_ns in zip(phases[::3], phases[1::3], phases[2::3], strict=True):
            totals_ns[phase] += end_ns - begin_ns

    def _take_levels(self, record: StepRecord) -> None:
        """Set the gauges, which only a reader wants, from the last step."""
        self._gauge(names.REQUESTS_RUNNING).set(record.num_running_at_end)
        self._gauge(names.REQUESTS_WAITING).set(record.num_waiting)
        waiting = self._gauge(names.REQUESTS_WAITING_BY_REASON)
        for label, num_waiting in zip(_WAITING_LABELS, record.waiting_by_reason, strict=False):
            waiting.set(num_waiting, label)
        blocks = self._gauge(names.KV_BLOCKS)
        for state, num_blocks in zip(names.BLOCK_STATES, record.blocks_at_end, strict=True):
            blocks.set(num_blocks, state)
        self._counter(names.TELEMETRY_DROPS).raise_to(record.num_telemetry_drops, Role.CORE.value)

    def _take_totals(self) -> None:
        """Take over the totals that are kept elsewhere."""
        phase_seconds = self._counter(names.PHASE_SECONDS)
        io_totals = self._last_step.io_phase_totals_ns if self._last_step is not None else ()
        totals_ns = {
            **{
                phase.label: total
                for phase, total in zip(Phase, self._phase_totals_ns, strict=True)
            },
            **{
                Phase(phase).label: total
                for phase, total in zip(io_totals[::2], io_totals[1::2], strict=True)
            },
            **self._instrument.phase_totals_ns(),
        }
        for label, total_ns in totals_ns.items():
            phase_seconds.raise_to(total_ns, label)
        drops = self._counter(names.TELEMETRY_DROPS)
        drops.raise_to(self._instrument.num_drops(), Role.CALLER.value)
        self._counter(names.TELEMETRY_NEGATIVE_VALUES).raise_to(self._num_negative())

    def _num_negative(self) -> int:
        return sum(family.num_negative for family in self._counters.values()) + sum(
            family.num_negative for family in self._histograms.values()
        )

    def _counter(self, info: names.MetricInfo) -> CounterFamily:
        return self._counters[info.name]

    def _gauge(self, info: names.MetricInfo) -> GaugeFamily:
        return self._gauges[info.name]

    def _histogram(self, info: names.MetricInfo) -> HistogramFamily:
        return self._histograms[info.name]
