"""Start-up as one trace: `isinglass.startup`, and a child for each phase in caller and core.

Knows the phases' times. Does not know who measured them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.trace import Tracer, set_span_in_context

from instrumentation.otel import attributes as names
from instrumentation.otel.request_spans import wall_offset_ns


class StartupPhaseTimes(NamedTuple):
    """One phase of start-up, and the role of the process that went through it."""

    label: str
    role: str
    begin_ns: int
    end_ns: int


def write_startup(tracer: Tracer, phases: Sequence[StartupPhaseTimes], *, model: str) -> None:
    """Write the whole trace; phases in any order."""
    if not phases:
        return
    offset_ns = wall_offset_ns()
    root = tracer.start_span(
        names.STARTUP_SPAN,
        context=Context(),
        attributes={names.REQUEST_MODEL: model},
        start_time=min(phase.begin_ns for phase in phases) + offset_ns,
    )
    parent = set_span_in_context(root, Context())
    for phase in sorted(phases, key=lambda phase: phase.begin_ns):
        child = tracer.start_span(
            phase.label,
            context=parent,
            attributes={names.PROCESS_ROLE: phase.role},
            start_time=phase.begin_ns + offset_ns,
        )
        child.end(phase.end_ns + offset_ns)
    root.end(max(phase.end_ns for phase in phases) + offset_ns)
