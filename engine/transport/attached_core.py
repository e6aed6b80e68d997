"""A core that another process owns, as one of its several frontends sees it.

Has what `CoreProcess` has for a client, less the power over the process: one can only turn away
from it. Knows sockets and one descriptor that tells of the end.
"""

import os
import threading
import time
from collections.abc import Callable

import zmq

from engine.errors import EngineDeadError, EngineStartError
from engine.transport.core_process import bind_sockets, client_addresses, poll_socket
from engine.transport.death_record import DeathRecord
from engine.types.attachment import CoreAttachment
from engine.types.messages import EngineCoreFailure, MessageType
from instrumentation import Instrument

_RETRY_S = 0.05
_WATCH_MS = 200


class AttachedCore:
    """This process's sockets to a core; closing it leaves the core alone.

    Args:
        attachment: where the core is.
        obs: this process's instrument.
        on_death: called once, from another thread, when the core ends unasked.

    Raises:
        EngineStartError: the sockets cannot be made.
    """

    def __init__(
        self,
        attachment: CoreAttachment,
        *,
        obs: Instrument,
        on_death: Callable[[], None] | None = None,
    ) -> None:
        self.obs = obs
        self.pid = attachment.core_pid
        self._end_of_core = os.dup(attachment.death_fd)
        # Our own, as an event loop watches it; it tells of the core's end or of our turning away.
        self.death_read, self._death_write = os.pipe()
        self.failure: EngineCoreFailure | None = None
        self.has_answered = False
        self.stopping = False
        self._is_closed = False
        self._death_record = DeathRecord(obs)
        self._on_death = on_death
        self._owner_pid = os.getpid()
        self.context = zmq.Context(io_threads=1)
        try:
            self.input, self.output = bind_sockets(
                self.context, client_addresses(attachment.directory, attachment.client_index)
            )
        except zmq.ZMQError as error:
            self.context.destroy(linger=0)
            for end in (self._end_of_core, self.death_read, self._death_write):
                os.close(end)
            raise EngineStartError(
                f"the sockets to the engine core cannot be made: {error}"
            ) from error
        self._monitor = threading.Thread(target=self._watch, name="EngineCoreMonitor", daemon=True)
        self._monitor.start()

    @property
    def is_foreign(self) -> bool:
        """Whether we are in a fork of the process that attached."""
        return os.getpid() != self._owner_pid

    @property
    def is_dead(self) -> bool:
        """Whether the core, or its owner, has ended, or we have turned away from it."""
        poller = zmq.Poller()
        poller.register(self.death_read, zmq.POLLIN)
        return bool(poller.poll(0))

    def poll(self, socket: zmq.Socket, timeout_s: float | None = None) -> bool:
        """Wait until the socket can be read (True), or the core is dead or time is up (False)."""
        return poll_socket(socket, self.death_read, timeout_s)

    def ask_for_ready(self, timeout_s: float) -> None:
        """Ask the core for its `READY`, which it answers as soon as it is up.

        Raises:
            EngineStartError: the core does not connect in time, or is dead.
        """
        give_up_s = time.monotonic() + timeout_s
        while True:
            try:
                self.input.send_multipart([b"0", MessageType.ATTACH.value])
                return
            except zmq.ZMQError as error:  # no route yet: it connects in the background
                if self.is_dead or time.monotonic() > give_up_s:
                    raise EngineStartError(f"the engine core cannot be reached: {error}") from error
                time.sleep(_RETRY_S)

    def wait(self, timeout_s: float) -> None:
        """The process is not ours to wait for."""

    def death(self) -> EngineDeadError:
        """The error that tells of the core's end."""
        if self.stopping:
            return EngineDeadError("the engine has been shut down")
        how = ""
        if self.failure is not None:
            how = f"{self.failure.error_class}: {self.failure.message}"
        where = self._death_record.where(self.failure, how)
        said = f" ({how})" if how else ""
        return EngineDeadError(f"the engine core died{said}; its owner's log says why.{where}")

    def kill(self) -> None:
        """Turn away from it: whoever waits for it waits no more. `close` has still to follow.

        For any thread.
        """
        self.stopping = True  # `_watch` looks

    def close(self) -> None:
        """Close the sockets; harmless when called twice."""
        if self.is_foreign or self._is_closed:
            return
        self.stopping = self._is_closed = True
        self.context.destroy(linger=500)
        self._monitor.join()
        for end in (self._end_of_core, self.death_read):
            os.close(end)

    def _watch(self) -> None:
        poller = zmq.Poller()
        poller.register(self._end_of_core, zmq.POLLIN)
        while not self.stopping and not poller.poll(_WATCH_MS):
            pass
        is_death = not self.stopping
        os.close(self._death_write)  # makes the other end readable, for good
        if is_death and self._on_death is not None:
            self._on_death()
