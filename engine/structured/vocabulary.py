"""What each token adds to a text, as the grammar library is told: `Vocabulary`, `tokenizer_of`.

Special tokens add nothing, so that no grammar takes one for text, however it is spelled.
"""

from collections.abc import Callable
from typing import Any, cast

import msgspec


class Vocabulary(msgspec.Struct, frozen=True):
    """A model's tokens."""

    pieces: list[bytes]
    """By id; empty where a token adds nothing."""
    size: int
    """Width of the logits; ids behind the pieces add nothing."""
    end_token_ids: list[int]


class _Tokens:
    """The library's description of a tokenizer, a `TokenizerWrapper` by its attributes.

    Args:
        encode: a text's tokens, which need not add up to it.
    """

    is_tokenizer_wrapper = True
    special_token_ids = ()
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]] | None) -> None:
        missing = vocabulary.size - len(vocabulary.pieces)
        self.tokens = vocabulary.pieces + [b""] * missing
        self.eos_token_id = vocabulary.end_token_ids[0]
        self._encode = encode
        self._ids = {piece: id_ for id_, piece in enumerate(vocabulary.pieces) if piece}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of a text that is forced; the longest ones where the tokenizer adds to it."""
        data = text if isinstance(text, bytes) else text.encode()
        if self._encode is not None:
            ids = self._encode(data.decode(errors="replace"))
            if b"".join(self.tokens[id_] for id_ in ids) == data:
                return ids
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        position = 0
        while position < len(data):
            ends = range(min(len(data), position + self._longest), position, -1)
            end = next((end for end in ends if data[position:end] in self._ids), None)
            if end is None:  # no token: what comes before it is forced
                break
            ids.append(self._ids[data[position:end]])
            position = end
        return ids


def tokenizer_of(vocabulary: Vocabulary, encode: Callable[[str], list[int]] | None = None) -> Any:
    """The library's tokenizer.

    Args:
        encode: a text's tokens, without any that begin or end it.
    """
    from llguidance import LLTokenizer

    ends = [id_ for id_ in vocabulary.end_token_ids if id_ < vocabulary.size]
    return LLTokenizer(
        cast(Any, _Tokens(vocabulary, encode)), n_vocab=vocabulary.size, eos_token=ends or [0]
    )


def load_vocabulary(
    *,
    model: str | None,
    revision: str | None,
    download_dir: str | None,
    tokenizer: str | None,
    vocab_size: int,
    end_token_ids: list[int],
) -> tuple[Vocabulary, Callable[[str], list[int]]]:
    """The vocabulary of a model, and what encodes a text without special tokens around it.

    Raises:
        IsinglassError: the model has no tokenizer, or it cannot be read.
    """
    # Above this room: the one thing that structured outputs need of a tokenizer, read once.
    from engine.checkpoint.locate import resolve_model
    from engine.text.tokenizer import get_tokenizer

    source = resolve_model(model, revision, download_dir)
    words = get_tokenizer(source, name=tokenizer, download_dir=download_dir)
    pieces = [
        b"" if token_id in words.special_ids else words.token_bytes(token_id)
        for token_id in range(min(vocab_size, words.max_token_id + 1))
    ]
    # An end token adds nothing, even where the tokenizer does not call it special.
    for token_id in end_token_ids:
        if token_id < len(pieces):
            pieces[token_id] = b""
    vocabulary = Vocabulary(pieces, vocab_size, end_token_ids)
    return vocabulary, lambda text: words.encode(text, add_special_tokens=False)
