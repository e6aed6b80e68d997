"""Turning one request's output tokens into text while they arrive.

Knows how much of the text is settled: no unfinished UTF-8 character and no beginning of a stop
string is ever shown. Does not know why a request ends, except for stop strings, which are found
here because they exist only in text.

The text is what the tokens add behind the prompt: decode(prompt + output) without decode(prompt).
Bytes that are not UTF-8 become one U+FFFD for each maximal invalid part (Unicode 15, table 3-8),
also under byte fallback, where `tokenizers` would blot out a whole run of byte tokens.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.text.stop_strings import StopStringMatcher
from engine.text.token_bytes import TokenBytes, new_utf8_decoder
from engine.text.tokenizer import Tokenizer
from engine.types.sampling import SamplingParams

REPLACEMENT = "\ufffd"
MAX_INCOMPLETE_BYTES = 3
"""An unfinished UTF-8 character has at most three bytes."""
NUM_CONTEXT_TOKENS = 6
"""How many prompt tokens `_WindowStream` looks back, so that spacing comes out right."""


class IncrementalDetokenizer:
    """Collects output tokens and makes no text: what requests without a tokenizer get.

    `create` gives the right kind for a request.
    """

    __slots__ = ("output_token_ids",)

    def __init__(self) -> None:
        self.output_token_ids: list[int] = []

    @staticmethod
    def create(
        tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: list[int]
    ) -> "IncrementalDetokenizer":
        """A detokenizer for one request; without text if nobody can make or wants it."""
        if tokenizer is None or not params.detokenize:
            return IncrementalDetokenizer()
        return TextDetokenizer(tokenizer, params, prompt_token_ids)

    def update(
        self, new_token_ids: list[int], *, finished: bool, stop_terminated: bool = False
    ) -> str | None:
        """Add one step's output tokens.

        Args:
            new_token_ids: in order; may be empty.
            finished: whether these are the last ones.
            stop_terminated: whether the last one is an end or stop token that ended the request;
                its text is left out unless the request wants it.

        Returns:
            The stop string that was hit, if any. Then the tokens behind it are dropped, the text
            ends at it, and the caller ends the request.
        """
        self.output_token_ids.extend(new_token_ids)
        return None

    def output_text(self, *, finished: bool, delta: bool) -> str:
        """The text that is settled: all of it, or (delta) what no delta has brought so far.

        All deltas together are the final text.
        """
        return ""


class TextDetokenizer(IncrementalDetokenizer):
    """Makes text at a constant cost per token."""

    __slots__ = (
        "_flushed",
        "_fresh",
        "_include_stop",
        "_matcher",
        "_min_tokens",
        "_stream",
        "_text",
        "_undelivered",
    )

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: list[int]
    ) -> None:
        super().__init__()
        self._stream = _create_stream(tokenizer, params, prompt_token_ids)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        stops = params.stop_strings
        self._matcher = StopStringMatcher(stops, include=self._include_stop) if stops else None
        self._flushed = False
        # Settled text twice: joined as far as someone asked for all of it, and as deltas to come.
        self._text = ""
        self._fresh: list[str] = []
        self._undelivered: list[str] = []

    def update(
        self, new_token_ids: list[int], *, finished: bool, stop_terminated: bool = False
    ) -> str | None:
        """See `IncrementalDetokenizer.update`."""
        visible = new_token_ids
        if stop_terminated and not self._include_stop:
            visible = new_token_ids[:-1]
        stop: str | None = None
        if self._matcher is None:
            self.output_token_ids.extend(visible)
            self._settle(self._stream.decode(visible))
        else:
            stop = self._match(visible)
        if stop is None:
            self.output_token_ids.extend(new_token_ids[len(visible) :])
            if finished:
                stop = self._flush()
        return stop

    def output_text(self, *, finished: bool, delta: bool) -> str:
        """See `IncrementalDetokenizer.output_text`."""
        if finished:
            self._flush()
        if delta:
            text = "".join(self._undelivered)
            self._undelivered.clear()
            return text
        if self._fresh:
            self._text = "".join([self._text, *self._fresh])
            self._fresh.clear()
        return self._text

    def _settle(self, text: str) -> None:
        if text:
            self._fresh.append(text)
            self._undelivered.append(text)

    def _match(self, token_ids: list[int]) -> str | None:
        """Add tokens one by one, so that the one that completes a stop string is the last."""
        assert self._matcher is not None
        for token_id in token_ids:
            self.output_token_ids.append(token_id)
            text = self._stream.decode((token_id,))
            if text and (stop := self._feed(text)) is not None:
                self._flushed = True
                return stop
        return None

    def _feed(self, text: str) -> str | None:
        assert self._matcher is not None
        may_stop = len(self.output_token_ids) > self._min_tokens
        text, stop = self._matcher.feed(text, may_stop=may_stop)
        self._settle(text)
        return stop

    def _flush(self) -> str | None:
        """Settle everything that was held back; the rest of a character becomes U+FFFD."""
        if self._flushed:
            return None
        self._flushed = True
        rest = self._stream.flush()
        if self._matcher is None:
            self._settle(rest)
            return None
        stop = self._feed(rest) if rest else None
        self._settle(self._matcher.flush())
        return stop


class _TextStream(Protocol):
    """Tokens in, text out."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        ...

    def flush(self) -> str:
        """What was kept of an unfinished character."""
        ...


