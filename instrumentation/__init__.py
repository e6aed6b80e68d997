"""What the engine calls to be seen: the narrow interface, and nothing of what lies behind it."""

from instrumentation.api import NULL, Instrument, Span
from instrumentation.config import ObservabilityConfig
from instrumentation.console import ConsoleStatus
from instrumentation.labels import StepLabel, format_step_label, parse_step_label, step_kind
from instrumentation.metric_types import Counter, Gauge, Histogram, Metric
from instrumentation.metrics import Metrics
from instrumentation.names import (
    AdmissionStop,
    Event,
    GraphMode,
    Phase,
    Role,
    StartupPhase,
    ThreadName,
    WaitingReason,
)
from instrumentation.records import (
    Preemption,
    RequestArrived,
    RequestTimeline,
    StepRecord,
    WorkerStepRecord,
)

__all__ = [
    "NULL",
    "AdmissionStop",
    "ConsoleStatus",
    "Counter",
    "Event",
    "Gauge",
    "GraphMode",
    "Histogram",
    "Instrument",
    "Metric",
    "Metrics",
    "ObservabilityConfig",
    "Phase",
    "Preemption",
    "RequestArrived",
    "RequestTimeline",
    "Role",
    "Span",
    "StartupPhase",
    "StepLabel",
    "StepRecord",
    "ThreadName",
    "WaitingReason",
    "WorkerStepRecord",
    "format_step_label",
    "parse_step_label",
    "step_kind",
]
