"""Counting: families of counters, gauges and histograms as plain numbers.

Knows how to add and how to take a snapshot. Does not know what is counted, nor any exporter. One
thread adds; another may take a snapshot at any time. Counting never raises: an amount that is
negative or no number is left out and counted as such, and a label value beyond the bound is
counted under `other`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from decimal import Decimal
from itertools import accumulate, product
from typing import Any

from instrumentation.metrics.info import METRICS, MetricInfo
from instrumentation.metrics.types import Counter, Exemplar, Gauge, Histogram, Metric

_MAX_SERIES = 128
_OTHER = "other"

LabelValues = tuple[str, ...]


def _initial_keys(info: MetricInfo) -> list[LabelValues]:
    """All usual series, so that each is there, at zero, from the start."""
    return list(product(*info.labels.values()))


def bound_text(bound: float) -> str:
    """A bucket's bound as Prometheus writes it, which queries name: 0.25, 1.0, 1e+06."""
    if bound < 1e6:
        return repr(bound)
    digits, exponent = f"{Decimal(repr(bound)).normalize():e}".split("e+")
    return f"{digits}e+{int(exponent):02}"


class CounterFamily:
    """Totals, one for each combination of label values."""

    __slots__ = ("info", "num_negative", "values")

    def __init__(self, info: MetricInfo) -> None:
        self.info = info
        self.values: dict[LabelValues, int] = dict.fromkeys(_initial_keys(info), 0)
        self.num_negative = 0

    def add(self, amount: int, *label_values: str) -> None:
        """Add an amount, in nanoseconds where the unit is seconds."""
        if not amount >= 0:
            self.num_negative += 1
            return
        key = _bounded(label_values, self.values)
        self.values[key] = self.values.get(key, 0) + amount

    def raise_to(self, total: int, *label_values: str) -> None:
        """Take over a total kept elsewhere; one lower than before changes nothing."""
        key = _bounded(label_values, self.values)
        self.values[key] = max(total, self.values.get(key, 0))

    def snapshot(self, labels: dict[str, str]) -> list[Counter]:
        """Read all series, in base units, under these further labels."""
        to_base = self.info.unit.to_base
        return [
            Counter(self.info.name, _labels(self.info, labels, key), to_base(value))
            for key, value in list(self.values.items())
        ]


class GaugeFamily:
    """Levels, one for each combination of label values."""

    __slots__ = ("info", "values")

    def __init__(self, info: MetricInfo) -> None:
        self.info = info
        self.values: dict[LabelValues, int] = dict.fromkeys(_initial_keys(info), 0)

    def set(self, value: int, *label_values: str) -> None:
        """Set the level."""
        self.values[_bounded(label_values, self.values)] = value

    def snapshot(self, labels: dict[str, str]) -> list[Gauge]:
        """Read all series, in base units, under these further labels."""
        to_base = self.info.unit.to_base
        return [
            Gauge(self.info.name, _labels(self.info, labels, key), to_base(value))
            for key, value in list(self.values.items())
        ]


class _Distribution:
    """Observations in buckets; the last bucket holds those above every bound."""

    __slots__ = ("counts", "exemplars", "total")

    def __init__(self, num_buckets: int) -> None:
        self.counts = [0] * num_buckets
        self.exemplars: dict[int, Exemplar] = {}
        self.total = 0


class HistogramFamily:
    """Distributions, one for each combination of label values."""

    __slots__ = ("bounds", "buckets", "distributions", "info", "num_negative")

    def __init__(self, info: MetricInfo, buckets: tuple[float, ...] = ()) -> None:
        self.info = info
        self.buckets = buckets or info.buckets
        self.bounds = [info.unit.from_base(bound) for bound in self.buckets]
        self.distributions = {key: self._empty() for key in _initial_keys(info)}
        self.num_negative = 0

    def _empty(self) -> _Distribution:
        return _Distribution(len(self.bounds) + 1)

    def observe(self, value: int, *label_values: str, exemplar: Exemplar | None = None) -> None:
        """Count one value, in nanoseconds where the unit is seconds."""
        if not value >= 0:
            self.num_negative += 1
            return
        distribution = self._distribution(label_values)
        bucket = bisect_left(self.bounds, value)
        distribution.counts[bucket] += 1
        distribution.total += value
        if exemplar is not None:
            distribution.exemplars[bucket] = exemplar

    def observe_many(self, values: Iterable[int], *label_values: str) -> None:
        """Count several values in one pass."""
        distribution = self._distribution(label_values)
        counts, bounds = distribution.counts, self.bounds
        for value in values:
            if not value >= 0:
                self.num_negative += 1
                continue
            counts[bisect_left(bounds, value)] += 1
            distribution.total += value

    def snapshot(self, labels: dict[str, str]) -> list[Histogram]:
        """Read all series, in base units, under these further labels."""
        to_base = self.info.unit.to_base
        bound_texts = [*map(bound_text, self.buckets), "+Inf"]
        series = []
        for key, distribution in list(self.distributions.items()):
            cumulative = list(accumulate(distribution.counts))
            exemplars = dict(distribution.exemplars)
            series.append(
                Histogram(
                    self.info.name,
                    _labels(self.info, labels, key),
                    count=cumulative[-1],
                    sum=to_base(distribution.total),
                    buckets=dict(zip(bound_texts, cumulative, strict=True)),
                    exemplars={bound_texts[bucket]: one for bucket, one in exemplars.items()},
                )
            )
        return series

    def _distribution(self, label_values: LabelValues) -> _Distribution:
        key = _bounded(label_values, self.distributions)
        distribution = self.distributions.get(key)
        if distribution is None:
            distribution = self.distributions[key] = self._empty()
        return distribution


class Families:
    """The families of one engine, by metric; each is made once, by whoever counts it.

    `buckets` replaces the bounds of histograms by their names (see `parse_buckets`).
    """

    def __init__(self, buckets: Mapping[str, tuple[float, ...]] | None = None) -> None:
        self._buckets = dict(buckets or {})
        self._families: dict[str, CounterFamily | GaugeFamily | HistogramFamily] = {}

    def counter(self, info: MetricInfo) -> CounterFamily:
        """Make the family of a counter."""
        return self._keep(CounterFamily(info))

    def gauge(self, info: MetricInfo) -> GaugeFamily:
        """Make the family of a gauge."""
        return self._keep(GaugeFamily(info))

    def histogram(self, info: MetricInfo) -> HistogramFamily:
        """Make the family of a histogram."""
        return self._keep(HistogramFamily(info, self._buckets.get(info.name, ())))

    def snapshot(self, labels: dict[str, str]) -> list[Metric]:
        """Read every series, also those still at zero, in the catalogue's order."""
        families = self._families
        return [s for name in METRICS if name in families for s in families[name].snapshot(labels)]

    @property
    def num_negative(self) -> int:
        """Amounts that were left out."""
        return sum(
            family.num_negative
            for family in self._families.values()
            if not isinstance(family, GaugeFamily)
        )

    def _keep(self, family: Any) -> Any:
        assert family.info.name not in self._families, f"{family.info.name} is counted twice"
        self._families[family.info.name] = family
        return family


def _bounded(label_values: LabelValues, series: Mapping[LabelValues, object]) -> LabelValues:
    if label_values in series or len(series) < _MAX_SERIES:
        return label_values
    return tuple(_OTHER for _ in label_values)


def _labels(info: MetricInfo, labels: dict[str, str], key: LabelValues) -> dict[str, str]:
    return {**labels, **dict(zip(info.labels, key, strict=True))}
