"""The core's end of the process that tries grammars out: start it, talk to it, kill it.

Knows the process and its pipes; what it does there is `engine.frontend.grammar_process`'s, which
stands above the core because it knows the tokenizer, and is started by name.
"""

import os
import select
import subprocess
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from engine.interpreter import READ_BOOT, boot_line, command
from engine.types.framing import Frames, framed
from engine.types.grammar_messages import CompileRequest, CompileResult, Vocabulary

_CHUNK_BYTES: Final = 1 << 20
_PROGRAM: Final = READ_BOOT + "from engine.frontend.grammar_process import serve; serve(**boot)"


class GrammarProcess:
    """A process that compiles what it is asked to, for as long as it lets itself.

    Belongs to one thread, whose end also ends the process. Nothing here waits for the process but
    `wait`.

    Args:
        kwargs: of `engine.frontend.grammar_process.serve`, without `parent_pid`.
        wake: a file that becomes readable when the thread is wanted for something else.
    """

    def __init__(self, kwargs: dict[str, Any], *, wake: int) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
            command(_PROGRAM),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._wake = wake
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        self._frames = Frames()
        self._has_vocabulary = False
        self._unsent = bytearray(boot_line(**kwargs))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, request: CompileRequest) -> None:
        """Ask for something, once the vocabulary has come; `wait` does the sending."""
        self._unsent += framed(request)

    def wait(self, timeout_s: float | None) -> Iterator[Vocabulary | CompileResult]:
        """Wait until it says something, or the thread is wanted, or the time is up; send meanwhile.

        Yields what it has said: the vocabulary first, then the results.

        Raises:
            EOFError: it has died.
        """
        poller = select.poll()
        poller.register(self._output, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        if self._unsent:
            poller.register(self._input, select.POLLOUT)
        ready = {
            fileno for fileno, _ in poller.poll(None if timeout_s is None else 1e3 * timeout_s)
        }
        if self._input in ready:
            self._send()
        if self._output not in ready:
            return
        data = os.read(self._output, _CHUNK_BYTES)
        if not data:
            raise EOFError("the process has died")
        for body in self._frames.feed(data):
            if self._has_vocabulary:
                yield msgspec.msgpack.decode(body, type=CompileResult)
            else:
                self._has_vocabulary = True
                yield msgspec.msgpack.decode(body, type=Vocabulary)

    def interrupt(self) -> None:
        """Make it end, from any thread: whoever waits for it gets EOFError."""
        self._process.kill()

    def kill(self) -> None:
        """End it now; leaves no zombie."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _send(self) -> None:
        try:
            num_sent = os.write(self._input, self._unsent)
        except BrokenPipeError as error:
            raise EOFError("the process has died") from error
        del self._unsent[:num_sent]
