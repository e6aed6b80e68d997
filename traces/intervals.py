"""Arithmetic on sets of intervals.

Knows half-open intervals of integers. Does not know what they stand for.
"""

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint ones in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def overlap(left: Sequence[Interval], right: Sequence[Interval]) -> int:
    """The length that two unions of intervals, as of `merge`, have in common."""
    total = left_index = right_index = 0
    while left_index < len(left) and right_index < len(right):
        begin = max(left[left_index][0], right[right_index][0])
        end = min(left[left_index][1], right[right_index][1])
        total += max(0, end - begin)
        if left[left_index][1] < right[right_index][1]:
            left_index += 1
        else:
            right_index += 1
    return total


def length(intervals: Iterable[Interval]) -> int:
    """The sum of the intervals' lengths."""
    return sum(end - begin for begin, end in intervals)
