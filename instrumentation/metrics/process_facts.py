"""What the operating system says of this process: memory, file descriptors, when it began.

Knows Linux's `/proc`. Elsewhere, what cannot be read is 0.
"""

import contextlib
import os
import resource
import time
from typing import NamedTuple


class ProcessFacts(NamedTuple):
    """As of now."""

    resident_bytes: int = 0
    virtual_bytes: int = 0
    num_descriptors: int = 0
    max_descriptors: int = 0
    """The soft limit; 0: there is none."""


def read_process_facts() -> ProcessFacts:
    """Read all of them."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = ProcessFacts(max_descriptors=0 if soft == resource.RLIM_INFINITY else soft)
    with contextlib.suppress(OSError):
        with open("/proc/self/statm") as file:
            virtual, resident = [int(pages) for pages in file.read().split()[:2]]
        page_size = os.sysconf("SC_PAGE_SIZE")
        facts = facts._replace(
            resident_bytes=resident * page_size,
            virtual_bytes=virtual * page_size,
            num_descriptors=len(os.listdir("/proc/self/fd")) - 1,  # but for the listing's own
        )
    return facts


def read_start_wall_ns() -> int:
    """When this process began, by the wall clock as it is set now."""
    with contextlib.suppress(OSError):
        with open("/proc/self/stat") as file:
            # The program's name, in brackets, may hold anything. The 20th field behind it is when
            # the process began, in ticks since the machine did.
            num_ticks = int(file.read().rpartition(")")[2].split()[19])
        began_ns = num_ticks * 10**9 // os.sysconf("SC_CLK_TCK")
        return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + began_ns
    return 0
