"""A spawned child process: start, the last lines it logged, how it ended, how to stop it."""

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from engine.interpreter import boot_line, command
from engine.log import readable_lines
from engine.transport.boot import BLOCKED_AT_START, BOOTSTRAP
from engine.transport.interrupts import children_begin_blocking

_LOG_LINES = 40
_SPIN_COUNT = "20000"
"""Some ten microseconds."""


class SpawnedProcess:
    """A fresh interpreter that runs `module:function(**kwargs)`.

    The child's standard error passes through to ours line by line; the last lines are kept for
    the error that reports its death.
    """

    def __init__(
        self,
        target: str,
        kwargs: dict[str, Any],
        *,
        name: str,
        private_dir: str,
        main_path: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self._forwarder: threading.Thread | None = None
        with children_begin_blocking(BLOCKED_AT_START):
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
                command(BOOTSTRAP, name),
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_child_environment(),
                pass_fds=pass_fds,
            )
        boot = boot_line(private_dir=private_dir, main_path=main_path, target=target, kwargs=kwargs)
        try:
            forwarder = threading.Thread(target=self._forward_log, name=f"{name}-log", daemon=True)
            forwarder.start()
            self._forwarder = forwarder
            assert self._process.stdin is not None
            self._process.stdin.write(boot)
            self._process.stdin.flush()
        except BrokenPipeError:
            # It died at once; whoever waits for it reports the exit code and what it logged.
            self.wait()
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end; None if it still runs after the time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def log_tail(self) -> tuple[str, ...]:
        """The last lines that it wrote to standard error, oldest first, to be read by people."""
        if self.exit_code is not None and self._forwarder is not None:
            self._forwarder.join(timeout=1.0)
        return tuple(self._log)

    def stop(self, grace_s: float) -> None:
        """Give it time to end by itself, then terminate, then kill. Leaves no zombie."""
        if self.wait(grace_s) is None:
            self._process.terminate()
            self.wait(1.0)
        self.kill()

    def send_signal(self, number: int) -> None:
        """Send it a signal; harmless when it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it now, if it has not ended, and let go of its pipes."""
        if self.exit_code is None:
            self._process.kill()
            self.wait()
        if self._process.stdin is not None:
            # Broken if it died before it had read the boot message, which is still to be flushed.
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._forwarder is not None:
            self._forwarder.join(timeout=1.0)

    def _forward_log(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = raw.decode(errors="replace")
            self._log.extend(readable_lines(line.rstrip()))
            # Our own standard error may be missing, closed, full, or a pipe that nobody reads. The
            # lines must be taken all the same, or the child would block on a full pipe.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(line)
        self._process.stderr.close()


def _child_environment() -> dict[str, str]:
    """Ours, with a short spin for OpenMP where the user has not chosen.

    A step has hundreds of parallel regions of some ten microseconds. GNU OpenMP's default is to
    spin for milliseconds at each end; when any other process takes one of the cores, the thread
    that spins keeps the one waited for from running, and a step gets ten times slower.
    """
    environment = dict(os.environ)
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys():
        environment["GOMP_SPINCOUNT"] = _SPIN_COUNT
    return environment
