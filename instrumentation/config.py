"""What the user may ask of observability.

Knows the options. Does not know how they are carried out.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """The options of observability; plain values, so that they cross to child processes."""

    trace_dir: str | None = None
    """Folder for the run's journals, made if missing; None writes none."""
    phase_times: bool = True
    """Whether step records carry the times of their phases when no journal is written either
    (the metrics show them)."""
