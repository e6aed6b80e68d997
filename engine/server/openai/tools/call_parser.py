"""What parsers of calls have in common: a buffer, pieces, and which white space counts.

Knows nothing of any format. A parser's decisions depend on the text alone, never on where it was
cut into deltas: each step either consumes a settled beginning of the buffer or waits for more.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from engine.server.openai.tools.pieces import (
    Content,
    Piece,
    ToolCallArguments,
    ToolCallStart,
    new_call_id,
)
from engine.types.sampling_checks import encodable


class CallParser(ABC):
    """Finds calls in the text of one answer.

    White space right before a call is dropped, as is what follows the last call if nothing else
    does; all other text that is no call is content, letter by letter.

    Args:
        names: functions that may be called; formats without tags take nothing else for a call.
        max_calls: further calls are dropped; None is no limit.
        new_id: makes the ids of calls.
        hidden: tags that users do not see (special tokens), not even where they opened no call.
    """

    def __init__(
        self,
        *,
        names: Sequence[str] = (),
        max_calls: int | None = None,
        new_id: Callable[[], str] = new_call_id,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self.num_calls = 0
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._new_id = new_id
        self._hidden = hidden
        self._buffer = ""
        self._space = ""
        self._pieces: list[Piece] = []
        self._num_seen = 0

    def feed(self, text: str) -> list[Piece]:
        """What this much more text settles."""
        self._buffer += text
        while self._step(is_final=False):
            pass
        return self._take()

    def finish(self) -> list[Piece]:
        """What is left when the text has ended."""
        while self._step(is_final=True):
            pass
        self._write(self._consume(len(self._buffer)))
        if self._space and not self._num_seen:
            self._pieces.append(Content(self._space))
        return self._take()

    @property
    def is_within_call(self) -> bool:
        """Whether the last call that was reported has no end yet: at the text's end, broken off."""
        return self._is_open and not self._is_dropped

    @property
    @abstractmethod
    def _is_open(self) -> bool:
        """Whether the arguments of a call are being read."""

    @abstractmethod
    def _step(self, *, is_final: bool) -> bool:
        """Consume a settled beginning of the buffer or change state; False if neither can be."""

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _consume(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        return text

    def _skip_space(self) -> str:
        return self._consume(len(self._buffer) - len(self._buffer.lstrip()))

    def _write(self, text: str) -> None:
        """Emit content; white space waits for what comes next."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if not shown:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Content):
            self._pieces[-1] = Content(last.text + shown)
        else:
            self._pieces.append(Content(shown))

    def _start_call(self, name: str) -> None:
        self._space = ""
        self._num_seen += 1
        if self._is_dropped:
            return
        self._pieces.append(ToolCallStart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        if not text or self._is_dropped:
            return
        last = self._pieces[-1] if self._pieces else None
        index = self.num_calls - 1
        if isinstance(last, ToolCallArguments) and last.index == index:
            text = last.text + text
            self._pieces.pop()
        self._pieces.append(ToolCallArguments(index, text))

    @property
    def _is_dropped(self) -> bool:
        """Whether the call that is being read is one too many."""
        return self._max_calls is not None and self._num_seen > self._max_calls


def dump_arguments(arguments: Any) -> str:
    """Arguments as JSON text that UTF-8 can carry.

    Raises:
        ValueError: infinite or not a number, which JSON has no words for.
    """
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return text if encodable(text) else json.dumps(arguments, allow_nan=False)
