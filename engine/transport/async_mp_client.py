"""The core's client on an event loop: any number of tasks send, one takes outputs.

Sending never waits, so `add_request` and `abort_requests` are plain calls, made on the loop's own
thread. Outputs are read when the socket's descriptor says so. Knows asyncio; knows no request.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Coroutine
from typing import Any

import msgspec
import zmq

from engine.errors import EngineDeadError, EventLoopError
from engine.transport.mp_client import MPClient, unwrap
from engine.types.messages import EngineCoreFailure, EngineCoreOutputs, MessageType


class AsyncMPClient(MPClient):
    """Asyncio client. Start it in any thread (`wait_ready` blocks), then `attach` it to a loop.

    `get_output` and `call_utility` are for other threads than the loop's; on the loop use the
    coroutines `get_output_async` and `call_utility_async`.
    """

    # asyncio and servers take Ctrl-C between two callbacks; what raises amid one ends the loop.
    uninterrupted = staticmethod(contextlib.nullcontext)

    _loop: asyncio.AbstractEventLoop | None = None
    _death: EngineDeadError | None = None

    def attach(self) -> None:
        """Receive on the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[EngineCoreOutputs] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._loop.add_reader(self._core.output.fileno(), self._take_messages)
        self._loop.add_reader(self._core.death_read, self._take_death)
        self._take_messages()  # the descriptor tells of changes only

    def detach(self) -> None:
        """Receive no more; whoever waits gets EngineDeadError. Harmless when called twice."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        death = EngineDeadError("the engine has been shut down")
        if loop.is_closed():  # it watches nothing any more, and wakes nobody
            self._death = self._death or death
            return
        loop.remove_reader(self._core.output.fileno())
        loop.remove_reader(self._core.death_read)
        self._end(death)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for the next outputs; one task at a time.

        Raises:
            EngineDeadError: the core has died.
            EventLoopError: the client is attached to another loop, or another task waits.
        """
        while not self._arrived:
            loop = self._attached_loop()
            if self._waiter is not None and not self._waiter.done():
                raise EventLoopError("another task takes the core's outputs; one has to pass on.")
            self._waiter = loop.create_future()
            await self._waiter
        return self._arrived.popleft()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call one of the core's utility methods and wait for its result.

        Raises:
            EngineDeadError: the core has died.
            EventLoopError: the client is attached to another loop.
        """
        answer: asyncio.Future[Any] = self._attached_loop().create_future()
        call_id = self._send_call(method, args)
        self._calls[call_id] = answer
        try:
            return unwrap(await answer)
        finally:
            self._calls.pop(call_id, None)

    def get_output(self) -> EngineCoreOutputs:
        return self._from_other_thread(self.get_output_async())

    def call_utility(self, method: str, *args: Any) -> Any:
        return self._from_other_thread(self.call_utility_async(method, *args))

    def _attached_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that runs, which has to be ours."""
        if self._death is not None:
            raise self._death.with_traceback(None)
        assert self._loop is not None, "attach() comes first"
        if self._loop is not asyncio.get_running_loop():
            raise EventLoopError(
                "the engine was started on another event loop; await its methods there."
            )
        return self._loop

    def _from_other_thread(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Have the loop run a coroutine, and wait for that, which must not be its own thread."""
        loop = self._loop
        try:
            if loop is None:
                raise self._death or EngineDeadError("the engine has been shut down")
            if loop is asyncio._get_running_loop():
                raise EventLoopError(
                    "this call waits for the event loop that makes it; await the method of that "
                    "name of AsyncLLM, or call through asyncio.to_thread."
                )
            if not loop.is_running():
                raise EventLoopError(
                    "the event loop that the engine was started on does not run: nobody would "
                    "answer."
                )
        except BaseException:
            coroutine.close()  # or Python warns that it has not been awaited
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    def _take_messages(self) -> None:
        """Take in all that has arrived: the descriptor will not tell of the rest again."""
        while self._death is None:
            try:
                kind, *frames = self._core.output.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if kind == MessageType.FAILED.value:
                self._core.failure = msgspec.msgpack.decode(frames[0], type=EngineCoreFailure)
                continue  # its process ends now, which `_take_death` will see
            outputs = self._decoder.decode(frames)
            if outputs.utility is None:
                self._arrived.append(outputs)
            elif (answer := self._calls.get(outputs.utility.call_id)) and not answer.done():
                answer.set_result(outputs.utility)
        if self._arrived:
            self._wake()

    def _take_death(self) -> None:
        assert self._loop is not None
        self._take_messages()  # what it said before its end
        self._loop.remove_reader(self._core.death_read)
        # Its last lines may take a second to come in, its last steps have to be written to a file.
        threading.Thread(
            target=self._learn_death, args=(self._loop,), name="EngineCoreDeath", daemon=True
        ).start()

    def _learn_death(self, loop: asyncio.AbstractEventLoop) -> None:
        death = self._core.death()
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(self._end, death)

    def _end(self, death: EngineDeadError) -> None:
        self._death = self._death or death
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(self._death)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
