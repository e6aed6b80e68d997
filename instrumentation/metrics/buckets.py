"""Histogram bounds that a user sets.

Knows how they are written and what is wrong with them.
"""

import json
import math

from instrumentation.metrics.info import METRICS, PREFIX, MetricKind

_LARGEST = 1e15


def parse_buckets(text: str | None) -> dict[str, tuple[float, ...]]:
    """Bounds by full metric name, from JSON: an object from metric name to rising numbers.

    Names go with or without the prefix. The last bucket, +Inf, is always there and is not named.

    Raises:
        ValueError: says what is wrong and what would be right.
    """
    import instrumentation.metrics.frontend  # noqa: F401  (declares every metric)

    if text is None:
        return {}
    try:
        given = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"custom_histogram_buckets is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(
            'custom_histogram_buckets must be an object, as {"request_e2e_seconds": [0.1, 1, 10]}'
        )
    return {_full_name(name): _bounds(name, bounds) for name, bounds in given.items()}


def _full_name(name: str) -> str:
    full = name if name.startswith(PREFIX) else PREFIX + name
    info = METRICS.get(full)
    if info is None or info.kind is not MetricKind.HISTOGRAM:
        known = ", ".join(
            metric.name.removeprefix(PREFIX)
            for metric in METRICS.values()
            if metric.kind is MetricKind.HISTOGRAM
        )
        raise ValueError(
            f"custom_histogram_buckets names {name!r}, which is no histogram; there are: {known}"
        )
    return full


def _bounds(name: str, bounds: object) -> tuple[float, ...]:
    wanted = f"must be a list of numbers up to {_LARGEST:g}, each above the one before it"
    if not isinstance(bounds, list) or not bounds:
        raise ValueError(f"custom_histogram_buckets[{name!r}] {wanted}")
    numbers: list[float] = []
    for bound in bounds:
        is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
        if not is_number or math.isnan(bound) or abs(bound) > _LARGEST:
            raise ValueError(f"custom_histogram_buckets[{name!r}] {wanted}; {bound!r} is not")
        if bound < 0 or (numbers and bound <= numbers[-1]):
            raise ValueError(f"custom_histogram_buckets[{name!r}] {wanted}, none below 0")
        numbers.append(float(bound))
    return tuple(numbers)
