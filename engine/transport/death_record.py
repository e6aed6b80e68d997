"""Where a dead core's last steps are: in a file of its own, else in one from our copy of them.

Knows flight records; knows no process.
"""

import threading

from engine.types.messages import EngineCoreFailure
from instrumentation import FlightReason, Instrument


class DeathRecord:
    """A flight record that is written once, whoever asks first, from whatever thread.

    Args:
        obs: this process's instrument, which has kept the core's records.
    """

    def __init__(self, obs: Instrument) -> None:
        self._obs = obs
        self._lock = threading.Lock()
        self._path: str | None = None

    def where(self, failure: EngineCoreFailure | None, how: str) -> str:
        """A sentence that says how to read it, with a space in front; empty if there is none.

        Args:
            failure: what the core has said of its end, if anything.
            how: its end in words, for the record.
        """
        with self._lock:
            if self._path is None:
                by_core = "" if failure is None else failure.flight_record
                ours = None if by_core else self._obs.dump_flight(FlightReason.ENGINE_DEAD, how)
                self._path = by_core or ours or ""
        return f" Its last steps: isinglass flight show {self._path}" if self._path else ""
