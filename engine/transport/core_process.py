"""The spawned core with its sockets and its folder: what must not be left behind.

A monitor thread waits for the core's process; its end makes a pipe readable that every wait polls.
Knows processes, sockets and their end; knows no message but the last one.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

import engine.errors
from engine.config import EngineConfig
from engine.errors import EngineDeadError, EngineStartError, IsinglassError
from engine.transport.death_record import DeathRecord
from engine.transport.importable import portable_classes
from engine.transport.interrupts import deferred_interrupts
from engine.transport.process import SpawnedProcess
from engine.types.messages import PROTOCOL_VERSION, EngineCoreFailure, MessageType
from instrumentation import Event, Instrument

_CORE_MAIN = "engine.core.engine_core_proc:run_engine_core"

_NUM_DESCRIPTORS = 20
"""File descriptors that the sockets, the pipes and the spawn need at once, and some to spare."""


class CoreProcess:
    """Starts the core, knows how it fares, and removes what it leaves.

    Args:
        config: the engine's settings.
        run_dir: where the core writes its journal, None for no journal.
        obs: this process's instrument.
        on_death: called once, from another thread, when the process ends unasked.
        num_frontends: further processes that will attach to the core, as clients 1, 2, …; this
            process is client 0.

    Raises:
        EngineStartError: the process cannot be started.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        run_dir: str | None,
        obs: Instrument,
        on_death: Callable[[], None] | None = None,
        num_frontends: int = 0,
    ) -> None:
        settings, main_path = portable_classes(config)  # may raise: before there is anything
        self.grace_s = config.process.engine_shutdown_timeout_s
        self.obs = obs
        self._num_clients = num_frontends + 1
        self._on_death = on_death
        self.stopping = False
        self.failure: EngineCoreFailure | None = None
        """What the core said of its own death, if it could."""
        self.has_answered = False
        """Whether the core has come up, or has said why not; before, it cannot stop by itself."""
        self._death_record = DeathRecord(obs)
        self._owner_pid = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        with contextlib.ExitStack() as undo:  # in reverse, if anything below fails
            try:
                self._start(settings, run_dir, main_path, undo)
            except (OSError, zmq.ZMQError, RuntimeError) as error:
                raise EngineStartError(
                    f"the engine core's process could not be started: {error}. It needs a "
                    "temporary folder that can be written to, about twenty file descriptors "
                    "(ulimit -n) and a few threads (ulimit -u)."
                ) from error
            undo.pop_all()

    def _start(
        self,
        settings: dict[str, Any],
        run_dir: str | None,
        main_path: str | None,
        undo: contextlib.ExitStack,
    ) -> None:
        self.directory = _private_directory()
        undo.callback(shutil.rmtree, self.directory, ignore_errors=True)
        _require_descriptors(_NUM_DESCRIPTORS)  # libzmq ends the whole process for want of them
        self.context = zmq.Context(io_threads=1)
        undo.callback(self.context.destroy, linger=0)
        addresses = [client_addresses(self.directory, index) for index in range(self._num_clients)]
        self.input, self.output = bind_sockets(self.context, addresses[0])
        self.death_read, self._death_write = os.pipe()
        for end in (self.death_read, self._death_write):
            undo.callback(os.close, end)
        self.process = SpawnedProcess(
            _CORE_MAIN,
            {
                "config": settings,
                "protocol_version": PROTOCOL_VERSION,
                "addresses": addresses,
                "engine_index": 0,
                "run_dir": run_dir,
                "spawned_ns": time.monotonic_ns(),
            },
            name="EngineCore",
            private_dir=self.directory,
            main_path=main_path,
        )
        undo.callback(self.process.kill)
        self._monitor = threading.Thread(target=self._watch, name="EngineCoreMonitor", daemon=True)
        self._monitor.start()

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self.process.pid

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the process, so that its exit code is known."""
        self.process.wait(timeout_s=timeout_s)

    @property
    def is_foreign(self) -> bool:
        """Whether we are in a fork of the process that owns the core."""
        return os.getpid() != self._owner_pid

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return self.process.exit_code is not None

    def poll(self, socket: zmq.Socket, timeout_s: float | None = None) -> bool:
        """Wait until the socket can be read (True), or the core is dead or time is up (False)."""
        return poll_socket(socket, self.death_read, timeout_s)

    def death(self) -> EngineDeadError:
        """The error that tells of the core's end."""
        # The monitor thread may have reaped it without having kept the code yet.
        code, tail = self.process.wait(timeout_s=1.0), self.process.log_tail()
        if self.stopping:
            return EngineDeadError("the engine has been shut down", exit_code=code)
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        if self.failure is not None:
            how = f"{self.failure.error_class}: {self.failure.message}; {how}"
        where = self._death_record.where(self.failure, how)
        lines = "".join(f"\n    {line}" for line in tail[-12:])
        last = f" It logged last:{lines}" if lines else ""
        death = EngineDeadError(
            f"the engine core died ({how}); start a new engine.{where}{last}",
            exit_code=code,
            log_tail=tail,
        )
        if self.failure is not None:
            death.add_note(self.failure.traceback)
            death.__cause__ = own_error(self.failure)
        return death

    def kill(self) -> None:
        """End the process now, from any thread; what is left of it, `close` still has to remove."""
        self.stopping = True
        self.process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Stop the process, close the sockets, remove the folder.

        Interrupted, it kills the process and does the rest all the same; called again, it goes on
        where it was.
        """
        if self.is_foreign:
            return  # a fork of the caller must not take the engine down with it
        with self._lock:
            if self._closed:
                return
            self.stopping = True
            try:
                self.process.stop(self.grace_s if self._ask_to_stop() else 0.0)
            finally:
                with deferred_interrupts():
                    self._release()

    def _ask_to_stop(self) -> bool:
        """Whether the core will stop by itself: not before it has come up, nor unconnected."""
        if not self.has_answered:
            return False
        if not self.is_dead:
            try:
                self.input.send_multipart([b"0", MessageType.SHUTDOWN.value], zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
        return True

    def _release(self) -> None:
        """Let go of everything; a second call finds nothing left to do."""
        if self._closed:
            return
        self.process.kill()
        self._monitor.join(timeout=1.0)
        self.context.destroy(linger=0)
        os.close(self.death_read)
        shutil.rmtree(self.directory, ignore_errors=True)
        self._closed = True

    def _watch(self) -> None:
        code = self.process.wait()
        is_death = not self.stopping
        if is_death:
            self.obs.for_thread("monitor").event(
                Event.ENGINE_DEAD, value=code or 0, detail="".join(self.process.log_tail()[-1:])
            )
        os.close(self._death_write)  # makes the other end readable, for good
        if is_death and self._on_death is not None:
            self._on_death()


def client_addresses(directory: str, client_index: int) -> tuple[str, str]:
    """The ipc addresses of a client's two sockets, which it binds and the core connects to."""
    return f"ipc://{directory}/input.{client_index}", f"ipc://{directory}/output.{client_index}"


