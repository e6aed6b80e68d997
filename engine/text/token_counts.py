"""How many tokens a text has at least, found without tokenizing it.

Knows what every tokenizer of the usual kinds does: cover the text, from its beginning to its end,
with pieces of the vocabulary. Where each piece ends as far behind as any could that begins there or
before, there are as few of them as can be; no tokenizer, whatever its merges and splits, has fewer.
Does not know requests or contexts.

Nothing is said of tokenizers that may drop text, or take any run of it as one unknown token.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import models

from engine.text.token_bytes import byte_alphabet

_BLOCK_BYTES = 1 << 16
_GRAMS = (8, 4, 2)
"""Pieces are told apart by this many of their first bytes, the largest number that they have."""
_BYTE_PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)}
_SPLITTERS = frozenset(("Split", "Digits", "Punctuation", "UnicodeScripts"))
_WORD_START = "\u2581"
"""How SentencePiece spells a space."""
_SPACES = re.compile(
    rb"[\x80-\xbf]*"  # the rest of a character
    rb"(?:[\t-\r\x1c-\x20]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2(?:\x80[\x80-\x8a\xa8\xa9\xaf]|"
    rb"\x81\x9f|\x96\x81)|\xe3\x80\x80)*"
)
_STARTER = re.compile("[\0-\u02ff\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3]")
"""Characters that NFC never changes for the sake of what stands before them."""
_FURTHEST_BACK = 1000
"""Characters that are searched for one of them."""


class _Text(NamedTuple):
    """How a tokenizer's text differs from what it was given, as far as pieces tell."""

    is_byte_level: bool
    spells_spaces: bool
    """Whether spaces become `_WORD_START`."""
    prefix: str
    """What may stand in front of a text, and behind every added token."""
    composes: bool
    """Whether characters are composed (NFC)."""
    dropped: bytes
    """Bytes for which a byte-level vocabulary has no piece, so that they add none."""


