"""One request's outputs on their way from the output handler to whoever awaits them.

Two ends: the handler puts outputs into an `OutputSlot`, and a task reads them from a
`RequestStream`. The slot holds at most one output: what comes while the reader is busy is merged
into it, so a reader that stalls costs no more than the text that it has not read. Knows no engine
and no socket.
"""

import asyncio
import sys
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

from engine.errors import EventLoopError
from engine.types.outputs import CompletionOutput, RequestOutput
from engine.types.sampling import RequestOutputKind


class OutputSlot:
    """The writer's end, which it may hold for as long as it likes: the reader's end lives alone.

    Through the slot, the task that waits for an output is held too, as any that waits for a socket.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self._is_delta = kind is RequestOutputKind.DELTA
        self._held: RequestOutput | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.error: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        """Hand an output over, or merge it into the one that is still held.

        What comes behind an error is dropped: a slow reader would else never get to the error.
        """
        if self.error is not None:
            return
        if self._held is None:
            self._held = output
        else:
            self._held = _merge(self._held, output, is_delta=self._is_delta)
        self.wake()

    def fail(self, error: Exception) -> None:
        """End the stream: the reader gets what is held, and then this error."""
        self.error = self.error or error
        self.wake()

    def take(self) -> RequestOutput | None:
        """What is held, if anything."""
        output, self._held = self._held, None
        return output

    async def wait(self) -> None:
        """Wait for the next `put`, `fail` or `wake`; one task at a time."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def wake(self) -> None:
        """Let the reader look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RequestStream:
    """Async iterator over the outputs of one request, for one task; ends behind the last one.

    Leave it before its end through `close`; one that is dropped is closed soon, too.

    Args:
        request_id: whose outputs they are.
        kind: which part of the output the reader wants when.
        on_close: called once with the id, when the end has been read or the reader has left.
        loop: the only loop that may read; any, if None.

    Attributes:
        slot: where outputs are put in.
    """

    def __init__(
        self,
        request_id: str,
        kind: RequestOutputKind,
        *,
        on_close: Callable[[str], None],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._is_done = False
        self._is_being_read = False
        self._on_close = on_close
        self._loop = loop
        self.request_id = request_id
        self.slot = OutputSlot(kind)

    def fail(self, error: Exception) -> None:
        """End the stream: the reader gets what it has not read yet, and then this error."""
        self.slot.fail(error)

    def close(self) -> None:
        """Want no more; a request that has not finished is aborted. Harmless when called twice."""
        if not self._is_done:
            self._is_done = True
            self._on_close(self.request_id)
            self.slot.wake()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            EventLoopError: another task is waiting for it, or this is not the engine's loop.
            EngineDeadError, or what else the stream was failed with: behind all outputs before it.
        """
        self._check_reader()
        self._is_being_read = True
        try:
            while (output := self.slot.take()) is None:
                if self._is_done:
                    raise StopAsyncIteration
                if self.slot.error is not None:
                    self.close()
                    raise self.slot.error
                await self.slot.wait()
        finally:
            self._is_being_read = False
        if output.finished:
            self.close()
        return output

    def _check_reader(self) -> None:
        if self._is_being_read:
            raise EventLoopError(
                f"another task is reading the stream of request {self.request_id!r}; each output "
                "goes to one reader: let one task read and pass on, or send a request for each."
            )
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise EventLoopError(
                f"the stream of request {self.request_id!r} belongs to another event loop: read it "
                "on the one that its AsyncLLM was started on."
            )

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # In whatever thread the garbage is collected; the engine is one thread's. When the
        # interpreter ends, the engine has been closed, and modules are taken apart.
        if not self._is_done and not _is_finalizing():
            self._is_done = True
            if self._loop is None:
                self._on_close(self.request_id)
            elif not self._loop.is_closed():  # else nobody reads anything any more
                self._loop.call_soon_threadsafe(self._on_close, self.request_id)


def _merge(held: RequestOutput, new: RequestOutput, *, is_delta: bool) -> RequestOutput:
    """One output that says what both say."""
    by_index = {completion.index: completion for completion in held.outputs}
    for completion in new.outputs:
        before = by_index.get(completion.index)
        if before is not None and is_delta:
            completion = _append(before, completion)
        by_index[completion.index] = completion
    new.outputs = list(by_index.values())
    new.prompt_logprobs = new.prompt_logprobs or held.prompt_logprobs
    if new.error is None:
        new.error, new.error_kind = held.error, held.error_kind
    return new


def _append(before: CompletionOutput, delta: CompletionOutput) -> CompletionOutput:
    """The second delta, with the first in front of it.

    The lists of the first grow: copying them for each token would cost a reader that has stalled
    the square of what it has not read.
    """
    delta.text = before.text + delta.text
    delta.token_ids = _extended(before.token_ids, delta.token_ids)
    if before.logprobs is not None and delta.logprobs is not None:
        delta.logprobs = _extended(before.logprobs, delta.logprobs)
    return delta


def _extended(first: Any, second: Sequence[Any]) -> Any:
    """Both in a row: the first itself where it can grow."""
    if isinstance(first, MutableSequence):
        first.extend(second)
        return first
    return [*first, *second]
