"""Where each token begins in the text of a completion: `text_offset` of its logprobs.

Counts characters of the text as it is answered, the echoed prompt included. A token that begins in
the middle of a character has that character's place; one that adds nothing, such as a special token
that is left out, has the place of what comes next. Knows bytes of tokens; knows no logprobs.
"""

from collections.abc import Sequence

from engine.text.detokenizer import MAX_INCOMPLETE_BYTES, REPLACEMENT
from engine.text.token_bytes import new_utf8_decoder
from engine.text.tokenizer import Tokenizer


class TextOffsets:
    """Offsets of tokens that become text one after the other, as the detokenizer makes it.

    Args:
        tokenizer: None where the engine has none; then there is no text.
        behind: token ids in front of the first one, whose text is not counted.
        start: the offset at which the text begins.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    __slots__ = ("_decoder", "_place", "_skipped", "_starts_character", "_strips", "_table")

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        behind: Sequence[int] = (),
        *,
        start: int = 0,
        skip_special_tokens: bool,
    ) -> None:
        self._place = start
        self._skipped: frozenset[int] = frozenset()
        self._table = None
        end = b""
        if tokenizer is not None:
            self._table = tokenizer.token_bytes_table(skip_special_tokens=skip_special_tokens)
            self._skipped = tokenizer.special_ids if skip_special_tokens else self._skipped
        if self._table is not None:
            for token_id in reversed(behind):
                end = self._table[token_id] + end
                if len(end) >= MAX_INCOMPLETE_BYTES:
                    break
        self._decoder = new_utf8_decoder("replace")
        self._decoder.decode(end[-MAX_INCOMPLETE_BYTES:])
        # What the detokenizer takes away from the text's beginning, too.
        self._starts_character = not self._is_in_character
        self._strips = tokenizer is not None and tokenizer.strips_leading_space and not end

    def take(self, token_id: int, text: str | None) -> int:
        """The next token's offset.

        Args:
            text: what the token adds, for tokenizers whose tokens are not known as bytes.
        """
        before = self._place
        if self._table is None:
            if token_id not in self._skipped:
                self._place += len(text or "")
            return before
        data = self._table[token_id]
        if not data:
            return before
        was_in_character = self._is_in_character
        first = self._decoder.decode(data[:1])
        goes_on = len(first) <= 1 and 0x80 <= data[0] < 0xC0
        if was_in_character and not goes_on and first:
            # The character before is incomplete: it counts as one, unless the prompt began it.
            before += int(self._starts_character)
        self._count(first)
        self._count(self._decoder.decode(data[1:]))
        return before

    @property
    def _is_in_character(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def _count(self, text: str) -> None:
        if not text:
            return
        dropped = 0
        if self._strips:
            dropped = int(text.startswith(" "))
        elif not self._starts_character:
            dropped = int(text.startswith(REPLACEMENT))
        self._strips, self._starts_character = False, True
        self._place += len(text) - dropped


def offsets_in_prompt(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> list[int]:
    """Where tokens begin in the text that they were made from, special tokens written in it
    included."""
    offsets: list[int] = []
    data, position, place = text.encode(), 0, 0
    for token_id in token_ids:
        piece = tokenizer.token_bytes(token_id)
        if position == 0 and tokenizer.strips_leading_space and not data.startswith(piece):
            piece = piece.removeprefix(b" ")
        if not data.startswith(piece, position):
            if token_id not in tokenizer.special_ids:
                return _offsets_by_spans(tokenizer, text, token_ids)
            piece = b""  # the tokenizer's own, which is not in the text
        is_inside = position < len(data) and _goes_on(data[position])
        offsets.append(place - int(is_inside))
        position += len(piece)
        place += sum(not _goes_on(byte) for byte in piece)
    if position != len(data):
        return _offsets_by_spans(tokenizer, text, token_ids)
    return offsets


def _goes_on(byte: int) -> bool:
    """Whether a byte of UTF-8 is none that a character begins with."""
    return byte & 0xC0 == 0x80


def _offsets_by_spans(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> list[int]:
    """The same for tokenizers that change texts, which say where each token came from."""
    spans: list[tuple[int, int]] = []
    for adds in (True, False):
        encoding = tokenizer.backend.encode(text, add_special_tokens=adds)
        if encoding.ids == list(token_ids):
            spans = encoding.offsets
            break
    offsets, end = [], 0
    for start, stop in spans or [(0, 0)] * len(token_ids):
        if start == stop or text[end:start].isspace():  # which some leave out of their spans
            start = end
        offsets.append(start)
        end = max(end, stop)
    return offsets
