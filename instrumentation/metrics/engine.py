"""Metrics of the engine as a whole: up or down, start-up, memory, settings, transport, telemetry.

Knows the facts that the core reports when it is ready, and the instrument's own counts.
"""

from collections.abc import Mapping
from typing import Protocol

from instrumentation.metrics.accumulators import Families
from instrumentation.metrics.info import AfterDeath, MetricKind, Unit, declare
from instrumentation.names import RING, Role, SinkName, StartupPhase
from instrumentation.record.instrument import Instrument
from instrumentation.record.step_records import StepRecord

MEMORY_COMPONENTS = ("weights", "kv_cache", "graphs", "activations", "other")

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_PROCESSES = (Role.CALLER.value, Role.CORE.value)

ENGINE_UP = declare(
    "engine_up",
    _GAUGE,
    unit=Unit.INFO,
    help="1 while the engine core is alive, 0 before and once it has died or was shut down",
    after_death=AfterDeath.RESET,
)
ENGINE_INFO = declare(
    "engine_info",
    _GAUGE,
    unit=Unit.INFO,
    help="What the engine runs, in labels; the value is 1",
    after_death=AfterDeath.KEPT,
    version=(),
    model=(),
    dtype=(),
    device=(),
    attention_backend=(),
)
CONFIG_INFO = declare(
    "config_info",
    _GAUGE,
    unit=Unit.INFO,
    help="The settings in force after all adjustment, a series each; the value is 1",
    after_death=AfterDeath.KEPT,
    setting=(),
    value=(),
)
KV_CACHE_CAPACITY = declare(
    "kv_cache_capacity_tokens",
    _GAUGE,
    unit=Unit.TOKENS,
    help="Tokens that the KV pool can hold",
    after_death=AfterDeath.KEPT,
)
MAX_MODEL_LEN = declare(
    "max_model_len_tokens",
    _GAUGE,
    unit=Unit.TOKENS,
    help="Longest sequence, as the core settled on it",
    after_death=AfterDeath.KEPT,
)
MEMORY = declare(
    "memory_bytes",
    _GAUGE,
    unit=Unit.BYTES,
    help="Memory that the core has planned with, by component; they add up to what its process "
    "(CPU) or device (GPU) has in use with the largest batch running and the KV pool filled. Kept "
    "after the core's death",
    after_death=AfterDeath.KEPT,
    component=MEMORY_COMPONENTS,
)
STARTUP_SECONDS = declare(
    "startup_phase_seconds",
    _GAUGE,
    unit=Unit.SECONDS,
    help="How long each phase of start-up took; 0: it has not taken place",
    after_death=AfterDeath.KEPT,
    phase=tuple(phase.label for phase in StartupPhase),
)
TRANSPORT_SECONDS = declare(
    "transport_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="From the core's output thread taking a message to the frontend having it decoded: "
    "serialising, socket, waking up",
)
TELEMETRY_DROPS = declare(
    "telemetry_drops_total",
    _COUNTER,
    unit=Unit.ENTRIES,
    help="Telemetry entries lost, by process and by the sink that had failed or was too slow; "
    "ring: before any sink, for want of room",
    process=_PROCESSES,
    sink=(RING, *(sink.label for sink in SinkName)),
)
TELEMETRY_ERRORS = declare(
    "telemetry_errors_total",
    _COUNTER,
    unit=Unit.ENTRIES,
    help="Errors of telemetry, by what it flows into, all processes together; none of them ever "
    "reaches a request",
    sink=tuple(sink.label for sink in SinkName),
)
TELEMETRY_SECONDS = declare(
    "telemetry_seconds_total",
    _COUNTER,
    unit=Unit.SECONDS,
    help="Processor time of telemetry: its background thread by process, and counting in the "
    "frontend",
    process=_PROCESSES,
    part=("background", "counting"),
)
TELEMETRY_NEGATIVE_VALUES = declare(
    "telemetry_negative_values_total",
    _COUNTER,
    unit=Unit.ENTRIES,
    help="Values that were negative or no number and left uncounted; any is a defect",
)


class Exporter(Protocol):
    """What exports on its own thread, and counts its own failures."""

    @property
    def num_errors(self) -> int:
        """Failures so far."""

    @property
    def num_drops(self) -> int:
        """Entries lost so far."""


