"""Several frontends over one core ask each other, so that one of them can answer for all.

    ask:     [name, arguments] ──▶          ◀── [True, answer] or [False, why not]
    follow:  [name, arguments] ──▶          ◀── message, message, … until either side ends it

Each listens at a socket of its own in the core's private folder, which nobody else can open.
Messages are those of `engine.types.framing`. Knows no route and no engine; what can be asked is
registered by those who know the answers.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.log import get_logger
from engine.types.framing import HEAD_BYTES, body_length, framed

logger = get_logger(__name__)

TIMEOUT_S = 2.0
"""How long the others get to answer; one that is stopped, or busy, must not hold the asker up."""

Answerer = Callable[..., Awaitable[Any]]
Teller = Callable[..., AsyncGenerator[Any, None]]


class PeerError(Exception):
    """Another frontend cannot be reached, or does not answer as it should."""


class PeerAnswers(NamedTuple):
    """What the other frontends have said."""

    by_index: Mapping[int, Any]
    """The answers of those that have answered, in order."""
    silent: tuple[int, ...]
    """Those that have not, in time or at all."""


class Peers:
    """One frontend's way to the others.

    Args:
        directory: the private folder that all frontends of the core share.
        index: which one this is.
        num_frontends: how many there are; they are numbered from 1.

    Attributes:
        answerers: what the others may ask, by name: coroutine functions.
        tellers: what they may follow, by name: asynchronous generators.
    """

    def __init__(self, directory: str, index: int, num_frontends: int) -> None:
        self.index = index
        self.others = tuple(one for one in range(1, num_frontends + 1) if one != index)
        self.answerers: dict[str, Answerer] = {}
        self.tellers: dict[str, Teller] = {}
        self._directory = Path(directory)
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Answer the others from now on.

        Raises:
            OSError: the socket cannot be made.
        """
        path = self._path(self.index)
        path.unlink(missing_ok=True)  # of one that was here before us, and has died
        self._server = await asyncio.start_unix_server(self._accept, path)

    async def close(self) -> None:
        """Answer nobody any more; harmless when called twice, or before the start."""
        if self._server is not None:
            self._server.close()
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def ask(self, name: str, *arguments: Any, timeout_s: float | None = None) -> PeerAnswers:
        """Ask all others at once, and wait for them no longer than that; `TIMEOUT_S` if None."""
        timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        results = await asyncio.gather(
            *[self._ask_one(other, [name, *arguments], timeout_s) for other in self.others],
            return_exceptions=True,
        )
        answers: dict[int, Any] = {}
        silent = []
        for other, result in zip(self.others, results, strict=True):
            if isinstance(result, BaseException):
                logger.debug("frontend %d did not answer %s: %r", other, name, result)
                silent.append(other)
            else:
                answers[other] = result
        return PeerAnswers(answers, tuple(silent))

    async def follow(self, other: int, name: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """What another frontend tells, message by message, until it ends.

        Raises:
            PeerError: it cannot be reached, or has gone.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._path(other))
            with contextlib.closing(writer):
                await _send(writer, framed([name, *arguments]))
                while True:
                    yield await _receive(reader)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            raise PeerError(f"frontend {other}: {error!r}") from error

    async def _ask_one(self, other: int, question: list[Any], timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(self._path(other))
            with contextlib.closing(writer):
                await _send(writer, framed(question))
                is_answer, answer = await _receive(reader)
        if not is_answer:
            raise PeerError(answer)
        return answer

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: asyncio's logs that it has been cancelled.
        task = asyncio.create_task(self._serve(reader, writer), name="serve another frontend")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: one question, or one follower."""
        try:
            name, *arguments = await _receive(reader)
            teller = self.tellers.get(name)
            if teller is None:
                await _send(writer, await self._answer(name, arguments))
            else:
                await self._tell(teller(*arguments), reader, writer)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            logger.debug("another frontend has left: %r", error)
        except Exception:  # ours; the follower hears no more, and asks again
            logger.exception("what another frontend wants to know cannot be told")
        finally:
            writer.close()

    async def _answer(self, name: str, arguments: list[Any]) -> bytes:
        answerer = self.answerers.get(name)
        if answerer is None:
            return framed([False, f"nothing is known of {name!r}"])
        try:
            return framed([True, await answerer(*arguments)])
        except Exception as error:  # ours; the asker says that we did not answer
            logger.exception("the question %r of another frontend has failed", name)
            return framed([False, repr(error)])

    @staticmethod
    async def _tell(
        messages: AsyncGenerator[Any, None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Hand on what there is to tell, until the follower leaves: it says nothing else."""

        async def tell() -> None:
            async with contextlib.aclosing(messages):
                async for message in messages:
                    await _send(writer, framed(message))

        telling = asyncio.create_task(tell(), name="tell another frontend")
        leaving = asyncio.create_task(reader.read(1), name="another frontend leaves")
        try:
            await asyncio.wait([telling, leaving], return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                telling.result()
        finally:
            telling.cancel()
            leaving.cancel()
            await asyncio.gather(telling, leaving, return_exceptions=True)

    def _path(self, index: int) -> Path:
        return self._directory / f"frontend.{index}"


async def _send(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(frame)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    num_bytes = body_length(await reader.readexactly(HEAD_BYTES))
    return msgspec.msgpack.decode(await reader.readexactly(num_bytes))
