"""The core in a process of its own, reached over ZMQ sockets in a private folder.

    caller                                     core
    ROUTER  ──── ADD, ABORT, UTILITY ────────▶ DEALER      handshake READY or FAILED comes back
    PULL    ◀─── OUTPUTS, FAILED ───────────── PUSH

`MPClient` sends, and turns the end of the core's process into EngineDeadError; how outputs are
waited for is its subclasses' business. The object cleans up at garbage collection and at
interpreter exit.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import zmq

from engine.errors import EngineDeadError, EngineStartError, IsinglassError
from engine.transport.attached_core import AttachedCore
from engine.transport.client import EngineCoreClient
from engine.transport.core_process import CoreProcess, own_error
from engine.transport.interrupts import deferred_interrupts
from engine.types.codec import Frame, MessageDecoder, MessageEncoder
from engine.types.messages import (
    PROTOCOL_VERSION,
    EngineCoreFailure,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    MessageType,
    UtilityOutput,
    UtilityRequest,
)

AnyCore: TypeAlias = CoreProcess | AttachedCore


class MPClient(EngineCoreClient):
    """What both clients share: the handshake, sending (which never waits), and the end.

    Args:
        start: starts the core, or attaches to one that runs.
        timeout_s: how long the core may take to become ready.
    """

    def __init__(
        self, start: Callable[[], CoreProcess | AttachedCore], *, timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        with deferred_interrupts():  # a process that nobody will stop must not be left
            self._core = start()
            self._finalizer = weakref.finalize(self, self._core.close)
        self._encoder = MessageEncoder()
        self._decoder = MessageDecoder(EngineCoreOutputs)
        self._next_call = 0

    @property
    def core(self) -> AnyCore:
        """The core's process, or what an attached client sees of it."""
        return self._core

    @property
    def core_pid(self) -> int:
        """Process id of the core."""
        return self._core.pid

    def wait_ready(self) -> EngineCoreReadyResponse:
        try:
            return self._handshake()
        except BaseException:
            self.shutdown()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(MessageType.ADD, self._encoder.encode(request))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._send(MessageType.ABORT, self._encoder.encode(list(request_ids)))

    def detach_client(self, client_index: int) -> None:
        """Tell the core, whose owner we are, that another client is gone: its requests end."""
        self._send(MessageType.DETACH, self._encoder.encode(client_index))

    def shutdown(self) -> None:
        self._core.close()  # interrupted, the finaliser still has its turn
        self._finalizer.detach()

    def kill(self) -> None:
        """End the core's process at once, in whatever state it is; `shutdown` has still to follow.

        For any thread. A core that belongs to another process is left alone; here it is as dead.
        """
        self._core.kill()

    def _send(self, kind: MessageType, frames: list[Frame]) -> None:
        self._ensure_alive()
        try:
            with self.uninterrupted():
                self._core.input.send_multipart([b"0", kind.value, *frames], copy=False)
        except zmq.ZMQError as error:
            raise self._core.death() from error

    def _send_call(self, method: str, args: tuple[Any, ...]) -> int:
        """Send a utility call; returns the id that its result will carry."""
        self._next_call += 1
        call = UtilityRequest(self._next_call, method, list(args))
        self._send(MessageType.UTILITY, self._encoder.encode(call))
        return call.call_id

    def _handshake(self) -> EngineCoreReadyResponse:
        core = self._core
        if isinstance(core, AttachedCore):
            core.ask_for_ready(self._timeout_s)
        if not core.poll(core.input, self._timeout_s):
            if core.is_dead:
                death = core.death()
                raise EngineStartError(f"during start-up {death}") from death
            raise EngineStartError(
                f"the engine core was not ready after {self._timeout_s:g} s; "
                "raise engine_ready_timeout_s for a large model or a slow disk."
            )
        with deferred_interrupts():
            _, kind, payload = core.input.recv_multipart()
        core.has_answered = True
        if kind == MessageType.FAILED.value:
            raise _startup_error(msgspec.msgpack.decode(payload, type=EngineCoreFailure))
        version = msgspec.msgpack.decode(payload)[0]
        if kind != MessageType.READY.value or version != PROTOCOL_VERSION:
            raise EngineStartError(
                f"the engine core speaks protocol {version}, the frontend {PROTOCOL_VERSION}: "
                "two versions of isinglass are mixed on the import path."
            )
        return msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse)

    def _ensure_usable(self) -> None:
        if self._core.is_foreign:
            raise EngineDeadError(
                "this engine belongs to the process that forked this one; start a new one here."
            )
        if self._core.stopping:
            raise self._core.death()

    def _ensure_alive(self) -> None:
        self._ensure_usable()
        if self._core.is_dead:
            raise self._core.death()


class SyncMPClient(MPClient):
    """Blocking client, for the offline API. Not thread-safe: one caller at a time."""

    def __init__(
        self, start: Callable[[], CoreProcess | AttachedCore], *, timeout_s: float
    ) -> None:
        super().__init__(start, timeout_s=timeout_s)
        self._pending: deque[EngineCoreOutputs] = deque()

    def get_output(self) -> EngineCoreOutputs:
        return self._pending.popleft() if self._pending else self._receive()

    def call_utility(self, method: str, *args: Any) -> Any:
        call_id = self._send_call(method, args)
        while True:
            outputs = self._receive()
            if outputs.utility is None or outputs.utility.call_id != call_id:
                self._pending.append(outputs)
                continue
            return unwrap(outputs.utility)

    def _receive(self) -> EngineCoreOutputs:
        self._ensure_usable()
        if not self._core.poll(self._core.output):
            raise self._core.death()
        with deferred_interrupts():
            kind, *frames = self._core.output.recv_multipart()
        if kind == MessageType.FAILED.value:
            self._core.failure = msgspec.msgpack.decode(frames[0], type=EngineCoreFailure)
            self._core.wait(timeout_s=2.0)
            raise self._core.death()
        return self._decoder.decode(frames)


def unwrap(output: UtilityOutput) -> Any:
    """A utility call's result; raises what the call raised, under its own name where it is ours."""
    if output.failure is not None:
        name, _, message = output.failure.partition(": ")
        own = own_error(EngineCoreFailure(name, message, ""))
        raise own or IsinglassError(output.failure)
    return output.result


def _startup_error(failure: EngineCoreFailure) -> Exception:
    """The core's own error where it is one of ours, else EngineStartError with its traceback."""
    own = own_error(failure)
    if own is not None:
        return own
    error = EngineStartError(
        f"the engine core failed to start: {failure.error_class}: {failure.message}"
    )
    error.add_note(failure.traceback)
    return error
