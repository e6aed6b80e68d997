"""A core that a test plays: the other ends of an `AsyncMPClient`'s sockets, and its death.

Knows messages. Does not know what is tested with them.
"""

import itertools
import os
import threading
from typing import Any

import msgspec
import zmq

from engine.errors import EngineDeadError
from engine.transport.async_mp_client import AsyncMPClient
from engine.types.codec import MessageDecoder, MessageEncoder
from engine.types.messages import (
    EngineCoreFailure,
    EngineCoreOutputs,
    MessageType,
    UtilityOutput,
    UtilityRequest,
)
from tests.waiting import PATIENCE_S

_NUMBERS = itertools.count()


class PlayedCore:
    """Has what a client asks of `CoreProcess`, and what a test does in the core's place."""

    is_foreign = False

    def __init__(self) -> None:
        self.stopping = False
        self.is_dead = False
        self.may_tell_death = threading.Event()
        self.may_tell_death.set()
        self.failure: EngineCoreFailure | None = None
        self.context = zmq.Context()
        name = f"inproc://core-{next(_NUMBERS)}"
        self.input, self.output = self.context.socket(zmq.ROUTER), self.context.socket(zmq.PULL)
        self.input.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.input.bind(f"{name}-input")
        self.output.bind(f"{name}-output")
        self._commands, self._outputs = (
            self.context.socket(zmq.DEALER),
            self.context.socket(zmq.PUSH),
        )
        self._commands.setsockopt(zmq.IDENTITY, b"0")
        self._commands.connect(f"{name}-input")
        self._outputs.connect(f"{name}-output")
        self.death_read, self._death_write = os.pipe()

    def client(self) -> AsyncMPClient:
        """A client of this core, past its handshake."""
        return AsyncMPClient(lambda: self, timeout_s=1)  # type: ignore[arg-type, return-value]

    def calls(self) -> list[tuple[int, str, list[Any]]]:
        """Utility calls that have come since the last look: id, method, arguments."""
        made = []
        while self._commands.poll(0):
            kind, *frames = self._commands.recv_multipart()
            assert kind == MessageType.UTILITY.value
            call = MessageDecoder(UtilityRequest).decode(frames)
            made.append((call.call_id, call.method, call.args))
        return made

    def answer(self, call_id: int, result: Any = None, *, failure: str | None = None) -> None:
        """End a utility call."""
        self.send(EngineCoreOutputs(utility=UtilityOutput(call_id, result, failure)))

    def send(self, outputs: EngineCoreOutputs) -> None:
        """Send the client a message."""
        frames = MessageEncoder().encode(outputs)
        self._outputs.send_multipart([MessageType.OUTPUTS.value, *frames])

    def die(self, message: str = "") -> None:
        """End as a process does; with last words, if there is a message."""
        if message:
            last = msgspec.msgpack.encode(EngineCoreFailure("RuntimeError", message, ""))
            self._outputs.send_multipart([MessageType.FAILED.value, last])
        self.is_dead = True
        os.close(self._death_write)

    def death(self) -> EngineDeadError:
        """What its end is called; may take as long as the test wants."""
        assert self.may_tell_death.wait(PATIENCE_S)
        return EngineDeadError(f"died: {self.failure and self.failure.message}")

    def close(self) -> None:
        """Close all sockets."""
        if not self.stopping:
            self.stopping = True
            self.context.destroy(linger=0)
            os.close(self.death_read)
            if not self.is_dead:
                os.close(self._death_write)