class TokenCounts:
    """Lower bounds for one tokenizer. Threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer, text: _Text) -> None:
        self._text = text
        self._normalizer = backend.normalizer if text.composes else None
        added = backend.get_added_tokens_decoder().values()
        self._takes_spaces = any(token.lstrip or token.rstrip for token in added)
        contents = [token.content for token in added]
        apart = [token.content for token in added if not token.normalized]
        apart.sort(key=len, reverse=True)
        self._apart = re.compile("(" + "|".join(map(re.escape, apart)) + ")") if apart else None
        pieces = set(self._pieces(backend.get_vocab(with_added_tokens=False), contents))
        self._longest = max(map(len, pieces))
        self._two, self._tables = _tables(pieces)

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> "TokenCounts | None":
        """The bounds of a tokenizer; None if it does not simply cover texts with its pieces."""
        text = _read(backend)
        return None if text is None else cls(backend, text)

    def at_least(self, text: str, enough: int) -> int:
        """Tokens that a text without lone surrogates has at least.

        Args:
            enough: what is there to be known; looking further ends when there are so many.
        """
        if self._normalizer is None:
            return self._count(self._encoded(self._spelled(text)), enough)
        found, size = 0, 16 * enough
        while found < enough:
            end = len(text) if size >= len(text) else _cut_before(text, size)
            found = max(found, self._count(self._encoded(self._composed(text[:end])), enough))
            if size >= len(text):
                break
            size *= 4
        return found

    def _spelled(self, text: str) -> str:
        return text.replace(" ", _WORD_START) if self._text.spells_spaces else text

    def _encoded(self, text: str) -> bytes:
        return text.encode().translate(None, self._text.dropped)

    def _composed(self, text: str) -> str:
        """The text as NFC makes it, which most added tokens keep apart."""
        assert self._normalizer is not None
        parts = [text] if self._apart is None else self._apart.split(text)
        parts[::2] = [self._normalizer.normalize_str(part) for part in parts[::2]]
        return "".join(parts)

    def _count(self, data: bytes, enough: int) -> int:
        """Pieces that cover these bytes at least, however little of the last one is in them."""
        if not self._takes_spaces and -(-len(data) // self._longest) >= enough:
            return -(-len(data) // self._longest)
        skip = _SPACES if self._takes_spaces else None
        count, far = 0, 0
        position = skip.match(data).end() if skip else 0  # type: ignore[union-attr]
        for begin in range(0, len(data), _BLOCK_BYTES):
            if position >= begin + _BLOCK_BYTES:
                far = position
                continue
            ends = self._ends(data, begin, far)
            while position < begin + len(ends):
                position = ends[position - begin]
                if skip is not None:
                    position = skip.match(data, position).end()  # type: ignore[union-attr]
                count += 1
                if count >= enough:
                    rest = 0 if skip else -(-max(0, len(data) - position) // self._longest)
                    return count + rest
            far = ends[-1]
        return count

    def _ends(self, data: bytes, begin: int, far: int) -> list[int]:
        """For each byte of a block, where pieces that begin there or before end at the latest."""
        num = min(_BLOCK_BYTES, len(data) - begin)
        window = np.frombuffer(data, np.uint8, min(num + 8, len(data) - begin), begin)
        known = len(window) - 7  # positions of which eight bytes are known
        lengths = np.full(num, self._longest, np.int64)
        if known > 0:
            two = window[:-1].astype(np.uint64) << np.uint64(8) | window[1:]
            four = two[:-2] << np.uint64(16) | two[2:]
            eight = four[:-4] << np.uint64(32) | four[4:]
            num_known = min(num, known)
            found = self._two[two[:num_known]]
            for grams, (keys, longest) in zip((eight, four), self._tables, strict=True):
                grams = grams[:num_known]
                places = np.minimum(np.searchsorted(keys, grams), len(keys) - 1)
                found = np.maximum(found, np.where(keys[places] == grams, longest[places], 1))
            lengths[:num_known] = found
        lengths += np.arange(begin, begin + num)
        lengths[0] = max(lengths[0], far)
        ends: list[int] = np.maximum.accumulate(lengths).tolist()
        return ends

    def _pieces(self, vocabulary: Iterable[str], added: Iterable[str]) -> Iterable[bytes]:
        letters = {ord(letter): byte for letter, byte in byte_alphabet().items()}
        prefix, dropped = self._text.prefix, self._text.dropped
        for piece in vocabulary:
            if not self._text.is_byte_level:
                data = b"\0" if piece in _BYTE_PIECES else piece.encode()
            else:  # one with other letters than those for bytes is no part of a text
                data = piece.translate(letters).encode("latin-1", "replace")
                data = data.translate(None, dropped)
            yield data
            if prefix:
                yield data.removeprefix(prefix.encode())
        for content in added:
            yield self._encoded(self._spelled(content))
            if self._normalizer is not None:
                yield self._encoded(self._normalizer.normalize_str(content))


def _tables(
    pieces: Iterable[bytes],
) -> tuple[np.ndarray, tuple[tuple[np.ndarray, np.ndarray], ...]]:
    """The longest piece for each beginning: of two bytes [65536], of eight and of four bytes."""
    by_gram: dict[int, dict[int, int]] = {size: {} for size in _GRAMS}
    for piece in pieces:
        for size in _GRAMS:
            if len(piece) >= size:
                gram = int.from_bytes(piece[:size], "big")
                table = by_gram[size]
                table[gram] = max(len(piece), table.get(gram, 0))
                break
    two = np.ones(1 << 16, np.int64)
    for gram, longest in by_gram[2].items():
        two[gram] = longest
    tables = []
    for size in _GRAMS[:2]:
        grams = sorted(by_gram[size]) or [0]
        values = [by_gram[size].get(gram, 1) for gram in grams]
        tables.append((np.array(grams, np.uint64), np.array(values, np.int64)))
    return two, tuple(tables)


def _cut_before(text: str, size: int) -> int:
    """Where to cut a text so that NFC makes of the beginning what it makes of it in the whole."""
    for end in range(size, max(0, size - _FURTHEST_BACK), -1):
        if _STARTER.match(text, end):
            return end
    return 0


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _read(backend: tokenizers.Tokenizer) -> _Text | None:
    """What a tokenizer does to texts; None if it may drop some, or does what is not known here."""
    pre, normalizer = _state(backend.pre_tokenizer), _state(backend.normalizer)
    steps = [] if pre is None else pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    is_byte_level, spells_spaces, prefix = False, False, ""
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            is_byte_level = True
            prefix = " " if step["add_prefix_space"] else prefix
        elif kind == "Metaspace" and step["replacement"] == _WORD_START:
            spells_spaces = True
            prefix = prefix if step["prepend_scheme"] == "never" else _WORD_START
        elif kind == "Metaspace" and step["replacement"] == " ":  # the next one spells it
            prefix = _WORD_START
        elif kind not in _SPLITTERS or step.get("behavior") == "Removed":
            return None
    if prefix == " " and len(steps) > 1:  # in front of every word
        return None
    composes = normalizer is not None and normalizer["type"] == "NFC"
    if normalizer is not None and not composes:
        parts = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
        for part in parts:
            if part["type"] == "Prepend" and part["prepend"] == _WORD_START:
                prefix = _WORD_START
            elif part["type"] == "Replace" and (part["pattern"], part["content"]) == (
                {"String": " "},
                _WORD_START,
            ):
                spells_spaces = True
            else:
                return None
    added = backend.get_added_tokens_decoder().values()
    if composes and (spells_spaces or any(token.single_word for token in added)):
        return None
    if is_byte_level and spells_spaces:
        return None
    dropped = _dropped_bytes(backend, is_byte_level)
    if dropped is None:
        return None
    return _Text(is_byte_level, spells_spaces, prefix, composes, dropped)


def _dropped_bytes(backend: tokenizers.Tokenizer, is_byte_level: bool) -> bytes | None:
    """Bytes that are left out of any text; None if several may become one unknown token."""
    model, vocabulary = backend.model, backend.get_vocab(with_added_tokens=False).keys()
    if isinstance(model, models.BPE):
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            return None
        has_unknown, falls_back = model.unk_token is not None, model.byte_fallback
    elif isinstance(model, models.Unigram):
        has_unknown, falls_back = True, _state(model)["byte_fallback"]  # type: ignore[index]
    else:
        return None
    if not is_byte_level:
        has_bytes = all(
            piece in vocabulary or (byte < 0x80 and chr(byte) in vocabulary)
            for piece, byte in _BYTE_PIECES.items()
        )
        return b"" if falls_back and has_bytes else None
    missing = [byte for letter, byte in byte_alphabet().items() if letter not in vocabulary]
    return None if missing and (has_unknown or falls_back) else bytes(missing)
