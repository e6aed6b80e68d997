"""The core's end of the process that tries grammars out: start it, ask it, kill it.

Knows the process and its pipes; what it does there is `engine.frontend.grammar_process`'s, which
stands above the core because it knows the tokenizer, and is started by name.
"""

import json
import os
import select
import struct
import subprocess
import sys
import time
from typing import Any, Final, TypeVar

import msgspec

from engine.types.grammar_messages import Verdict, Vocabulary

START_TIMEOUT_S: Final = 120.0
_LENGTH: Final = struct.Struct("<I")
_CHUNK_BYTES: Final = 1 << 20
_PROGRAM: Final = (
    "import sys, json; boot = json.loads(sys.stdin.buffer.readline()); "
    "sys.path[:] = boot.pop('sys_path'); "
    "from engine.frontend.grammar_process import serve; serve(**boot)"
)

_Message = TypeVar("_Message", Vocabulary, Verdict)


class VettingProcess:
    """A process that compiles what it is asked to, for as long as it is let.

    Belongs to one thread, whose end also ends the process.

    Args:
        kwargs: of `engine.frontend.grammar_process.serve`, without `parent_pid`.
    """

    def __init__(self, kwargs: dict[str, Any]) -> None:
        flags = subprocess._args_from_interpreter_flags()  # as multiprocessing does
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and code
            [sys.executable, *flags, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._received = bytearray()
        boot = {"sys_path": sys.path, "parent_pid": os.getpid(), **kwargs}
        try:
            self._send(json.dumps(boot).encode() + b"\n")
            self.vocabulary = self._receive(Vocabulary, START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, key: tuple[str, str, bool], timeout_s: float) -> Verdict:
        """Try one constraint out.

        Raises:
            TimeoutError: no answer in that time; the process is of no use any more.
            EOFError: it has died.
        """
        body = msgspec.msgpack.encode(key)
        self._send(_LENGTH.pack(len(body)) + body)
        return self._receive(Verdict, timeout_s)

    def interrupt(self) -> None:
        """Make it end, from any thread: whoever asks it gets EOFError."""
        self._process.kill()

    def kill(self) -> None:
        """End it now; leaves no zombie."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # what it has not read is of no interest
                continue

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EOFError("the process has died") from error

    def _receive(self, kind: type[_Message], timeout_s: float) -> _Message:
        deadline_s = time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, deadline_s))
        return msgspec.msgpack.decode(self._take(length, deadline_s), type=kind)

    def _take(self, num_bytes: int, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while len(self._received) < num_bytes:
            left_s = max(0.0, deadline_s - time.monotonic())
            readable, _, _ = select.select([pipe], [], [], left_s)
            if not readable:
                raise TimeoutError
            data = os.read(pipe, _CHUNK_BYTES)
            if not data:
                raise EOFError("the process has died")
            self._received += data
        taken = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return taken
