"""Text of a model in, pieces of a chat's answer out: `ChatOutputParser`.

Knows the order of things: reasoning first, then content and calls. The reasoning's tags are known
to `engine.server.openai.reasoning`, the forms of calls to the formats beside this file. An answer
in one piece is made by the same object, so that it cannot differ from a streamed one.
"""

from engine.server.openai.reasoning.tags import ReasoningParser
from engine.server.openai.tools.call_parser import CallParser
from engine.server.openai.tools.pieces import ChatOutput, Content, Piece, Reasoning, gather

MAX_FEED = 4096
"""Characters that are read at a time, because parsers copy what they have not settled yet."""


class ChatOutputParser:
    """Reads the text of one answer (one choice) as it comes.

    However the text is cut into deltas, the pieces add up to the same answer. Pieces are final:
    what may yet turn out to be a tag or a call is held back until it is decided. What looked like
    the beginning of a tag or of a call when the answer ended is content; a call that was cut off
    amid its arguments has the arguments so far.

    Args:
        calls: reads calls; None where the answer can have none.
        reasoning: reads reasoning; None where the answer can have none.
        include_reasoning: False drops the reasoning instead of reporting it.
    """

    __slots__ = ("_calls", "_include_reasoning", "_reasoning", "is_plain")

    def __init__(
        self,
        calls: CallParser | None = None,
        reasoning: ReasoningParser | None = None,
        *,
        include_reasoning: bool = True,
    ) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._include_reasoning = include_reasoning
        self.is_plain = calls is None and reasoning is None
        """Whether all text is content: `feed` may then be left out."""

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def is_within_call(self) -> bool:
        """Whether a call has begun but not ended; behind `finish`, whether it was broken off."""
        return self._calls is not None and self._calls.is_within_call

    def feed(self, text: str) -> list[Piece]:
        """What this much more text settles; often nothing."""
        if len(text) > MAX_FEED:
            parts = [text[i : i + MAX_FEED] for i in range(0, len(text), MAX_FEED)]
            return [piece for part in parts for piece in self.feed(part)]
        if self._reasoning is None:
            return self._answer(text)
        thought, text = self._reasoning.feed(text)
        if thought and self._include_reasoning:
            return [Reasoning(thought), *self._answer(text)]
        return self._answer(text)

    def finish(self) -> list[Piece]:
        """What is left when the text has ended; call it once, then no more."""
        pieces: list[Piece] = []
        if self._reasoning is not None:
            thought, text = self._reasoning.finish()
            if thought and self._include_reasoning:
                pieces.append(Reasoning(thought))
            pieces += self._answer(text)
        if self._calls is not None:
            pieces += self._calls.finish()
        return pieces

    def parse(self, text: str) -> ChatOutput:
        """The whole answer of a whole text; of a fresh parser."""
        return gather([*self.feed(text), *self.finish()])

    def _answer(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [Content(text)] if self._calls is None else self._calls.feed(text)
