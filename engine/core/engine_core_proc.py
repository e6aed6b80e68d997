"""The core's process: a busy loop around `EngineCore.step`, and threads for the sockets.

    input thread:  socket → decode → Request (blocks hashed) → input queue
    main thread:   input queue → step → output queue
    output thread: output queue → encode → socket

The main thread never touches a socket and never waits while there is work.
"""

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import zmq

from engine.config import EngineConfig
from engine.core.flight_signal import dump_at_signal
from engine.errors import EngineStartError, IsinglassError
from engine.log import configure, get_logger
from engine.types.codec import Frame, MessageDecoder, MessageEncoder, leading_item
from engine.types.messages import (
    PROTOCOL_VERSION,
    CoreTimes,
    EngineCoreFailure,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
    MessageType,
    UtilityOutput,
    UtilityRequest,
)
from instrumentation import Instrument, Role, StartupPhase, ThreadName
from instrumentation.setup import setup

logger = get_logger(__name__)


class EngineCoreProc:
    """Owns the core, its queues and its threads."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        input_sockets: Sequence[zmq.Socket],
        output_sockets: Sequence[zmq.Socket],
        engine_index: int,
        obs: Instrument,
        before_ns: Mapping[StartupPhase, tuple[int, int]],
    ) -> None:
        from engine.core.engine_core import EngineCore
        from engine.executor.uniproc import UniprocExecutor

        self.engine_index = engine_index
        self.obs = obs
        self.core = EngineCore(config, UniprocExecutor, obs=obs, before_ns=before_ns)
        if len(input_sockets) > 1:
            self.core.listeners.clear()  # the owner of several frontends listens to none of it
        self._input: queue.SimpleQueue[tuple[MessageType, int, Any]] = queue.SimpleQueue()
        self._output: queue.SimpleQueue[tuple[int, EngineCoreOutputs] | None] = queue.SimpleQueue()
        self._running = True
        self._input_thread = threading.Thread(
            target=self._guard,
            args=(self._receive, input_sockets),
            name=ThreadName.INPUT_IO,
            daemon=True,
        )
        self._output_thread = threading.Thread(
            target=self._guard,
            args=(self._send, output_sockets),
            name=ThreadName.OUTPUT_IO,
            daemon=True,
        )

    def run_busy_loop(self) -> None:
        """Serve until told to stop."""
        self._input_thread.start()
        self._output_thread.start()
        while self._running:
            self._take_messages()
            outputs = self.core.step()
            with self.obs.publish:
                self._publish(outputs)

    def stop(self) -> None:
        """Leave the busy loop after the current step."""
        self._input.put((MessageType.SHUTDOWN, 0, None))

    def flush(self) -> None:
        """Send what is left and end the output thread: its socket is free for the caller."""
        self._output.put(None)
        self._output_thread.join(timeout=2.0)

    def close(self) -> None:
        """Send what is left and stop the core."""
        self.flush()
        self.core.shutdown()

    def _take_messages(self) -> None:
        """Handle what has arrived; with nothing to do, check the invariants and sleep."""
        if not self.core.has_work() and self._input.empty():
            self.core.check_integrity()
            self._publish(self.core.idle_outputs())
            self._handle(*self._input.get())
        with self.obs.intake:
            while not self._input.empty():
                self._handle(*self._input.get_nowait())

    def _handle(self, kind: MessageType, client: int, content: Any) -> None:
        if kind is MessageType.ADD:
            self.core.add_request(content)
        elif kind is MessageType.ABORT:
            self._publish(self.core.abort_requests(content))
        elif kind is MessageType.UTILITY:
            self._publish({client: EngineCoreOutputs(utility=self._call(content))})
        elif kind is MessageType.ATTACH:
            self.core.listeners.add(client)
        elif kind is MessageType.DETACH:
            self.core.abort_client(content)
        elif kind is MessageType.FAILED:
            raise content
        else:
            assert kind is MessageType.SHUTDOWN
            self._running = False

    def _call(self, call: UtilityRequest) -> UtilityOutput:
        try:
            return UtilityOutput(call.call_id, self.core.call_utility(call.method, call.args))
        except IsinglassError as error:  # the caller's to know, and nothing is wrong here
            return UtilityOutput(call.call_id, failure=f"{type(error).__name__}: {error}")
        except Exception as error:  # a wrong call must not end the engine
            logger.exception("utility %s failed", call.method)
            return UtilityOutput(call.call_id, failure=f"{type(error).__name__}: {error}")

    def _publish(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client, package in outputs.items():
            package.engine_index = self.engine_index
            self._output.put((client, package))

    def _guard(
        self, work: Callable[[Sequence[zmq.Socket]], None], sockets: Sequence[zmq.Socket]
    ) -> None:
        """Run a thread's work; a failure ends the engine instead of leaving its callers waiting."""
        try:
            work(sockets)
        except Exception as error:
            self._input.put((MessageType.FAILED, 0, error))

    def _receive(self, sockets: Sequence[zmq.Socket]) -> None:
        """Input thread: decode, and do what needs no scheduler."""
        obs = self.obs.for_thread(ThreadName.INPUT_IO)
        decoders: dict[MessageType, MessageDecoder[Any]] = {
            MessageType.ADD: MessageDecoder(EngineCoreRequest),
            MessageType.ABORT: MessageDecoder(list[str]),
            MessageType.UTILITY: MessageDecoder(UtilityRequest),
            MessageType.DETACH: MessageDecoder(int),
        }
        for client, socket in _readable(sockets):
            code, *frames = socket.recv_multipart()
            if code == MessageType.SHUTDOWN.value:
                self.stop()
                return
            if code == MessageType.ATTACH.value:
                socket.send_multipart([MessageType.READY.value, self.ready_message()])
                self._input.put((MessageType.ATTACH, client, None))
                continue
            try:
                with obs.decode:
                    kind = MessageType(code)
                    content = decoders[kind].decode(frames)
                    if kind is MessageType.ADD:
                        content.client_index = client
                        content = self.core.prepare_request(content)
            except Exception as error:  # one bad message must not end everybody's requests
                self._refuse(code, client, frames, error)
            else:
                self._input.put((kind, client, content))

    def ready_message(self) -> bytes:
        """What start-up decided, encoded."""
        return msgspec.msgpack.encode(self.core.ready_response())

    def _refuse(self, code: bytes, client: int, frames: Sequence[Frame], error: Exception) -> None:
        """Drop a message that makes no sense, and answer whoever waits for its result."""
        logger.error("a message of type %r was dropped: %r", code, error)
        reason = f"the engine core could not read the message: {type(error).__name__}: {error}"
        item = leading_item(frames[0]) if frames else None
        now_ns = time.monotonic_ns()
        if code == MessageType.ADD.value and isinstance(item, str):
            output = EngineCoreOutput(
                item,
                [],
                finish_reason=FinishReason.ERROR,
                times=CoreTimes(queued_ns=now_ns),
                error=reason,
                error_kind=ErrorKind.ENGINE,
            )
            self._publish({client: EngineCoreOutputs(outputs=[output], timestamp_ns=now_ns)})
        elif code == MessageType.UTILITY.value and isinstance(item, int):
            utility = UtilityOutput(item, failure=reason)
            self._publish({client: EngineCoreOutputs(utility=utility)})

    def _send(self, sockets: Sequence[zmq.Socket]) -> None:
        """Output thread: encode and send."""
        obs = self.obs.for_thread(ThreadName.OUTPUT_IO)
        encoder = MessageEncoder()
        while (item := self._output.get()) is not None:
            client, outputs = item
            outputs.sent_ns = time.monotonic_ns()
            with obs.encode:
                frames = encoder.encode(outputs)
            sockets[client].send_multipart([MessageType.OUTPUTS.value, *frames], copy=False)


