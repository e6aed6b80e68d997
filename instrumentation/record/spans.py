"""The spans of the live instrument: what takes the time of a phase.

Knows the step's path, where each nanosecond counts, and the fence around a tool's ranges. Does not
know records.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from instrumentation.names import Phase, SinkName
from instrumentation.record.faults import TelemetryErrors
from instrumentation.record.instrument import Span
from instrumentation.record.ranges import Ranges

_GROUP_LIMIT = 3 * 64


class GroupedSpan(Span):
    """A phase of the step: its times go into the group that the step record will take."""

    __slots__ = ("_begin_ns", "_clock", "_group", "_overflow", "_phase")

    def __init__(
        self,
        phase: Phase,
        group: list[int],
        *,
        clock: Callable[[], int],
        overflow: Callable[[list[int]], None],
    ) -> None:
        self._phase = int(phase)
        self._group = group
        self._clock = clock
        self._overflow = overflow
        self._begin_ns = 0

    def __enter__(self) -> None:
        self._begin_ns = self._clock()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        group = self._group
        group += (self._phase, self._begin_ns, self._clock())
        if len(group) > _GROUP_LIMIT:
            self._overflow(group)


class LooseSpan(Span):
    """A phase outside of steps: its times go into the ring, and their sum stays here."""

    __slots__ = ("_begin_ns", "_clock", "append", "phase", "total_ns")

    def __init__(
        self, phase: Phase, append: Callable[[Any], None], *, clock: Callable[[], int]
    ) -> None:
        self.phase = int(phase)
        self.append = append
        self._clock = clock
        self._begin_ns = 0
        self.total_ns = 0

    def __enter__(self) -> None:
        self._begin_ns = self._clock()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end_ns = self._clock()
        self.total_ns += end_ns - self._begin_ns
        self.append((self.phase, self._begin_ns, end_ns))


class FencedRanges:
    """A tool's ranges that may fail: the first failure ends them, and nobody notices."""

    __slots__ = ("_errors", "_ranges", "is_broken")

    def __init__(self, ranges: Ranges, errors: TelemetryErrors) -> None:
        self._ranges = ranges
        self._errors = errors
        self.is_broken = False

    def prepare(self, name: str) -> Any:
        try:
            return None if self.is_broken else self._ranges.prepare(name)
        except Exception as error:
            self._break(error)

    def push(self, handle: Any) -> None:
        if self.is_broken:
            return
        try:
            self._ranges.push(handle)
        except Exception as error:
            self._break(error)

    def pop(self) -> None:
        if self.is_broken:
            return
        try:
            self._ranges.pop()
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        self.is_broken = True
        self._errors.count(SinkName.NVTX, "ranges failed, and are left out from now on: %r", error)


class RangedSpan(Span):
    """A phase that a tool sees too."""

    __slots__ = ("_handle", "_ranges", "_span")

    def __init__(self, span: Span, ranges: FencedRanges, handle: Any) -> None:
        self._span = span
        self._ranges = ranges
        self._handle = handle

    def __enter__(self) -> None:
        self._ranges.push(self._handle)
        self._span.__enter__()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._span.__exit__(error_type, error, traceback)
        self._ranges.pop()
