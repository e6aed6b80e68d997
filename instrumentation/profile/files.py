"""What a torch profile leaves behind: its status, and the files of a profile.

Knows names, fields and the clock of the files. Does not know torch.

A profile is recorded in parts, each a Chrome trace that the profiler writes; at the end they become
one Chrome trace, PROFILE.pt.trace.json. Its times are `baseTimeNanoseconds` + `ts` µs of the
profiler's clock, and its key `isinglass` says how they relate to ours.
"""

from enum import StrEnum

import msgspec

TRACE_SUFFIX = ".pt.trace.json"
PARTS_SUFFIX = ".parts"
MANIFEST_NAME = "manifest.json"
ANCHOR_NAME = "isinglass clock anchor"
"""Name of the ranges that tie the profiler's clock to ours; they are not in the final file."""

ITERATION_PREFIX = "ProfilerStep#"
"""Each step is there under this name too, which is torch's own for an iteration."""


class ProfileError(RuntimeError):
    """A profile cannot be started or stopped as things are."""


class ProfileState(StrEnum):
    """How far a profile is."""

    IDLE = "idle"
    """There has been none."""
    RUNNING = "running"
    EXPORTING = "exporting"
    """It has ended; its file is being written while steps go on."""
    DONE = "done"
    FAILED = "failed"


class ProfileStatus(msgspec.Struct, kw_only=True, frozen=True):
    """The last profile of one worker."""

    state: ProfileState = ProfileState.IDLE
    rank: int = 0
    pid: int = 0
    file: str | None = None
    """The Chrome trace, whole once the state is done."""
    num_steps: int = 0
    num_bytes: int = 0
    """Size of what has been written so far."""
    end_reason: str = ""
    """stop, max_steps, max_bytes, error or shutdown."""
    error: str = ""
    longest_pause_ns: int = 0
    """The longest time that the worker's steps waited for the profiler."""
    clock_error_ns: int = 0
    """The profiler's times are ours but for at most so much; known when done."""


class ProfilePart(msgspec.Struct, kw_only=True):
    """One part of a profile: a file, and the readings of our clock around its anchors."""

    file: str
    anchors: list[tuple[int, int]]
    """CLOCK_MONOTONIC just before and just after each anchor, in order."""
    num_steps: int


class ProfileManifest(msgspec.Struct, kw_only=True):
    """What the parts are, and what is to become of them."""

    output: str
    host: str
    pid: int
    thread_id: int
    """Operating-system id of the thread that ran the steps."""
    rank: int
    world_size: int
    backend: str
    parts: list[ProfilePart]
    begin_ns: int
    end_ns: int


class ProfileClock(msgspec.Struct, kw_only=True):
    """The key `isinglass` of the final file."""

    host: str
    pid: int
    thread_id: int
    rank: int
    num_steps: int
    monotonic_offset_ns: int
    """CLOCK_MONOTONIC = baseTimeNanoseconds + 1000 * ts + this."""
    clock_error_ns: int
    """By how much a time so converted may be off, at most."""
    parts: list[ProfilePart]