def _create_stream(
    tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: list[int]
) -> _TextStream:
    table = tokenizer.token_bytes_table(skip_special_tokens=params.skip_special_tokens)
    if table is not None:
        return _ByteStream(
            table, prompt_token_ids, strips_leading_space=tokenizer.strips_leading_space
        )
    return _WindowStream(tokenizer, params, prompt_token_ids)


class _ByteStream:
    """Text as the concatenation of the tokens' bytes."""

    __slots__ = ("_at_start", "_decoder", "_in_character", "_table")

    def __init__(
        self, table: TokenBytes, prompt_token_ids: list[int], *, strips_leading_space: bool
    ) -> None:
        self._table = table
        self._decoder = new_utf8_decoder("replace")
        end = b""
        for token_id in reversed(prompt_token_ids):
            end = table[token_id] + end
            if len(end) >= MAX_INCOMPLETE_BYTES:
                break
        self._decoder.decode(end[-MAX_INCOMPLETE_BYTES:])
        # A character that the prompt began: either the output completes it, or the U+FFFD that
        # it becomes belongs to the prompt.
        self._in_character = bool(self._decoder.getstate()[0])
        self._at_start = strips_leading_space and not end

    def decode(self, token_ids: Sequence[int]) -> str:
        table = self._table
        data = b"".join([table[token_id] for token_id in token_ids])
        return self._clean(self._decoder.decode(data))

    def flush(self) -> str:
        return self._clean(self._decoder.decode(b"", final=True))

    def _clean(self, text: str) -> str:
        if text and self._at_start:
            self._at_start = False
            return text.removeprefix(" ")
        if text and self._in_character:
            self._in_character = False
            return text.removeprefix(REPLACEMENT)
        return text


class _WindowStream:
    """Text by decoding a short window of tokens twice, for decoders of any other kind.

    The window is the last settled tokens and the open ones behind them: what the open ones add to
    the settled ones is their text, with the spacing that they have in context.
    """

    __slots__ = ("_added", "_after_added", "_ids", "_num_settled", "_skipped", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: list[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        glued = not (params.skip_special_tokens or params.spaces_between_special_tokens)
        self._added = tokenizer.added_ids if glued else frozenset()
        self._after_added = False
        end = prompt_token_ids[-NUM_CONTEXT_TOKENS:]
        self._ids = [token_id for token_id in end if token_id not in self._skipped]
        self._num_settled = len(self._ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join([self._step(token_id) for token_id in token_ids])

    def flush(self) -> str:
        return self._settle(self._open_text())

    def _step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._open_text()
        num_open = len(self._ids) - self._num_settled
        if not text or (text.endswith(REPLACEMENT) and num_open <= MAX_INCOMPLETE_BYTES):
            return ""
        text = self._settle(text)
        is_added = token_id in self._added
        if is_added and self._after_added:
            text = self._tokenizer.id_to_token(token_id)
        self._after_added = is_added
        return text

    def _open_text(self) -> str:
        settled = self._decode(self._ids[: self._num_settled])
        whole = self._decode(self._ids)
        if whole.startswith(settled):
            return whole[len(settled) :]
        # The prompt ended within a character that is complete now.
        return whole[len(settled.rstrip(REPLACEMENT)) :]

    def _settle(self, text: str) -> str:
        if text:
            del self._ids[: self._num_settled]
            self._num_settled = len(self._ids)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
