"""Who this process is and what its clocks say: the first records of every file.

Knows the operating system. Does not know what the file is for.
"""

import os
import platform
import socket
import sys
import time
from importlib import metadata

from instrumentation.record.records import ClockAnchor, ProcessHeader


def read_clock_anchor() -> ClockAnchor:
    """Read the host's clocks as close together as can be."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    before_ns = time.monotonic_ns()
    wall_ns = time.time_ns()
    boottime_ns = time.clock_gettime_ns(boottime) if boottime is not None else before_ns
    after_ns = time.monotonic_ns()
    return ClockAnchor((before_ns + after_ns) // 2, wall_ns, boottime_ns)


def process_header(role: str, rank: int, title: str = "") -> ProcessHeader:
    """Describe this process."""
    try:
        version = metadata.version("isinglass")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return ProcessHeader(
        role=role,
        rank=rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        version=version,
        python_version=platform.python_version(),
        argv=tuple(sys.argv),
        started_ns=time.monotonic_ns(),
        title=title,
    )
