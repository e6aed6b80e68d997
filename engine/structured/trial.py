"""Has a constraint tried out in a process that may be killed: one process, one constraint a time.

Knows the process and its pipes; what it does there is `engine.structured.trial_child`'s.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from engine.interpreter import READ_BOOT, boot_line, command
from engine.structured.constraint import ConstraintKey
from engine.structured.trial_child import TrialAnswer, TrialQuestion
from engine.structured.vocabulary import Vocabulary
from engine.types.framing import Frames, framed
from instrumentation import GrammarOutcome

WALL_FACTOR: Final = 4
"""How many times the processor time that it may take a constraint may last: steps go first."""
_START_TIMEOUT_S: Final = 120.0
_NUM_TRIES: Final = 2
"""Of a constraint whose process dies: something else may be to blame the first time."""
_CHUNK_BYTES: Final = 1 << 20
_PROGRAM: Final = READ_BOOT + "from engine.structured.trial_child import serve; serve(**boot)"


class TrialResult(NamedTuple):
    """What came of one constraint."""

    outcome: GrammarOutcome
    text: str = ""
    """What the library is to compile, if the outcome is `COMPILED`."""
    error: str = ""


class _DeathError(Exception):
    """The process has ended, or says nothing in time."""


class Trial:
    """One process, started when it is needed, and again after it has died.

    Belongs to one thread, whose end also ends the process; `interrupt` alone is for others.

    Args:
        timeout_s: processor time that it may spend on one constraint.
    """

    def __init__(self, vocabulary: Vocabulary, *, timeout_s: float) -> None:
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._frames = Frames()

    @property
    def process_id(self) -> int | None:
        """Of the process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Have the process ready.

        Raises:
            OSError: it cannot be started, or dies at once.
        """
        if self._process is not None:
            return
        self._frames = Frames()
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
            command(_PROGRAM),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            bufsize=0,
        )
        try:
            self._send(boot_line() + framed(self._vocabulary))
            self._receive(_START_TIMEOUT_S)
        except _DeathError:
            self.close()
            raise OSError("the process that tries constraints out did not start") from None

    def run(self, key: ConstraintKey, is_wanted: Callable[[], bool]) -> TrialResult:
        """Try one constraint out.

        Args:
            is_wanted: False from an `interrupt` on, where that is meant for this constraint.

        Raises:
            OSError: see `start`.
        """
        for _ in range(_NUM_TRIES):
            self.start()
            try:
                self._send(framed(TrialQuestion(key, self._timeout_s)))
                answer = self._receive(WALL_FACTOR * self._timeout_s)
            except _DeathError:
                if self.close() in (-signal.SIGPROF, -signal.SIGALRM):
                    limit = f"{self._timeout_s:g} s of processor time"
                    return TrialResult(
                        GrammarOutcome.TIMED_OUT,
                        error=f"compiling it took more than {limit}; make it smaller or simpler",
                    )
                if not is_wanted():
                    return TrialResult(GrammarOutcome.WITHDRAWN)
                continue
            if answer.error:
                return TrialResult(GrammarOutcome.INVALID, error=answer.error)
            return TrialResult(GrammarOutcome.COMPILED, answer.text)
        return TrialResult(
            GrammarOutcome.CRASHED,
            error="compiling it ended the process that tried it out, twice; make it smaller",
        )

    def interrupt(self) -> None:
        """End what is being tried out, from any thread."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> int | None:
        """End the process; returns how it ended, as `Popen.returncode` has it."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        return process.returncode

    def _send(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        left = memoryview(data)
        with contextlib.suppress(BrokenPipeError):  # `_receive` tells of it
            while left:
                left = left[self._process.stdin.write(left) or 0 :]

    def _receive(self, timeout_s: float) -> TrialAnswer:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(process.stdout, select.POLLIN)
        while left_s := max(0.0, deadline_s - time.monotonic()):
            if not poller.poll(1e3 * left_s):
                break
            data = os.read(process.stdout.fileno(), _CHUNK_BYTES)
            if not data:
                process.wait()  # its own end, not that of `close`
                raise _DeathError
            for body in self._frames.feed(data):
                return msgspec.msgpack.decode(body, type=TrialAnswer)
        process.send_signal(signal.SIGALRM)  # as a clock would: `close` tells by it
        process.wait()
        raise _DeathError
