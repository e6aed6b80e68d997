"""Laying slices out on tracks so that none overlaps another in part.

Knows the one rule of a track: two slices on it are apart, or one holds the other. Perfetto closes
slices in stack order, so a partial overlap would show wrong times without any error. Does not know
what slices stand for.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Slice:
    """Something with a begin and an end, to be drawn."""

    name: str
    begin_ns: int
    end_ns: int
    annotations: dict[str, int | str] = field(default_factory=dict)
    flow_ids: list[int] = field(default_factory=list)
    terminating_flow_ids: list[int] = field(default_factory=list)


Lane = list[Slice]


def nest(slices: Iterable[Slice]) -> list[Lane]:
    """Spread slices over as few lanes as a greedy pass needs, each properly nested.

    A lane's slices come out sorted by begin, the outer before the inner. A slice with an end before
    its begin is given no duration.
    """
    lanes: list[Lane] = []
    stacks: list[list[Slice]] = []
    for piece in _in_order(slices):
        for lane, stack in zip(lanes, stacks, strict=True):
            while stack and stack[-1].end_ns <= piece.begin_ns:
                stack.pop()
            if not stack or stack[-1].end_ns >= piece.end_ns:
                lane.append(piece)
                stack.append(piece)
                break
        else:
            lanes.append([piece])
            stacks.append([piece])
    return lanes


def side_by_side(slices: Iterable[Slice]) -> list[Lane]:
    """Spread slices over as few lanes as a greedy pass needs, each without any overlap."""
    lanes: list[Lane] = []
    for piece in _in_order(slices):
        for lane in lanes:
            if lane[-1].end_ns <= piece.begin_ns:
                lane.append(piece)
                break
        else:
            lanes.append([piece])
    return lanes


def edges(lane: Lane) -> Iterator[tuple[int, Slice | None]]:
    """A lane's begins and ends as (time, slice), None for an end, in the order to be written.

    An end comes before a begin of the same instant, so that the two are drawn side by side.
    """
    stack: list[Slice] = []
    for piece in lane:
        while stack and stack[-1].end_ns <= piece.begin_ns:
            yield stack.pop().end_ns, None
        assert not stack or stack[-1].end_ns >= piece.end_ns, "slices overlap in part"
        yield piece.begin_ns, piece
        stack.append(piece)
    while stack:
        yield stack.pop().end_ns, None


def grow_over(slices: Iterable[Slice], inner: Iterable[Slice]) -> None:
    """Widen slices to hold the inner ones that lie across their edges.

    The inner ones must not overlap each other. A step's stamps are taken within its first and last
    phase; so the step's slice is drawn to hold both.
    """
    ordered = sorted(inner, key=lambda piece: piece.begin_ns)
    begins = [piece.begin_ns for piece in ordered]
    for outer in slices:
        for instant in (outer.begin_ns, outer.end_ns):
            index = bisect_right(begins, instant) - 1
            if index >= 0 and begins[index] < instant < ordered[index].end_ns:
                outer.begin_ns = min(outer.begin_ns, ordered[index].begin_ns)
                outer.end_ns = max(outer.end_ns, ordered[index].end_ns)


def _in_order(slices: Iterable[Slice]) -> list[Slice]:
    pieces = list(slices)
    for piece in pieces:
        piece.end_ns = max(piece.begin_ns, piece.end_ns)
    return sorted(pieces, key=lambda piece: (piece.begin_ns, -piece.end_ns))
