"""The one task that takes every message of the core in, and the open streams that it serves.

Knows how streams end: read, left, dropped, aborted, or with the engine. Does not know how requests
are made.
"""

import asyncio
import contextlib

from engine.errors import EngineDeadError
from engine.frontend.llm_engine import LLMEngine
from engine.frontend.output_stream import OutputSlot, RequestStream
from engine.log import get_logger
from engine.transport.async_mp_client import AsyncMPClient
from engine.types.sampling import RequestOutputKind

logger = get_logger(__name__)


class OutputHandler:
    """Begins to receive when it is made, on the event loop that it belongs to from then on.

    Attributes:
        dead_error: why no outputs come any more; None while they do.
    """

    def __init__(self, engine: LLMEngine) -> None:
        client = engine.engine_core
        assert isinstance(client, AsyncMPClient)
        self._engine = engine
        self._client = client
        self._slots: dict[str, OutputSlot] = {}
        self._loop = asyncio.get_running_loop()
        self.dead_error: EngineDeadError | None = None
        client.attach()
        self._task = asyncio.create_task(self._run(), name="output handler")
        # It never ends by itself. Where a script leaves its loop open, that is no fault of its own.
        self._task._log_destroy_pending = False  # type: ignore[attr-defined]

    @property
    def num_open(self) -> int:
        """Streams whose end has not been read, and whose reader has not left."""
        return len(self._slots)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request's outputs are still to come, or to be read."""
        return request_id in self._slots or request_id in self._engine.output_processor

    def open(self, request_id: str, kind: RequestOutputKind) -> RequestStream:
        """The stream of a request that is sent next.

        It is held by its reader alone: dropped, it ends the request.
        """
        stream = RequestStream(request_id, kind, on_close=self._release, loop=self._loop)
        self._slots[request_id] = stream.slot
        return stream

    def fail_all(self, error: Exception) -> None:
        """End every request; its reader gets what it has not read yet and then this error."""
        for slot in self._slots.values():
            slot.fail(error)
        self._discard(list(self._slots))

    async def wait(self) -> EngineDeadError:
        """Wait until no outputs come any more; returns why."""
        await asyncio.wait([self._task])
        assert self.dead_error is not None
        return self.dead_error

    async def stop(self) -> None:
        """End every stream with EngineDeadError, and receive no more; harmless when called twice.

        From another event loop only once that of the handler has been closed.
        """
        error = EngineDeadError("the engine has been shut down")
        if self._loop.is_closed():
            self._end(error)
        else:
            self._give_up(error)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._client.detach()

    async def _run(self) -> None:
        """Take each message of the core in, and hand its outputs to their streams."""
        client, engine, slots = self._client, self._engine, self._slots
        try:
            while True:
                message = await client.get_output_async()
                for output in engine.take(message):
                    slot = slots.get(output.request_id)
                    if slot is not None:
                        slot.put(output)
                await asyncio.sleep(0)  # a backlog of messages must not keep readers waiting
        except EngineDeadError as error:
            self._end(error)
        except asyncio.CancelledError:
            self._give_up(EngineDeadError("the event loop has cancelled the output handler"))
            raise
        except Exception as error:  # ours; nobody would get outputs any more
            logger.exception("the output handler failed")
            self._give_up(EngineDeadError(f"the output handler failed: {error!r}"))

    def _give_up(self, error: EngineDeadError) -> None:
        """End, while the core may well live."""
        with contextlib.suppress(EngineDeadError):  # the core would go on for nobody
            self._engine.abort_request(self._engine.output_processor.unfinished_ids())
        self._end(error)

    def _end(self, error: EngineDeadError) -> None:
        if self.dead_error is None:
            self.dead_error = error
            self._engine.bury(error)
            if not self._loop.is_closed():  # else nobody reads any more
                self.fail_all(error)

    def _release(self, request_id: str) -> None:
        """The end of a stream has been read, or its reader has left."""
        self._slots.pop(request_id)
        self._discard([request_id])

    def _discard(self, request_ids: list[str]) -> None:
        """End requests in the core, those that have not finished."""
        running = [one for one in request_ids if one in self._engine.output_processor]
        try:
            if running:
                self._engine.discard_request(running)
        except EngineDeadError:
            # The task learns of it too, and buries all requests, these included.
            logger.debug("requests %s were left after the engine's death", running)
