"""What the catalogue says of a metric: name, kind, unit, help, labels, buckets.

The metrics themselves are declared beside the code that counts them: `step_metrics`,
`cache_metrics`, `request_metrics`, `engine_metrics`, `server_metrics`; `METRICS` holds them all
once these are imported. Names are API: renaming one is a breaking change. Base units only (seconds,
bytes, tokens, blocks); counters end in `_total`.
"""

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "isinglass_"

SECONDS_BUCKETS = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 7200.0),
)
"""From a fast small model's token to a batch job's hours."""


def _with(*bounds: float) -> tuple[float, ...]:
    return tuple(sorted({*SECONDS_BUCKETS, *bounds}))


FIRST_TOKEN_BUCKETS = _with(
    *(0.04, 0.06, 0.08, 0.25, 0.75, 2.5, 7.5, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
)
"""These have all bounds, beside ours, that vLLM has for the same latency, so that a panel or
an objective that names one of them (`le="0.25"`) finds it."""
BETWEEN_TOKENS_BUCKETS = _with(*(0.025, 0.075, 0.15, 0.3, 0.4, 0.75, 2.5, 7.5, 20.0, 40.0, 80.0))
REQUEST_BUCKETS = _with(
    *(0.3, 0.8, 1.5, 2.5, 15.0, 20.0, 40.0, 50.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
)
RESIDENCY_BUCKETS = _with(20.0, 1200.0)
HTTP_BUCKETS = _with(0.025, 0.075, 0.25, 0.75, 1.5, 2.5, 3.0, 3.5, 4.0, 4.5, 7.5)
"""Likewise, of the HTTP server that vLLM has."""

TOKENS_BUCKETS = (1.0, *(float(2**exponent) for exponent in range(1, 21)))
SMALL_COUNT_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class MetricKind(StrEnum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Unit(StrEnum):
    """What a metric counts; seconds are kept as integer nanoseconds until they are read."""

    SECONDS = "seconds"
    BYTES = "bytes"
    TOKENS = "tokens"
    BLOCKS = "blocks"
    REQUESTS = "requests"
    STEPS = "steps"
    ENTRIES = "entries"
    INFO = "info"
    """Nothing: the value is 1, or 0 for a state that does not hold."""

    def to_base(self, number: int) -> int | float:
        """Convert a number as it is kept to the base unit."""
        return number / 10**9 if self is Unit.SECONDS else number

    def from_base(self, amount: float) -> int:
        """Convert an amount in the base unit to the number that is kept, to the nearest."""
        return round(amount * 10**9) if self is Unit.SECONDS else round(amount)


class AfterDeath(StrEnum):
    """What becomes of a gauge once the core is no more; all other metrics keep their totals."""

    RESET = "reset"
    """A level of what the core held or did: 0, for it holds nothing any more."""
    KEPT = "kept"
    """A fact of the core that was: as it had said last."""
    LIVE = "live"
    """Of the process that is asked, or a time since: measured at each scrape, as before."""


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """What the catalogue says of one metric; `labels` maps each label to its usual values.

    Without usual values a series appears when it is first counted.
    """

    name: str
    kind: MetricKind
    unit: Unit
    help: str
    labels: dict[str, tuple[str, ...]]
    buckets: tuple[float, ...] = ()
    adds_up: bool = True
    """Whether the values of several frontends over one core are added; else the first's counts."""
    after_death: AfterDeath = AfterDeath.KEPT


METRICS: dict[str, MetricInfo] = {}


def declare(
    name: str,
    kind: MetricKind,
    /,
    *,
    unit: Unit,
    help: str,
    buckets: tuple[float, ...] = (),
    adds_up: bool | None = None,
    after_death: AfterDeath | None = None,
    **labels: tuple[str, ...],
) -> MetricInfo:
    """Add a metric to the catalogue; histograms get the buckets of their unit by default.

    Gauges tell of the one core, so those of several frontends are not added up by default; each
    must say what becomes of it once that core is no more.
    """
    if kind is MetricKind.HISTOGRAM and not buckets:
        buckets = SECONDS_BUCKETS if unit is Unit.SECONDS else TOKENS_BUCKETS
    assert (kind is MetricKind.COUNTER) == name.endswith("_total"), name
    adds_up = kind is not MetricKind.GAUGE if adds_up is None else adds_up
    assert (kind is MetricKind.GAUGE) == (after_death is not None), name
    after_death = after_death or AfterDeath.KEPT
    info = MetricInfo(PREFIX + name, kind, unit, help, labels, buckets, adds_up, after_death)
    assert info.name not in METRICS, name
    METRICS[info.name] = info
    return info
