"""Ranges of an outside tool (NVTX, a profiler) around our phases and steps.

Knows the two calls that any such tool has. Does not know the tools.
"""

from typing import Any, Protocol


class Ranges(Protocol):
    """A stack of named ranges of the calling thread."""

    def prepare(self, name: str) -> Any:
        """A handle for a name that is used again and again."""

    def push(self, handle: Any) -> None:
        """Open a range."""

    def pop(self) -> None:
        """Close the range opened last."""
