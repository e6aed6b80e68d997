"""Which bytes each token adds to the text.

Knows the two decoders that nearly every language model uses, byte-level BPE and SentencePiece's,
with byte fallback or without: under both, a text is the concatenation of its tokens' bytes, so that
it can be made token by token. Does not know requests, prompts or stop strings.

Byte alphabet: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019.
"""

import codecs
import json
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import tokenizers

new_utf8_decoder = codecs.getincrementaldecoder("utf-8")
"""Makes a decoder that keeps the beginning of an unfinished character."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceDecoder(NamedTuple):
    """How vocabulary pieces turn into bytes."""

    to_bytes: Callable[[str], bytes]
    strips_leading_space: bool
    """Whether one space at the very beginning of a text is dropped."""


class TokenBytes(dict[int, bytes]):
    """Token id to the bytes that it adds to the text, each made when it is first asked for.

    Ids outside the vocabulary (padding of the embedding) and `skipped` ids add nothing.
    """

    __slots__ = ("_backend", "_skipped", "_to_bytes")

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        to_bytes: Callable[[str], bytes],
        *,
        skipped: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._backend = backend
        self._to_bytes = to_bytes
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        piece = None if token_id in self._skipped else self._backend.id_to_token(token_id)
        value = self[token_id] = b"" if piece is None else self._to_bytes(piece)
        return value


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling: each of 256 printable characters and the byte that it stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(256 + index), byte) for index, byte in enumerate(others))
    return alphabet


def piece_decoder(backend: tokenizers.Tokenizer) -> PieceDecoder | None:
    """How this tokenizer's pieces turn into bytes; None if its decoder works in another way."""
    if backend.decoder is None:
        return None
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return PieceDecoder(_byte_level_bytes, strips_leading_space=False)
    strips = kinds[-1] == "Strip"
    falls_back = kinds[1:2] == ["ByteFallback"]
    if kinds != ["Replace"] + ["ByteFallback"] * falls_back + ["Fuse"] + ["Strip"] * strips:
        return None
    pattern, content = steps[0]["pattern"].get("String"), steps[0]["content"]
    if pattern is None:
        return None
    if strips and (steps[-1]["content"], steps[-1]["start"], steps[-1]["stop"]) != (" ", 1, 0):
        return None
    to_bytes = partial(_byte_fallback_bytes if falls_back else _plain_bytes, pattern, content)
    return PieceDecoder(to_bytes, strips_leading_space=strips)


def _byte_level_bytes(piece: str) -> bytes:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[character] for character in piece])
    except KeyError:  # an added token written as plain text
        return piece.encode()


def _plain_bytes(pattern: str, content: str, piece: str) -> bytes:
    return piece.replace(pattern, content).encode()


def _byte_fallback_bytes(pattern: str, content: str, piece: str) -> bytes:
    text = piece.replace(pattern, content)
    match = _BYTE_PIECE.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.encode()
