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


def setup(
    config: ObservabilityConfig, *, role: str, rank: int = 0, run_dir: str | None = None
) -> Instrument:
    """Build the calling process's instrument: `NULL` where nothing is on.

    Role is one of `names.Role`; `run_dir` is the run's own folder for journals, None for no
    recording yet. Call it in the process's main loop thread, keep the result for the
    life of the process and `close()` it at the end.

    Raises:
        ValueError: the role is unknown, or the run's folder cannot be written to.
    """
    if role not in MAIN_THREAD_OF_ROLE:
        raise ValueError(f"role is {role!r}; it must be one of {sorted(MAIN_THREAD_OF_ROLE)}")
    thread_name = MAIN_THREAD_OF_ROLE[role]
    if run_dir is not None:
        try:
            sink = JournalSink(run_dir, role=role, rank=rank)
        except OSError as error:
            raise ValueError(
                f"cannot write a recording to {run_dir!r} ({error}); "
                "name a trace_dir that can be written to, or None for no recording"
            ) from error
        instrument = LiveInstrument(thread_name, drain=Drain([sink]))
        # A script that ends without closing its engine still gets its last records.
        atexit.register(instrument.close)
        return instrument
    if not config.disable_log_stats:
        return LiveInstrument(thread_name)
    return NULL
