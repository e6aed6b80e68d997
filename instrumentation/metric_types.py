"""What `LLM.get_metrics()` returns: plain values, one object a series.

Knows the shapes, which are those of vLLM's offline metrics reader. Does not know how they are
counted.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A series: a name of the catalogue and its labels."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A total since start-up, in the metric's base unit."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A level, as of the last step."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """A distribution: observations up to each bound, cumulative, the last bound `+Inf`."""

    count: int
    sum: int | float
    buckets: dict[str, int]
