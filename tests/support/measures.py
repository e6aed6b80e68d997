"""Reading `LLM.get_metrics()` by name and label.

Knows the shapes of the series. Does not know what they should hold.
"""

from engine import LLM
from instrumentation.metrics.types import Histogram


def series(llm: LLM, name: str) -> dict[tuple[str, ...], float]:
    """The values of a counter or gauge by their own labels' values (not the engine's)."""
    found = {
        tuple(v for k, v in metric.labels.items() if k not in ("model_name", "engine")): (
            metric.value
        )
        for metric in llm.get_metrics()
        if metric.name == name and not isinstance(metric, Histogram)
    }
    assert found, f"there is no metric {name}"
    return found


def counter(llm: LLM, name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(series(llm, name).values())


def histogram(llm: LLM, name: str) -> tuple[int, float]:
    """Number and sum of a histogram's observations, over its labels."""
    found = [
        metric
        for metric in llm.get_metrics()
        if metric.name == name and isinstance(metric, Histogram)
    ]
    assert found, f"there is no histogram {name}"
    return sum(metric.count for metric in found), sum(metric.sum for metric in found)
