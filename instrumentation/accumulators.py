"""Counting: families of counters, gauges and histograms as plain numbers.

Knows how to add and how to take a snapshot. Does not know what is counted, nor any exporter. One
thread adds; another may take a snapshot at any time. Counting never raises: a negative amount is
left out and counted as such, and a label value beyond the bound is counted under `other`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate, product

from instrumentation.metric_names import MetricInfo
from instrumentation.metric_types import Counter, Gauge, Histogram

_MAX_SERIES = 64
_OTHER = "other"

LabelValues = tuple[str, ...]


def _initial_keys(info: MetricInfo) -> list[LabelValues]:
    """All usual series, so that each is there, at zero, from the start."""
    return list(product(*info.labels.values()))


class CounterFamily:
    """Totals, one for each combination of label values."""

    __slots__ = ("info", "num_negative", "values")

    def __init__(self, info: MetricInfo) -> None:
        self.info = info
        self.values: dict[LabelValues, int] = dict.fromkeys(_initial_keys(info), 0)
        self.num_negative = 0

    def add(self, amount: int, *label_values: str) -> None:
        """Add an amount, in nanoseconds where the unit is seconds."""
        if amount < 0:
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

    __slots__ = ("counts", "total")

    def __init__(self, num_buckets: int) -> None:
        self.counts = [0] * num_buckets
        self.total = 0


class HistogramFamily:
    """Distributions, one for each combination of label values."""

    __slots__ = ("bounds", "distributions", "info", "num_negative")

    def __init__(self, info: MetricInfo) -> None:
        self.info = info
        self.bounds = [info.unit.from_base(bound) for bound in info.buckets]
        self.distributions = {key: self._empty() for key in _initial_keys(info)}
        self.num_negative = 0

    def _empty(self) -> _Distribution:
        return _Distribution(len(self.bounds) + 1)

    def observe(self, value: int, *label_values: str) -> None:
        """Count one value, in nanoseconds where the unit is seconds."""
        self.observe_many((value,), *label_values)

    def observe_many(self, values: Iterable[int], *label_values: str) -> None:
        """Count several values in one pass."""
        key = _bounded(label_values, self.distributions)
        distribution = self.distributions.get(key)
        if distribution is None:
            distribution = self.distributions[key] = self._empty()
        counts, bounds = distribution.counts, self.bounds
        for value in values:
            if value < 0:
                self.num_negative += 1
                continue
            counts[bisect_left(bounds, value)] += 1
            distribution.total += value

    def snapshot(self, labels: dict[str, str]) -> list[Histogram]:
        """Read all series, in base units, under these further labels."""
        to_base = self.info.unit.to_base
        bound_texts = [repr(bound) for bound in self.info.buckets] + ["+Inf"]
        series = []
        for key, distribution in list(self.distributions.items()):
            cumulative = list(accumulate(distribution.counts))
            series.append(
                Histogram(
                    self.info.name,
                    _labels(self.info, labels, key),
                    count=cumulative[-1],
                    sum=to_base(distribution.total),
                    buckets=dict(zip(bound_texts, cumulative, strict=True)),
                )
            )
        return series


def _bounded(label_values: LabelValues, series: Mapping[LabelValues, object]) -> LabelValues:
    if label_values in series or len(series) < _MAX_SERIES:
        return label_values
    return tuple(_OTHER for _ in label_values)


def _labels(info: MetricInfo, labels: dict[str, str], key: LabelValues) -> dict[str, str]:
    return {**labels, **dict(zip(info.labels, key, strict=True))}