def run_engine_core(
    *,
    config: dict[str, dict[str, Any]],
    protocol_version: int,
    addresses: Sequence[tuple[str, str]],
    engine_index: int,
    run_dir: str | None,
    spawned_ns: int,
) -> None:
    """Entry point of the spawned process: come up, answer ready, serve, end the process.

    `addresses` has the input and the output address of each client; the first owns the process.
    """
    settings = EngineConfig.from_dict(config)
    configure(
        settings.process.log_level,
        role="EngineCore",
        own_process=True,
        log_format=settings.observability.log_format,
    )
    # Two contexts, because at the end the input thread still waits at its socket: closing that
    # from here aborts the process now and then. Only the output's context is ended.
    input_context, output_context = zmq.Context(io_threads=1), zmq.Context(io_threads=1)
    identity = str(engine_index).encode()
    input_sockets = [_connect(input_context, zmq.DEALER, one, identity) for one, _ in addresses]
    output_sockets = [_connect(output_context, zmq.PUSH, one) for _, one in addresses]
    obs = setup(settings.observability, role=Role.CORE, rank=engine_index, run_dir=run_dir)
    dump_at_signal(obs)
    try:
        if protocol_version != PROTOCOL_VERSION:
            raise EngineStartError(f"frontend {protocol_version}, core {PROTOCOL_VERSION}")
        imported_ns = _import_libraries()
        proc = EngineCoreProc(
            settings,
            input_sockets=input_sockets,
            output_sockets=output_sockets,
            engine_index=engine_index,
            obs=obs,
            before_ns={StartupPhase.IMPORT: (spawned_ns, imported_ns)},
        )
    except Exception as error:
        input_sockets[0].send_multipart([MessageType.FAILED.value, _failure(error)])
        _leave(input_context, obs, code=1)
    signal.signal(signal.SIGTERM, lambda *_: proc.stop())
    input_sockets[0].send_multipart([MessageType.READY.value, proc.ready_message()])
    try:
        proc.run_busy_loop()
    except Exception as error:
        logger.exception("the engine core failed")
        proc.flush()
        failure = _failure(error, flight_record=proc.core.record_failure(error) or "")
        for socket in output_sockets:
            socket.send_multipart([MessageType.FAILED.value, failure])
        _leave(output_context, obs, code=1)
    proc.close()
    _leave(output_context, obs, code=0)


def _readable(sockets: Sequence[zmq.Socket]) -> Iterator[tuple[int, zmq.Socket]]:
    """Clients' sockets, by index, whenever a message waits in one of them."""
    if len(sockets) == 1:
        while True:
            yield 0, sockets[0]
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        for client, socket in enumerate(sockets):
            if socket in ready:
                yield client, socket


def _connect(
    context: zmq.Context, kind: int, address: str, identity: bytes | None = None
) -> zmq.Socket:
    socket = context.socket(kind)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)
    return socket


def _import_libraries() -> int:
    """Import what the core needs (torch, mostly); returns the time at which that is done."""
    import engine.core.engine_core
    import engine.executor.uniproc  # noqa: F401

    return time.monotonic_ns()


def _failure(error: Exception, *, flight_record: str = "") -> bytes:
    text = "".join(traceback.format_exception(error))
    return msgspec.msgpack.encode(
        EngineCoreFailure(type(error).__name__, str(error), text, flight_record)
    )


def _leave(context: zmq.Context, obs: Instrument, *, code: int) -> NoReturn:
    """End the process once everything is sent, without waiting for torch's own teardown."""
    obs.close()
    context.destroy(linger=2000)
    sys.stderr.flush()
    os._exit(code)
