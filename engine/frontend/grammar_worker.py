"""A forked child that tries constraints out, and may be killed at any time.

A fork has all that the process around it has loaded, at the cost of some milliseconds. Knows the
child, its limits and how it ended; does not know what it computes nor who goes next.
"""

import contextlib
import ctypes
import gc
import os
import resource
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from engine.types.framing import Frames, framed
from engine.types.grammar_messages import CompileResult, GrammarKey

_MEMORY_BYTES: Final = 3 << 30
"""What a child may take beyond what it has when it is forked."""
_NICENESS: Final = 5
_MAX_IDLE: Final = 2
_PR_SET_PDEATHSIG: Final = 1
_CHUNK_BYTES: Final = 1 << 20


class Question(msgspec.Struct, array_like=True, gc=False):
    """A constraint, and how much processor time its child may take."""

    key: GrammarKey
    processor_s: float


class ChildDeathError(Exception):
    """A child has ended without an answer."""

    def __init__(self, *, is_out_of_time: bool) -> None:
        super().__init__()
        self.is_out_of_time = is_out_of_time
        """Whether it had used up its processor time."""


class Worker:
    """A child, from its fork on; it waits for questions, one at a time.

    Args:
        work: what the child does with a constraint; may take or do whatever it likes.
    """

    def __init__(self, work: Callable[[GrammarKey], CompileResult]) -> None:
        self._ours, theirs = socket.socketpair()
        parent_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _live(theirs, work, parent_pid)
        theirs.close()
        self._frames = Frames()

    def fileno(self) -> int:
        """Becomes readable with the answer, or when the child has died."""
        return self._ours.fileno()

    def ask(self, key: GrammarKey, *, processor_s: float) -> None:
        """Ask a question; the child dies when it takes more processor time than that."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `read` tells of it
            self._ours.sendall(framed(Question(key, processor_s)))

    def read(self) -> CompileResult | None:
        """What has come of the answer: all of it, or None.

        Raises:
            ChildDeathError: and there will be no answer.
        """
        try:
            data = self._ours.recv(_CHUNK_BYTES)
        except ConnectionResetError:  # it died before it had read its question
            data = b""
        if not data:
            status = self.end()
            is_out_of_time = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            raise ChildDeathError(is_out_of_time=is_out_of_time)
        for body in self._frames.feed(data):
            return msgspec.msgpack.decode(body, type=CompileResult)
        return None

    def end(self) -> int:
        """Kill it if it still lives, and leave no zombie; its status, as from `os.waitpid`."""
        self._ours.close()
        os.kill(self.pid, signal.SIGKILL)  # as long as nobody has waited for it, the id is its own
        _, status = os.waitpid(self.pid, 0)
        return status


class Workers:
    """Workers that are ready before they are needed; at least one, once `prepare` has been called.

    Args:
        work: see `Worker`.
    """

    def __init__(self, work: Callable[[GrammarKey], CompileResult]) -> None:
        self._work = work
        self._idle: list[Worker] = []

    def take(self, *, is_new: bool = False) -> Worker:
        """The one that was used last, whose pages are its own by now, or a new one."""
        return self._idle.pop() if self._idle and not is_new else Worker(self._work)

    def give_back(self, worker: Worker) -> None:
        """It has answered."""
        self._idle.append(worker)
        if len(self._idle) > _MAX_IDLE:
            self._idle.pop(0).end()

    def prepare(self) -> None:
        """Have one in reserve."""
        if not self._idle:
            self._idle.append(Worker(self._work))


def die_with(parent_pid: int) -> None:
    """End when the parent ends, also in the middle of a call that never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before it could be watched
        os._exit(0)


def yield_to_steps() -> None:
    """Let steps go first: as `WALL_FACTOR` expects, whatever this process was forked from."""
    niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))  # the caller's may be higher
    os.setpriority(os.PRIO_PROCESS, 0, niceness)


def _live(
    theirs: socket.socket, work: Callable[[GrammarKey], CompileResult], parent_pid: int
) -> NoReturn:
    """The child's whole life."""
    code = 1
    try:
        die_with(parent_pid)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # `_answer` counts on it: it may be ignored
        gc.disable()  # it would touch, and so copy, every page
        _limit_memory()
        yield_to_steps()
        for question in _questions(theirs):
            theirs.sendall(framed(_answer(question, work)))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _questions(theirs: socket.socket) -> Iterator[Question]:
    frames = Frames()
    while data := theirs.recv(_CHUNK_BYTES):
        for body in frames.feed(data):
            yield msgspec.msgpack.decode(body, type=Question)


def _answer(question: Question, work: Callable[[GrammarKey], CompileResult]) -> CompileResult:
    # The kernel's doing: it ends a call that never returns, and counts no time spent waiting.
    signal.setitimer(signal.ITIMER_PROF, question.processor_s)
    result = work(question.key)
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    return result


def _limit_memory() -> None:
    """Let a compilation that grows without bound fail instead of taking the machine's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
