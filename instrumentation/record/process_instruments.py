"""What the instruments of one process share: drain, flight recorder, journal, throttle.

Knows which of them there are. Does not know spans or the calls of the engine.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from instrumentation.names import Event, FlightReason, SinkName
from instrumentation.record.drain import Drain
from instrumentation.record.faults import TelemetryErrors
from instrumentation.record.flight import FlightRecorder
from instrumentation.record.ranges import Ranges
from instrumentation.record.records import EventRecord
from instrumentation.record.sinks import JournalSink
from instrumentation.record.spans import LooseSpan

_LOGGER = logging.getLogger("isinglass.telemetry")

JournalFactory = Callable[[str], JournalSink]
"""From a run's folder to a journal in it; raises OSError where it cannot be written."""


class Rewirable(Protocol):
    """The instrument of one thread."""

    def rewire(self) -> None:
        """Leave entries where they are wanted now."""


InstrumentT = TypeVar("InstrumentT", bound=Rewirable)


class ProcessInstruments(Generic[InstrumentT]):
    """What the instruments of a process share."""

    def __init__(
        self,
        drain: Drain | None,
        clock: Callable[[], int],
        *,
        recorder: FlightRecorder | None,
        make_journal: JournalFactory | None,
    ) -> None:
        self.pid = os.getpid()
        self.drain = drain
        self.clock = clock
        self.recorder = recorder
        self.make_journal = make_journal
        self.journal: JournalSink | None = None
        self.early_end = ""
        self.errors = drain.errors if drain is not None else TelemetryErrors()
        self.instruments: list[InstrumentT] = []
        self.io_spans: list[LooseSpan] = []
        self.flight_wanted: FlightReason | None = None
        self.ranges: Ranges | None = None
        """Those that each thread begins with."""
        self.level = 0
        self.lock = threading.RLock()
        if drain is not None:
            drain.on_change = self.rewire

    def rewire(self) -> None:
        """Let every thread leave its entries where they are wanted now."""
        with self.lock:
            for instrument in self.instruments:
                instrument.rewire()

    def apply_level(self, level: int, share: float) -> None:
        """Record less, or more again: called by the throttle, on the drain thread."""
        self.level = level
        self.rewire()
        what = ("everything", "all but phases outside of steps", "no phases")[level]
        detail = f"recording took {share:.1%} of a processor; now records {what}"
        _LOGGER.warning("%s (telemetry_max_share)", detail)
        self.tell(EventRecord(Event.TELEMETRY_THROTTLED, self.clock(), value=level, detail=detail))

    def tell(self, event: EventRecord) -> None:
        """Keep an event of telemetry's own; any thread may call."""
        if self.recorder is not None:
            self.recorder.events.append(event)
        if self.drain is not None:
            self.drain.announce(event)

    def dump_flight(self, reason: FlightReason, detail: str = "", step: int = -1) -> str | None:
        """Write a flight record behind the fence."""
        if self.recorder is None:
            return None
        try:
            path = str(self.recorder.dump(reason, detail, step=step))
        except Exception as error:
            self.errors.count(
                SinkName.FLIGHT_RECORDER, "a flight record cannot be written: %r", error
            )
            return None
        self.tell(EventRecord(Event.FLIGHT_RECORD, self.clock(), detail=path))
        _LOGGER.warning("flight record (%s): isinglass flight show %s", reason.label, path)
        return path

    def dump_if_asked(self) -> None:
        """Write the flight record that a signal has asked for."""
        reason = self.flight_wanted
        if reason is not None:
            # Only now: a signal that comes between reading and clearing must not be lost.
            self.flight_wanted = None
            self.dump_flight(reason, "asked for")
