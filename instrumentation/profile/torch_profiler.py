"""The torch profiler on a running engine: bounded, in parts, written out while steps go on.

Knows torch's profiler (imported when a profile begins) and the thread that runs the steps. Does not
know the engine. What the profiler cannot do without holding every thread up, it does in small
pieces between steps: it is stopped and started again every few steps, so that each pause is short;
each part is saved by another thread; and another process makes one file of the parts.
"""

import functools
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from instrumentation.names import ThreadName
from instrumentation.profile.files import (
    ANCHOR_NAME,
    ProfileError,
    ProfileManifest,
    ProfileState,
    ProfileStatus,
)
from instrumentation.profile.writer import ProfileWriter, UnsavedPart, new_profile_files
from instrumentation.record.instrument import Instrument
from instrumentation.record.live import LiveInstrument
from instrumentation.record.ranges import Ranges

_TARGET_PAUSE_NS = 25_000_000
_MAX_STEPS_OF_A_PART = 64
_ANCHORS_OF_AN_END = 5


class ProfileOptions(msgspec.Struct, kw_only=True, frozen=True):
    """What is recorded, how much of it, and where it goes."""

    folder: str
    max_steps: int
    max_bytes: int
    with_stack: bool = False
    record_shapes: bool = False


@functools.cache
def initialize_torch_profiler() -> None:
    """Set torch's profiler up once, in the thread that has imported torch: about a millisecond.

    Set up by the first profile, in another thread, it works as well but complains.
    """
    from torch.autograd.profiler import profile

    _quieten()
    if not _is_profiling():
        with profile():
            pass


