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
from instrumentation.ranges import Ranges
from instrumentation.request_records import RequestArrived, RequestTimeline
from instrumentation.step_records import (
    Admission,
    GrammarTotals,
    Preemption,
    StepRecord,
    WorkerStepRecord,
)
from instrumentation.trace_context import parse_traceparent

if TYPE_CHECKING:
    from instrumentation.console import ConsoleStatus
    from instrumentation.layer_ranges import LayerRanges
    from instrumentation.metric_types import Counter, Gauge, Histogram, Metric
    from instrumentation.metrics import Metrics
    from instrumentation.profile_files import ProfileError, ProfileState, ProfileStatus
    from instrumentation.request_report import RequestReport, report_request
    from instrumentation.slo import MissCause, Objective, objectives_of, slo_misses
    from instrumentation.step_history import StepHistory
    from instrumentation.torch_profiler import (
        ProfileOptions,
        TorchProfiler,
        initialize_torch_profiler,
    )

_MODULES_WHEN_ASKED_FOR = {
    "ConsoleStatus": "instrumentation.console",
    "Counter": "instrumentation.metric_types",
    "Gauge": "instrumentation.metric_types",
    "Histogram": "instrumentation.metric_types",
    "Metric": "instrumentation.metric_types",
    "Metrics": "instrumentation.metrics",
    "LayerRanges": "instrumentation.layer_ranges",
    "ProfileError": "instrumentation.profile_files",
    "ProfileOptions": "instrumentation.torch_profiler",
    "ProfileState": "instrumentation.profile_files",
    "ProfileStatus": "instrumentation.profile_files",
    "TorchProfiler": "instrumentation.torch_profiler",
    "initialize_torch_profiler": "instrumentation.torch_profiler",
    "MissCause": "instrumentation.slo",
    "Objective": "instrumentation.slo",
    "RequestReport": "instrumentation.request_report",
    "StepHistory": "instrumentation.step_history",
    "report_request": "instrumentation.request_report",
    "objectives_of": "instrumentation.slo",
    "slo_misses": "instrumentation.slo",
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
