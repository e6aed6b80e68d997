"""One request's outputs on their way from the output handler to whoever awaits them.

Holds at most one output: what comes while the reader is busy is merged into it, so a reader that
stalls costs no more than the text that it has not read. Knows no engine and no socket.
"""

import asyncio
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

from engine.types.outputs import CompletionOutput, RequestOutput
from engine.types.sampling import RequestOutputKind


class RequestStream:
    """Async iterator over the outputs of one request; ends behind the last one.

    Leave it before its end through `close`, or the engine goes on for nobody.
    """

    def __init__(
        self, request_id: str, kind: RequestOutputKind, *, on_close: Callable[[str], None]
    ) -> None:
        self.request_id = request_id
        self._is_delta = kind is RequestOutputKind.DELTA
        self._on_close = on_close
        self._held: RequestOutput | None = None
        self._error: Exception | None = None
        self._is_done = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Hand an output over, or merge it into the one that is still held.

        What comes behind an error is dropped: a slow reader would else never get to the error.
        """
        if self._error is not None:
            return
        if self._held is None:
            self._held = output
        else:
            self._held = _merge(self._held, output, is_delta=self._is_delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream: the reader gets what is held, and then this error."""
        self._error = self._error or error
        self._wake()

    def close(self) -> None:
        """Want no more; a request that has not finished is aborted. Harmless when called twice."""
        if not self._is_done:
            self._is_done = True
            self._on_close(self.request_id)

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while self._held is None:
            if self._is_done:
                raise StopAsyncIteration
            if self._error is not None:
                self.close()
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self._held = self._held, None
        if output.finished:
            self.close()
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


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
