"""SentencePiece's own model files (tokenizer.model), and tokenizers that were converted from them.

Knows the few fields of the file that decide about ids, and what a conversion by Transformers gets
right: which tokens are special and what stands around a text. How the text itself is split is taken
from the file. Does not know GGUF.

Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import json
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import tokenizers

from engine.errors import TokenizerError
from engine.text.sentencepiece_vocabulary import (
    PieceType,
    PrefixScheme,
    SentencePieceVocabulary,
    build_backend,
)

FILE_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model.v3")
"""What such files are called in a model's folder."""

_UNIGRAM, _BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_KNOWN_NORMALIZERS = frozenset(("Precompiled", "Prepend", "Replace", "Strip"))
"""What Transformers makes of SentencePiece's rules; anything else is the tokenizer's own."""


class SentencePieceModel(NamedTuple):
    """What a model file says."""

    model_type: int
    """1 for unigram, 2 for BPE; others are not known here."""
    pieces: dict[str, tuple[float, int]]
    """Score and type of each, in the order of ids."""
    adds_prefix: bool
    removes_extra_spaces: bool
    is_usual: bool
    """Whether spaces are spelled, and belong to the word behind them."""
    character_map: bytes


def parse_model(data: bytes) -> SentencePieceModel | None:
    """What a file says; None if it is not a SentencePiece model: others have such names, too."""
    try:
        return _parse(data)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error):
        return None  # fields of other numbers and kinds than a model has


def with_rules_of_file(
    converted: tokenizers.Tokenizer, model: SentencePieceModel, settings: dict[str, Any]
) -> tokenizers.Tokenizer | None:
    """A converted tokenizer that splits text as SentencePiece itself does.

    Args:
        converted: made of the same file; its ids may be other ones, and it may have more tokens.
        settings: tokenizer_config.json, which may say otherwise about the space before a text.

    Returns:
        None if the tokenizer has rules of its own, or the file has some that are not known here.

    Raises:
        TokenizerError: the conversion lost the vocabulary.
    """
    state = json.loads(converted.to_str())
    ids = converted.get_vocab(with_added_tokens=False)
    normal = {piece for piece, (_, type_) in model.pieces.items() if type_ == PieceType.NORMAL}
    if normal and normal.isdisjoint(ids):
        raise TokenizerError(
            "the converted tokenizer has none of the file's pieces; give a folder with a "
            "tokenizer.json, or prompts as token ids"
        )
    tokens = sorted(ids, key=ids.__getitem__)
    is_whole = normal <= ids.keys() and [ids[token] for token in tokens] == [*range(len(tokens))]
    is_known = model.is_usual and model.model_type in (_UNIGRAM, _BPE)
    if not (is_whole and is_known and _is_plain(state)):
        return None
    known = [model.pieces.get(token, (0.0, PieceType.UNUSED)) for token in tokens]
    backend = build_backend(
        SentencePieceVocabulary(
            is_unigram=model.model_type == _UNIGRAM,
            pieces=tokens,
            scores=[score for score, _ in known],
            types=[type_ for _, type_ in known],
            prefix=_prefix(state, model, settings),
            removes_extra_spaces=model.removes_extra_spaces,
            character_map=model.character_map,
        )
    )
    backend.post_processor = converted.post_processor
    return backend if _takes_added_tokens(backend, converted, model) else None


def _is_plain(state: dict[str, Any]) -> bool:
    normalizer = state["normalizer"] or {"type": "Sequence", "normalizers": []}
    steps = normalizer.get("normalizers", [normalizer])
    return {step["type"] for step in steps} <= _KNOWN_NORMALIZERS


def _prefix(
    state: dict[str, Any], model: SentencePieceModel, settings: dict[str, Any]
) -> PrefixScheme:
    """Settings go before the file, and say alone which texts behind special tokens are meant."""
    wanted = settings.get("add_prefix_space")
    if not (model.adds_prefix if wanted is None else wanted):
        return "never"
    pre_tokenizer = state["pre_tokenizer"] or {"type": "Sequence", "pretokenizers": []}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return "first" if any(step.get("prepend_scheme") == "first" for step in steps) else "always"


def _takes_added_tokens(
    backend: tokenizers.Tokenizer, converted: tokenizers.Tokenizer, model: SentencePieceModel
) -> bool:
    """Add what the settings added, words that the file has aside; whether all have their ids."""
    for token_id, token in sorted(converted.get_added_tokens_decoder().items()):
        if token.special:
            backend.add_special_tokens([token])
        elif model.pieces.get(token.content, (0.0, 0))[1] != PieceType.USER_DEFINED:
            backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            return False
    return True


# The file


def _parse(data: bytes) -> SentencePieceModel:
    pieces: dict[str, tuple[float, int]] = {}
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            fields = dict(_fields(value))
            (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
            pieces[fields[1].decode()] = (score, fields.get(3, PieceType.NORMAL))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("no pieces")
    return SentencePieceModel(
        model_type=trainer.get(3, _UNIGRAM),
        pieces=pieces,
        adds_prefix=bool(normalizer.get(3, 1)),
        removes_extra_spaces=bool(normalizer.get(4, 1)),
        is_usual=bool(normalizer.get(5, 1)) and not trainer.get(24, 0),
        character_map=normalizer.get(2, b""),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protobuf message's fields; other kinds than integers as bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        kind = key & 7
        if kind == _VARINT:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, position = _varint(data, position)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"no such kind of field: {kind}")
        if position + size > len(data):
            raise ValueError("the message ends too early")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("an integer of more than 64 bits")