def bind_sockets(context: zmq.Context, addresses: tuple[str, str]) -> tuple[zmq.Socket, zmq.Socket]:
    """A client's sockets: ROUTER to send by, PULL to receive by; neither ever makes a sender wait.

    Raises:
        zmq.ZMQError: they cannot be made.
    """
    sockets = []
    for kind, address in zip((zmq.ROUTER, zmq.PULL), addresses, strict=True):
        socket = context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(address)
        sockets.append(socket)
    return sockets[0], sockets[1]


def poll_socket(socket: zmq.Socket, death_read: int, timeout_s: float | None) -> bool:
    """Wait until the socket can be read (True), or death can, or time is up (False)."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(death_read, zmq.POLLIN)
    events = dict(poller.poll(None if timeout_s is None else max(0, int(timeout_s * 1000))))
    return socket in events


def own_error(failure: EngineCoreFailure) -> IsinglassError | None:
    """The error that ended the core, if it is of a class that users know."""
    kind = getattr(engine.errors, failure.error_class, None)
    if isinstance(kind, type) and issubclass(kind, IsinglassError):
        return kind(failure.message)
    return None


def _require_descriptors(number: int) -> None:
    """Open so many files for a moment; OSError if the limit does not allow that."""
    with contextlib.ExitStack() as files:
        for _ in range(number):
            files.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def _private_directory() -> str:
    """A new folder of mode 0700 whose paths are short enough for a socket (108 bytes)."""
    directory = tempfile.mkdtemp(prefix="isinglass-")
    if len(directory) > 80:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="isinglass-", dir="/tmp")
    return directory
