"""What the engine calls to be seen: the narrow interface, and nothing of what lies behind it.

Metrics and the status line are for the frontend alone, so they are imported when first asked for;
every process imports the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from instrumentation.api import NULL, Instrument, Span
from instrumentation.config import ObservabilityConfig, option
from instrumentation.labels import StepLabel, format_step_label, parse_step_label, step_kind
from instrumentation.names import (
    AdmissionStop,
    Event,
    FlightReason,
    GraphMode,
    Phase,
    PrefixMiss,
    Role,
    SinkName,
    StartupPhase,
    ThreadName,
    WaitingReason,
)
from instrumentation.ranges import Ranges
from instrumentation.records import (
    Admission,
    Preemption,
    RequestArrived,
    RequestTimeline,
    StepRecord,
    WorkerStepRecord,
)

if TYPE_CHECKING:
    from instrumentation.console import ConsoleStatus
    from instrumentation.metric_types import Counter, Gauge, Histogram, Metric
    from instrumentation.metrics import Metrics

_MODULES_WHEN_ASKED_FOR = {
    "ConsoleStatus": "instrumentation.console",
    "Counter": "instrumentation.metric_types",
    "Gauge": "instrumentation.metric_types",
    "Histogram": "instrumentation.metric_types",
    "Metric": "instrumentation.metric_types",
    "Metrics": "instrumentation.metrics",
}

__all__ = [
    "NULL",
    "Admission",
    "AdmissionStop",
    "ConsoleStatus",
    "Counter",
    "Event",
    "FlightReason",
    "Gauge",
    "GraphMode",
    "Histogram",
    "Instrument",
    "Metric",
    "Metrics",
    "ObservabilityConfig",
    "Phase",
    "Preemption",
    "PrefixMiss",
    "Ranges",
    "RequestArrived",
    "RequestTimeline",
    "Role",
    "SinkName",
    "Span",
    "StartupPhase",
    "StepLabel",
    "StepRecord",
    "ThreadName",
    "WaitingReason",
    "WorkerStepRecord",
    "format_step_label",
    "option",
    "parse_step_label",
    "step_kind",
]


def __getattr__(name: str) -> Any:
    module = _MODULES_WHEN_ASKED_FOR.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)
