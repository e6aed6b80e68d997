"""What shows of a run in a window of time: where instants lie, and which requests are picked.

Knows the picture's plot, from left to right. Does not know how anything is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

from instrumentation.record.request_records import RequestTimeline
from traces.lanes import Slice
from traces.request_slices import DECODE, PREFILL, QUEUED, request_slices

LEFT, RIGHT = 112, 984
"""The plot's edges in pixels."""
MAX_REQUESTS = 8
_MIN_CALLED_OUT = 3
_CALLOUT_WIDTH = 150
CALLOUTS = {
    QUEUED: ("queue", "waits for its first step"),
    PREFILL: ("prefill", "its prompt is computed"),
    DECODE: ("decode", "one token a step"),
}
"""The slices of one request that are named on the picture: their names there, and an aside."""


@dataclass(frozen=True, slots=True)
class Window:
    """The time that is shown; `zero_ns` is where its scale begins."""

    zero_ns: int
    begin_ns: int
    end_ns: int

    def x(self, time_ns: float) -> float:
        """Where an instant lies, at an edge if it is outside."""
        inside_ns = min(max(time_ns, self.begin_ns), self.end_ns)
        share = (inside_ns - self.begin_ns) / (self.end_ns - self.begin_ns)
        return LEFT + share * (RIGHT - LEFT)

    def holds(self, begin_ns: int, end_ns: int) -> bool:
        """Whether any of it shows."""
        return begin_ns < self.end_ns and end_ns > self.begin_ns

    def shown_width(self, piece: Slice) -> float:
        """How wide what shows of a slice is."""
        return self.x(piece.end_ns) - self.x(piece.begin_ns)

    def callout_x(self, piece: Slice) -> float:
        """Where an arrow to a slice points: to its middle, or before it where the page ends too
        soon behind that for what is written at its other end."""
        middle_x = self.x((max(piece.begin_ns, self.begin_ns) + min(piece.end_ns, self.end_ns)) / 2)
        return min(middle_x, RIGHT - _CALLOUT_WIDTH)

    def seconds(self, time_ns: int) -> float:
        """An instant on the scale."""
        return (time_ns - self.zero_ns) * 1e-9


def ticks(window: Window) -> list[int]:
    """Round instants on the window's scale, six to fifteen of them."""
    length_ns = window.end_ns - window.begin_ns
    magnitude = 10 ** floor(log10(length_ns / 6))
    step_ns = max(
        1, round(next((f for f in (5, 2) if f * magnitude <= length_ns / 6), 1) * magnitude)
    )
    first = -((window.zero_ns - window.begin_ns) // step_ns)
    instants = []
    time_ns = window.zero_ns + first * step_ns
    while time_ns <= window.end_ns:
        if time_ns >= window.begin_ns:
            instants.append(time_ns)
        time_ns += step_ns
    return instants


def pick(timelines: Sequence[RequestTimeline], window: Window) -> tuple[list[RequestTimeline], int]:
    """A few of the requests that show, by arrival: first of all those that end in the window.

    Returns:
        Them, and how many others show.
    """
    showing = [
        one
        for one in timelines
        if window.holds(one.arrival_ns, max(one.end_ns, one.delivered_ns, one.arrival_ns + 1))
    ]
    ending_first = sorted(showing, key=lambda one: (one.end_ns > window.end_ns, one.arrival_ns))
    picked = sorted(ending_first[:MAX_REQUESTS], key=lambda one: (one.arrival_ns, one.request_num))
    return picked, len(showing) - len(picked)


def pick_called_out(timelines: Sequence[RequestTimeline], window: Window) -> RequestTimeline | None:
    """The lowest request on the page whose queue, prefill and decode all show, or none."""
    for timeline in reversed(timelines):
        shown = {
            piece.name
            for piece in request_slices(timeline)
            if window.holds(piece.begin_ns, piece.end_ns)
            and window.shown_width(piece) >= _MIN_CALLED_OUT
            and window.callout_x(piece) > window.x(piece.begin_ns)
        }
        if shown >= CALLOUTS.keys():
            return timeline
    return None
