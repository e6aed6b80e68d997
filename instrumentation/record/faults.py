"""What went wrong in telemetry itself: errors by sink.

Knows how to count and to say it once. Does not know the sinks. Any thread may count.
"""

import logging
import threading

from instrumentation.names import SinkName

_LOGGER = logging.getLogger("isinglass.telemetry")


class TelemetryErrors:
    """Failures since start-up, one total for each sink.

    Attributes:
        flat: pairs as in `StepRecord.telemetry_errors`; a new tuple whenever something failed, so
            that a step takes it along for the price of one reference.
    """

    __slots__ = ("_counts", "_lock", "flat")

    def __init__(self) -> None:
        self._counts = [0] * len(SinkName)
        self._lock = threading.Lock()
        self.flat: tuple[int, ...] = ()

    def count(self, sink: SinkName, message: str, *arguments: object) -> None:
        """Count one failure; the first of each sink is logged, the rest would flood the log."""
        with self._lock:
            is_first = not self._counts[sink]
            self._counts[sink] += 1
            self.flat = tuple(
                number
                for index, count in enumerate(self._counts)
                if count
                for number in (index, count)
            )
        if is_first:
            _LOGGER.error(message, *arguments)

    def by_label(self) -> dict[str, int]:
        """The totals above zero, by `SinkName.label`."""
        flat = self.flat
        return {
            SinkName(index).label: count for index, count in zip(flat[::2], flat[1::2], strict=True)
        }
