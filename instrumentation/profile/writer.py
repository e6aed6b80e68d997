"""Writes a torch profile out while steps go on.

Knows the folder of a profile's parts. Does not know when a profile begins or ends. A part is saved
by a thread of this process, since torch cannot hand its events over; the parts are put together by
another process, since that would hold the interpreter's lock for long.
"""

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from instrumentation.names import SinkName
from instrumentation.profile.files import (
    MANIFEST_NAME,
    PARTS_SUFFIX,
    TRACE_SUFFIX,
    ProfileClock,
    ProfileError,
    ProfileManifest,
    ProfilePart,
)
from instrumentation.record.instrument import Instrument

_MAX_PROFILES_OF_A_PROCESS = 10_000
_MORE_BYTES = 1 << 16
"""What does not fit behind a file that was cut off for want of room."""


class UnsavedPart(NamedTuple):
    """A part that the profiler has in memory."""

    results: Any
    anchors: list[tuple[int, int]]
    num_steps: int


class ProfileWriter:
    """Saves the parts of one profile on a thread of its own, and has them put together."""

    def __init__(self, manifest: ProfileManifest, folder: Path, *, obs: Instrument) -> None:
        self.num_bytes = self.num_saved_steps = self.clock_error_ns = 0
        self.error = ""
        self.is_done = False
        self._obs = obs
        self._manifest = manifest
        self._folder = folder
        self._parts: queue.SimpleQueue[UnsavedPart | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="profile writer", daemon=True)
        self.thread.start()

    def put(self, part: UnsavedPart | None) -> None:
        """Take a part; None after the last."""
        self._parts.put(part)

    def estimate_bytes(self, num_steps: int) -> int:
        """Size of so many steps, by those that have been saved."""
        if not self.num_saved_steps:
            return 0
        return self.num_bytes * num_steps // self.num_saved_steps

    def _run(self) -> None:
        try:
            while (part := self._parts.get()) is not None:
                self._save(part)
            self._put_together()
            self.is_done = True
        except Exception as error:  # of whatever kind, the status tells it and steps go on
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Remember what went wrong first, and count it."""
        self.error = self.error or f"{type(error).__name__}: {error}"
        self._obs.telemetry_failed(SinkName.PROFILER, error)

    def _save(self, part: UnsavedPart) -> None:
        parts = self._manifest.parts
        name = f"part-{len(parts):05d}.json"
        part.results.export_chrome_trace(str(self._folder / name))
        if not (self._folder / name).is_file():
            raise ProfileError(f"{self._folder / name} could not be written{self._why(name)}")
        self.num_bytes += (self._folder / name).stat().st_size
        parts.append(ProfilePart(file=name, anchors=part.anchors, num_steps=part.num_steps))
        self._manifest.end_ns = time.monotonic_ns()
        # Each time, so that the parts are of use even if this process dies.
        manifest = msgspec.json.encode(self._manifest)
        (self._folder / MANIFEST_NAME).write_bytes(manifest)
        self.num_saved_steps += part.num_steps

    def _why(self, name: str) -> str:
        """What the system has against a part's file, which torch does not tell; frees its room."""
        begun = self._folder / f"{name}.tmp"  # by torch, which renames it once it is whole
        try:
            with begun.open("ab") as file:
                file.write(bytes(_MORE_BYTES))
        except OSError as error:
            return f": {error.strerror}"
        finally:
            with contextlib.suppress(OSError):
                begun.unlink(missing_ok=True)
        return ""

    def _put_together(self) -> None:
        done = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-P", "-m", "instrumentation.profile.merge", str(self._folder)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            # It finishes even if this process is ended meanwhile.
            start_new_session=True,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ProfileError(f"the parts in {self._folder} could not be put together: {last}")
        clock = msgspec.json.decode(done.stdout, type=ProfileClock)
        self.num_bytes = Path(self._manifest.output).stat().st_size
        self.clock_error_ns = clock.clock_error_ns


def new_profile_files(folder: Path, name: str) -> tuple[Path, Path]:
    """The profile's file, which is still to be written, and a new folder for its parts.

    Raises:
        ProfileError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(_MAX_PROFILES_OF_A_PROCESS):
            output = folder / f"profile.{name}.{number}{TRACE_SUFFIX}"
            parts = folder / f"profile.{name}.{number}{PARTS_SUFFIX}"
            if output.exists():
                continue
            try:
                parts.mkdir()
            except FileExistsError:
                continue
            return output, parts
    except OSError as error:
        raise ProfileError(
            f"cannot write a profile to {str(folder)!r} ({error}); "
            "set profiler_dir to a folder that can be written to"
        ) from error
    raise ProfileError(f"{folder} holds {_MAX_PROFILES_OF_A_PROCESS} profiles of {name}")