def _quieten() -> None:
    """Keep two lines a part off standard error, unless the user wants the profiler's log."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def _is_profiling() -> bool:
    """Whether anybody in this process is; torch has room for one, and may crash with two."""
    from torch.autograd import profiler

    return profiler._is_profiler_enabled


class TorchRanges:
    """Our steps and phases as ranges of the torch profiler, in the thread that pushes them."""

    def __init__(self) -> None:
        from torch.autograd.profiler import record_function

        self._record_function = record_function
        self._open: list[Any] = []

    def prepare(self, name: str) -> str:
        """The name itself."""
        return name

    def push(self, handle: str) -> None:
        """Open a range."""
        entered = self._record_function(handle)
        entered.__enter__()
        self._open.append(entered)

    def pop(self) -> None:
        """Close the range opened last."""
        self._open.pop().__exit__(None, None, None)


class _BothRanges:
    """Ranges of two tools at once."""

    def __init__(self, outer: Ranges, inner: Ranges) -> None:
        self._outer = outer
        self._inner = inner

    def prepare(self, name: str) -> tuple[Any, Any]:
        return self._outer.prepare(name), self._inner.prepare(name)

    def push(self, handle: tuple[Any, Any]) -> None:
        self._outer.push(handle[0])
        self._inner.push(handle[1])

    def pop(self) -> None:
        self._inner.pop()
        self._outer.pop()


class TorchProfiler:
    """Profiles of one worker, one at a time.

    Every method but `status` belongs to the thread that runs the steps, between steps.

    Args:
        obs: that thread's instrument; its steps and phases are ranges of the profile too.
        backend: `device type` or communication library, for readers of distributed profiles.
    """

    def __init__(self, obs: Instrument, *, rank: int, world_size: int, backend: str) -> None:
        # One that records nothing would have no ranges either.
        self.obs = obs if obs.enabled else LiveInstrument(ThreadName.WORKER)
        self._rank = rank
        self._world_size = world_size
        self._backend = backend
        self._device = backend if backend != "cpu" else None
        self._ranges_before: Ranges | None = None
        self._part: Any = None
        self._is_running = False
        self._writer: ProfileWriter | None = None
        self._end_reason = ""
        self._file: str | None = None
        self._num_steps = self._longest_pause_ns = 0

    @property
    def is_running(self) -> bool:
        """Whether steps are being profiled."""
        return self._is_running

    def start(self, options: ProfileOptions) -> None:
        """Profile from the next step on.

        Raises:
            ProfileError: a profile is running in this process, the folder cannot be written to, or
                torch's profiler does not start.
        """
        if self._is_running:
            raise ProfileError(f"a profile is running already ({self._file}); stop it first")
        if _is_profiling():
            raise ProfileError(
                "another torch profile is running in this process, of this or another engine or of "
                "your own; torch can have only one"
            )
        output, parts = new_profile_files(
            Path(options.folder), f"rank{self._rank}.pid{os.getpid()}"
        )
        _quieten()
        self._options = options
        self._file = str(output)
        manifest = ProfileManifest(
            output=self._file,
            host=socket.gethostname(),
            pid=os.getpid(),
            thread_id=threading.get_native_id(),
            rank=self._rank,
            world_size=self._world_size,
            backend=self._backend,
            parts=[],
            begin_ns=time.monotonic_ns(),
            end_ns=0,
        )
        self._num_steps = self._longest_pause_ns = 0
        self._end_reason = ""
        self._steps_of_a_part = 1
        self._ranges = TorchRanges()
        try:
            self._begin_part()
        except Exception as error:
            parts.rmdir()
            raise ProfileError(f"torch's profiler does not start: {error}") from error
        self._writer = ProfileWriter(manifest, parts, obs=self.obs)
        before = self._ranges_before = self.obs.ranges
        self.obs.set_ranges(self._ranges if before is None else _BothRanges(before, self._ranges))
        self._is_running = True

    def step(self) -> None:
        """Count a step that has just ended, and end the profile at its limits."""
        if not self._is_running:
            return
        self._num_steps += 1
        self._num_steps_of_part += 1
        try:
            self._end_or_go_on()
        except Exception as error:  # the profiler's trouble must not become the step's
            self._fail(error)

    def _end_or_go_on(self) -> None:
        assert self._writer is not None
        if self._writer.error:
            self._end("error")
        elif self._num_steps >= self._options.max_steps:
            self._end("max_steps")
        elif self._writer.estimate_bytes(self._num_steps + 1) > self._options.max_bytes:
            self._end("max_bytes")
        elif self._num_steps_of_part >= self._steps_of_a_part:
            began_ns = time.monotonic_ns()
            self._end_part()
            self._begin_part()
            self._adapt(time.monotonic_ns() - began_ns)

    def stop(self) -> None:
        """End the profile; what is left to write is written while steps go on.

        Raises:
            ProfileError: no profile is running, or torch's profiler failed at the end.
        """
        if not self._is_running:
            raise ProfileError(f"no profile is running ({self._why_not_running()}); start one")
        try:
            self._end("stop")
        except Exception as error:
            self._fail(error)
            raise ProfileError(f"torch's profiler failed at the end: {error}") from error

    def status(self) -> ProfileStatus:
        """How far the last profile is; callable from any thread."""
        writer = self._writer
        if writer is None:
            return ProfileStatus(rank=self._rank, pid=os.getpid())
        if self._is_running:
            state = ProfileState.RUNNING
        elif writer.error:
            state = ProfileState.FAILED
        else:
            state = ProfileState.DONE if writer.is_done else ProfileState.EXPORTING
        return ProfileStatus(
            state=state,
            rank=self._rank,
            pid=os.getpid(),
            file=self._file,
            num_steps=self._num_steps,
            num_bytes=writer.num_bytes,
            end_reason=self._end_reason,
            error=writer.error,
            longest_pause_ns=self._longest_pause_ns,
            clock_error_ns=writer.clock_error_ns,
        )

    def close(self, timeout_s: float) -> bool:
        """End a running profile and wait for its file; False on time-out."""
        if self._is_running:
            try:
                self._end("shutdown")
            except Exception as error:
                self._fail(error)
        if self._writer is None:
            return True
        self._writer.thread.join(timeout_s)
        return not self._writer.thread.is_alive()

    def _why_not_running(self) -> str:
        if self._writer is None:
            return "there has been none"
        return f"the last ended by {self._end_reason} after {self._num_steps} steps"

    def _end(self, reason: str) -> None:
        assert self._writer is not None
        self._is_running = False
        self._end_reason = reason
        self.obs.set_ranges(self._ranges_before)
        began_ns = time.monotonic_ns()
        self._end_part()
        self._writer.put(None)
        self._longest_pause_ns = max(self._longest_pause_ns, time.monotonic_ns() - began_ns)

    def _fail(self, error: Exception) -> None:
        assert self._writer is not None
        self._is_running = False
        self._end_reason = "error"
        self.obs.set_ranges(self._ranges_before)
        self._writer.fail(error)
        self._writer.put(None)  # the parts before are still good

    def _begin_part(self) -> None:
        from torch.autograd.profiler import profile

        self._part = profile(
            use_kineto=True,
            use_device=self._device,
            record_shapes=self._options.record_shapes,
            with_stack=self._options.with_stack,
        )
        self._num_steps_of_part = 0
        self._part.__enter__()
        self._anchors = self._drop_anchors()

    def _end_part(self) -> None:
        assert self._writer is not None
        anchors = self._anchors + self._drop_anchors()
        # Not kept here, where its events would stay in memory until the next profile.
        part, self._part = self._part, None
        part.__exit__(None, None, None)
        self._writer.put(UnsavedPart(part, anchors, self._num_steps_of_part))

    def _drop_anchors(self) -> list[tuple[int, int]]:
        """Let the profiler record ranges between two readings of our clock each."""
        anchors = []
        for _ in range(_ANCHORS_OF_AN_END):
            before_ns = time.monotonic_ns()
            self._ranges.push(ANCHOR_NAME)
            self._ranges.pop()
            anchors.append((before_ns, time.monotonic_ns()))
        return anchors

    def _adapt(self, pause_ns: int) -> None:
        """Make parts as long as a pause allows."""
        self._longest_pause_ns = max(self._longest_pause_ns, pause_ns)
        steps = self._steps_of_a_part
        if pause_ns > _TARGET_PAUSE_NS:
            self._steps_of_a_part = max(1, steps // 2)
        elif 2 * pause_ns <= _TARGET_PAUSE_NS:
            self._steps_of_a_part = min(2 * steps, _MAX_STEPS_OF_A_PART)
