"""What `LLM.get_metrics()` returns: plain values, one object a series.

Knows the shapes, which are those of vLLM's offline metrics reader. Does not know how they are
counted.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


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


class Exemplar(NamedTuple):
    """One observation of a bucket that can be looked up in a trace store."""

    trace_id: str
    span_id: str
    value: float
    """In the metric's base unit."""
    wall_ns: int


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """A distribution: observations up to each bound, cumulative, the last bound `+Inf`."""

    count: int
    sum: int | float
    buckets: dict[str, int]
    exemplars: dict[str, Exemplar] = field(default_factory=dict, compare=False)
    """The last traced observation of a bucket, by the bucket's bound."""