class EngineMetrics:
    """Counts what belongs to no single step or request.

    Attributes:
        is_down: the core has died, or was shut down.
    """

    def __init__(self, families: Families, *, instrument: Instrument) -> None:
        self._families = families
        self._instrument = instrument
        self._up = families.gauge(ENGINE_UP)
        self._info = families.gauge(ENGINE_INFO)
        self._config = families.gauge(CONFIG_INFO)
        self._capacity = families.gauge(KV_CACHE_CAPACITY)
        self._max_model_len = families.gauge(MAX_MODEL_LEN)
        self._memory = families.gauge(MEMORY)
        self._startup = families.gauge(STARTUP_SECONDS)
        self._transport = families.histogram(TRANSPORT_SECONDS)
        self._drops = families.counter(TELEMETRY_DROPS)
        self._errors = families.counter(TELEMETRY_ERRORS)
        self._seconds = families.counter(TELEMETRY_SECONDS)
        self._negative = families.counter(TELEMETRY_NEGATIVE_VALUES)
        self._num_errors: dict[str, int] = {}
        self._exporters: list[tuple[SinkName, Exporter]] = []
        self._counting_ns = 0
        self.is_down = False

    def engine_is_ready(
        self,
        *,
        info: Mapping[str, str],
        settings: Mapping[str, str],
        kv_cache_tokens: int,
        max_model_len: int,
        memory_bytes: Mapping[str, int],
        startup_ns: Mapping[str, int],
    ) -> None:
        """Take over what start-up decided; `info` has the labels of `ENGINE_INFO`."""
        self._up.set(int(not self.is_down))
        self._info.set(1, *(info[label] for label in ENGINE_INFO.labels))
        for setting, value in settings.items():
            self._config.set(1, setting, value)
        self._capacity.set(kv_cache_tokens)
        self._max_model_len.set(max_model_len)
        for component, num_bytes in memory_bytes.items():
            self._memory.set(num_bytes, component)
        for phase, duration_ns in startup_ns.items():
            self._startup.set(duration_ns, phase)

    def engine_is_down(self) -> None:
        """The core has died, or was shut down; word of its start may come later than that."""
        self.is_down = True
        self._up.set(0)

    def observe_transport(self, duration_ns: int) -> None:
        """Count the way of one message from the core."""
        self._transport.observe(duration_ns)

    def count_error(self, sink: SinkName) -> None:
        """Count an error of this process's telemetry."""
        self._num_errors[sink.label] = self._num_errors.get(sink.label, 0) + 1

    def watch(self, sink: SinkName, exporter: Exporter) -> None:
        """Take an exporter's errors and drops over, whenever somebody reads."""
        self._exporters.append((sink, exporter))

    def count_time(self, duration_ns: int) -> None:
        """Count time that counting itself took."""
        self._counting_ns += duration_ns

    def take_levels(self, record: StepRecord | None) -> None:
        """Bring totals that are kept elsewhere up to date, for a reader."""
        caller, core = _PROCESSES
        errors = dict(self._num_errors)
        _add_up(errors, self._instrument.telemetry_errors())
        drops = self._instrument.telemetry_drops()
        for sink, exporter in self._exporters:
            _add_up(errors, {sink.label: exporter.num_errors})
            _add_up(drops, {sink.label: exporter.num_drops})
        for label, number in drops.items():
            self._drops.raise_to(number, caller, label)
        if record is not None:
            pairs = zip(record.telemetry_errors[::2], record.telemetry_errors[1::2], strict=True)
            _add_up(errors, {SinkName(sink).label: number for sink, number in pairs})
            self._take_core_drops(record)
            self._seconds.raise_to(record.telemetry_ns, core, "background")
        for label, number in errors.items():
            self._errors.raise_to(number, label)
        self._seconds.raise_to(self._instrument.telemetry_ns(), caller, "background")
        self._seconds.raise_to(self._counting_ns, caller, "counting")
        self._negative.raise_to(self._families.num_negative)

    def _take_core_drops(self, record: StepRecord) -> None:
        core = Role.CORE.value
        num_in_ring, flat = record.num_telemetry_drops, record.telemetry_drops
        for sink, number in zip(flat[::2], flat[1::2], strict=True):
            self._drops.raise_to(number, core, SinkName(sink).label)
            num_in_ring -= number
        self._drops.raise_to(max(0, num_in_ring), core, RING)


def _add_up(totals: dict[str, int], more: Mapping[str, int]) -> None:
    for name, number in more.items():
        totals[name] = totals.get(name, 0) + number
