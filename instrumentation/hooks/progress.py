"""What one hook knows of a program's progress, for another that looks for stalls.

Knows the probe. Does not know who sets or reads it.
"""

from collections.abc import Callable
from typing import NamedTuple


class Progress(NamedTuple):
    """Whether the program has work to do, and a number that changes as it gets on."""

    is_busy: bool
    num_moves: int


_probes: list[Callable[[], Progress]] = []


def set_probe(probe: Callable[[], Progress]) -> None:
    """Name the function that knows; it is called from another thread and must not block."""
    _probes[:] = [probe]


def read_progress() -> Progress | None:
    """What the probe says, None where nobody knows."""
    return _probes[0]() if _probes else None
