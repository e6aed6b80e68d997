"""Finding stop strings in text that arrives in pieces.

Knows text only: no tokens, no requests. Holds back exactly the text that may turn out to be the
beginning of a stop string, so that nothing of one is ever shown, and keeps nothing else: both cost
and memory depend on the length of the stop strings and of the new text, not of the output.
"""

from typing import NamedTuple


class _Match(NamedTuple):
    start: int
    end: int
    stop: str


class StopStringMatcher:
    """Passes text on until a stop string is complete.

    Args:
        stops: the stop strings, none empty. The one that is complete first counts; of those that
            are complete with the same character, the first in the list.
        include: whether the text ends behind the stop string. If so nothing needs holding back.
    """

    __slots__ = ("_include", "_stops", "_tail")

    def __init__(self, stops: list[str], *, include: bool) -> None:
        assert all(stops), "an empty stop string"
        self._stops = stops
        self._include = include
        # The longest end of the text so far that begins, but does not complete, a stop string.
        self._tail = ""

    def feed(self, text: str, *, may_stop: bool) -> tuple[str, str | None]:
        """Add text; returns what can be shown now and the stop string that it completed.

        Args:
            may_stop: whether a stop string completed by this text counts.
        """
        buffer = self._tail + text
        shown = len(self._tail) if self._include else 0
        match = self._find(buffer) if may_stop else None
        if match is not None:
            self._tail = ""
            return buffer[shown : match.end if self._include else match.start], match.stop
        tail_start = len(buffer) - self._tail_length(buffer)
        self._tail = buffer[tail_start:]
        return buffer[shown : len(buffer) if self._include else tail_start], None

    def flush(self) -> str:
        """The text held back, once it is known that no more follows."""
        held, self._tail = self._tail, ""
        return "" if self._include else held

    def _find(self, buffer: str) -> _Match | None:
        best: _Match | None = None
        for stop in self._stops:
            # It must end in the new text: what ended before was not allowed to count.
            start = buffer.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best.end):
                best = _Match(start, start + len(stop), stop)
        return best

    def _tail_length(self, buffer: str) -> int:
        longest = 0
        for stop in self._stops:
            first = stop[0]
            start = buffer.find(first, max(0, len(buffer) - len(stop) + 1))
            while 0 <= start < len(buffer) - longest:
                if stop.startswith(buffer[start:]):
                    longest = len(buffer) - start
                    break
                start = buffer.find(first, start + 1)
        return longest
