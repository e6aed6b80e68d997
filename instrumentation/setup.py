"""Choosing the instrument at start-up.

Knows the options and every sink. Engine code does not come here, only the entry points do.
"""

import atexit
import functools

from instrumentation.config import ObservabilityConfig
from instrumentation.names import MAIN_THREAD_OF_ROLE
from instrumentation.profile.nvtx import choose_nvtx
from instrumentation.record.drain import Drain
from instrumentation.record.flight import FlightRecorder, SlowStepWatch, role_is_watched
from instrumentation.record.instrument import NULL, Instrument
from instrumentation.record.live import LEVEL_WITHOUT_PHASES, LiveInstrument
from instrumentation.record.sinks import JournalSink
from instrumentation.record.throttle import Throttle


def setup(
    config: ObservabilityConfig,
    *,
    role: str,
    rank: int = 0,
    title: str = "",
    run_dir: str | None = None,
) -> Instrument:
    """Build the calling process's instrument: `NULL` where nothing is on.

    Role is one of `names.Role`, `rank` tells processes of one role apart, and `title` is what the
    process is called in pictures, if not by its role; `run_dir` is the run's own folder for
    journals, None for no recording yet. Call it in the process's main loop thread, keep the result
    for the life of the process and `close()` it at the end.

    Raises:
        ValueError: the role is unknown, or the run's folder cannot be written to.
    """
    if role not in MAIN_THREAD_OF_ROLE:
        raise ValueError(f"role is {role!r}; it must be one of {sorted(MAIN_THREAD_OF_ROLE)}")
    recorder = None
    if config.flight_recorder_steps:
        recorder = FlightRecorder(
            config.flight_recorder_steps,
            role=role,
            rank=rank,
            title=title,
            folder=config.flight_dir,
        )
    ranges = choose_nvtx(config.nvtx).ranges
    is_needed = run_dir is not None or recorder is not None or ranges is not None
    if config.disable_log_stats and not is_needed:
        return NULL
    make_journal = functools.partial(
        JournalSink,
        role=role,
        rank=rank,
        title=title,
        max_bytes=config.trace_max_bytes,
        ring_s=config.trace_ring_s,
    )
    drain = Drain()
    instrument = LiveInstrument(
        MAIN_THREAD_OF_ROLE[role], drain=drain, recorder=recorder, make_journal=make_journal
    )
    process = instrument.process
    process.ranges = ranges
    instrument.set_ranges(ranges)
    drain.throttle = Throttle(
        config.telemetry_max_share, max_level=LEVEL_WITHOUT_PHASES, apply=process.apply_level
    )
    if run_dir is not None:
        _start_recording(instrument, run_dir)
    if recorder is not None and role_is_watched(role):
        drain.watch(process.dump_if_asked)
        if config.flight_slow_step_s is not None or config.flight_slow_step_factor is not None:
            drain.watch(
                SlowStepWatch(
                    recorder,
                    process.dump_flight,
                    slow_s=config.flight_slow_step_s,
                    factor=config.flight_slow_step_factor,
                )
            )
    # A script that ends without closing its engine still gets its last records.
    atexit.register(instrument.close)
    return instrument


def _start_recording(instrument: Instrument, run_dir: str) -> None:
    try:
        instrument.start_recording(run_dir)
    except OSError as error:
        raise ValueError(
            f"cannot write a recording to {run_dir!r} ({error}); "
            "name a trace_dir that can be written to, or None for no recording"
        ) from error
