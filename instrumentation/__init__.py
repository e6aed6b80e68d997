"""What the engine calls to be seen: the narrow interface, and nothing of what lies behind it.

Metrics and the status line are for the frontend alone, so they are imported when first asked for;
every process imports the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from instrumentation.config import ObservabilityConfig, option
from instrumentation.labels import StepLabel, format_step_label, parse_step_label, step_kind
from instrumentation.names import (
    AdmissionStop,
    Event,
    FlightReason,
    GrammarOutcome,
    GraphMode,
    Phase,
    PrefixMiss,
    Role,
    SinkName,
    StartupPhase,
    ThreadName,
    WaitingReason,
)
from instrumentation.record.instrument import NULL, Instrument, Span
from instrumentation.record.ranges import Ranges
from instrumentation.record.request_records import RequestArrived, RequestTimeline
from instrumentation.record.step_records import (
    Admission,
    GrammarTotals,
    Preemption,
    StepRecord,
    WorkerStepRecord,
)
from instrumentation.trace_context import parse_traceparent

if TYPE_CHECKING:
    from instrumentation.explain.console import ConsoleStatus
    from instrumentation.explain.request_report import RequestReport, report_request
    from instrumentation.explain.slo import MissCause, Objective, objectives_of, slo_misses
    from instrumentation.explain.step_history import StepHistory
    from instrumentation.metrics.frontend import Metrics
    from instrumentation.metrics.types import Counter, Gauge, Histogram, Metric
    from instrumentation.profile.files import ProfileError, ProfileState, ProfileStatus
    from instrumentation.profile.layer_ranges import LayerRanges
    from instrumentation.profile.torch_profiler import (
        ProfileOptions,
        TorchProfiler,
        initialize_torch_profiler,
    )

_MODULES_WHEN_ASKED_FOR = {
    "ConsoleStatus": "instrumentation.explain.console",
    "Counter": "instrumentation.metrics.types",
    "Gauge": "instrumentation.metrics.types",
    "Histogram": "instrumentation.metrics.types",
    "Metric": "instrumentation.metrics.types",
    "Metrics": "instrumentation.metrics.frontend",
    "LayerRanges": "instrumentation.profile.layer_ranges",
    "ProfileError": "instrumentation.profile.files",
    "ProfileOptions": "instrumentation.profile.torch_profiler",
    "ProfileState": "instrumentation.profile.files",
    "ProfileStatus": "instrumentation.profile.files",
    "TorchProfiler": "instrumentation.profile.torch_profiler",
    "initialize_torch_profiler": "instrumentation.profile.torch_profiler",
    "MissCause": "instrumentation.explain.slo",
    "Objective": "instrumentation.explain.slo",
    "RequestReport": "instrumentation.explain.request_report",
    "StepHistory": "instrumentation.explain.step_history",
    "report_request": "instrumentation.explain.request_report",
    "objectives_of": "instrumentation.explain.slo",
    "slo_misses": "instrumentation.explain.slo",
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
    "GrammarOutcome",
    "GrammarTotals",
    "GraphMode",
    "Histogram",
    "Instrument",
    "LayerRanges",
    "Metric",
    "Metrics",
    "MissCause",
    "Objective",
    "ObservabilityConfig",
    "Phase",
    "Preemption",
    "PrefixMiss",
    "ProfileError",
    "ProfileOptions",
    "ProfileState",
    "ProfileStatus",
    "Ranges",
    "RequestArrived",
    "RequestReport",
    "RequestTimeline",
    "Role",
    "SinkName",
    "Span",
    "StartupPhase",
    "StepHistory",
    "StepLabel",
    "StepRecord",
    "ThreadName",
    "TorchProfiler",
    "WaitingReason",
    "WorkerStepRecord",
    "format_step_label",
    "initialize_torch_profiler",
    "objectives_of",
    "option",
    "parse_step_label",
    "parse_traceparent",
    "report_request",
    "slo_misses",
    "step_kind",
]


def __getattr__(name: str) -> Any:
    module = _MODULES_WHEN_ASKED_FOR.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)
