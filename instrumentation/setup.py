"""Choosing the instrument at start-up.

Knows the options and every sink. Engine code does not come here, only the entry points do.
"""

import atexit

from instrumentation.api import NULL, Instrument
from instrumentation.config import ObservabilityConfig
from instrumentation.drain import Drain
from instrumentation.live import LiveInstrument
from instrumentation.names import MAIN_THREAD_OF_ROLE
from instrumentation.sinks import JournalSink


def setup(config: ObservabilityConfig, *, role: str, rank: int = 0) -> Instrument:
    """Build the calling process's instrument: `NULL` where nothing is on.

    Role is one of `names.Role`. Call it in the process's main loop thread, keep the result for the
    life of the process and `close()` it at the end.

    Raises:
        ValueError: the role is unknown, or the trace folder cannot be written to.
    """
    if role not in MAIN_THREAD_OF_ROLE:
        raise ValueError(f"role is {role!r}; it must be one of {sorted(MAIN_THREAD_OF_ROLE)}")
    thread_name = MAIN_THREAD_OF_ROLE[role]
    if config.trace_dir is not None:
        try:
            sink = JournalSink(config.trace_dir, role=role, rank=rank)
        except OSError as error:
            raise ValueError(
                f"cannot write traces to trace_dir {config.trace_dir!r} ({error}); "
                "name a folder that can be written to, or None for no trace"
            ) from error
        instrument = LiveInstrument(thread_name, drain=Drain([sink]))
        # A script that ends without closing its engine still gets its last records.
        atexit.register(instrument.close)
        return instrument
    if config.phase_times:
        return LiveInstrument(thread_name)
    return NULL
