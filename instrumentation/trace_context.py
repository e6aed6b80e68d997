"""A trace's identity as one header: W3C Trace Context, https://www.w3.org/TR/trace-context/.

Knows the form. Whatever is not of that form is nobody's trace.
"""

import re
from typing import NamedTuple

_FORM = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1


class TraceContext(NamedTuple):
    """The ids of a trace and of a span in it, in lower-case hexadecimal."""

    trace_id: str
    span_id: str
    is_sampled: bool


def parse_traceparent(traceparent: str | None) -> TraceContext | None:
    """Read a `traceparent` header; None for none, and for one that is not of the form."""
    match = _FORM.fullmatch(traceparent) if traceparent is not None else None
    if match is None:
        return None
    trace_id, span_id, flags, _ = match.groups()
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))
