"""Building a tokenizer from the metadata of a GGUF file.

Knows the keys under `tokenizer.`, what they are when they are left out, and how llama.cpp names
ways of splitting text. Builds byte-level BPE and SentencePiece vocabularies and returns None for
the rest, which `engine.text.tokenizer_conversion` takes over. Does not read files.

A name such as "smollm" stands for the splitting of the model's own tokenizer, as its authors
published it: the merges were learned on it, and other splits give other tokens for the same text.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.errors import TokenizerError
from engine.text import sentencepiece_vocabulary
from engine.text.sentencepiece_vocabulary import SPACE, PieceType, SentencePieceVocabulary

SPECIAL_TOKEN_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}

# What both splits agree on: contractions, words with one leading character, punctuation with the
# line ends behind it, line ends, and white space that leaves one space to the next word.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How text is cut before the merges apply."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    """Whether a word that is in the vocabulary is one token, whatever the merges say."""
    add_bos: bool = False
    """Whether text begins with the BOS token if the file does not say."""


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _by_pattern(numbers: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        pattern = Regex(f"{_WORDS}|{numbers}|{_OTHERS}")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), bytes_only])

    return build


_GPT2 = _Splitting(_byte_level)
_SMOLLM = _Splitting(_single_digits)
_QWEN2 = _Splitting(_by_pattern(r"\p{N}"), normalizers.NFC)
_LLAMA3 = _Splitting(_by_pattern(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)

SPLITTINGS: dict[str, _Splitting] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "codeshell": _SMOLLM,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
"""`tokenizer.ggml.pre` to splitting."""


@dataclass(frozen=True, slots=True)
class _SentencePiece:
    """What a file with a SentencePiece vocabulary means where it says nothing."""

    is_unigram: bool
    special_ids: Mapping[str, int]
    add_bos: bool = False
    add_eos: bool = False
    prefix: bool = False
    """Whether a text begins with a space of its own."""


SENTENCEPIECE: dict[str, _SentencePiece] = {
    "llama": _SentencePiece(
        is_unigram=False,
        special_ids={"bos_token": 1, "eos_token": 2, "unk_token": 0},
        add_bos=True,
        prefix=True,
    ),
    "t5": _SentencePiece(
        is_unigram=True,
        special_ids={"eos_token": 1, "unk_token": 2, "pad_token": 0},
        add_eos=True,
    ),
}
"""`tokenizer.ggml.model` to the kind of vocabulary."""


def build_backend(metadata: dict[str, Any]) -> tokenizers.Tokenizer | None:
    """The tokenizer that the metadata describes; None if it is of a kind not built here.

    Raises:
        TokenizerError: the metadata has no vocabulary or contradicts itself.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise TokenizerError(
            "the GGUF file has no vocabulary (tokenizer.ggml.tokens); give a tokenizer of its own "
            "or prompts as token ids"
        )
    kind = _sentencepiece_kind(metadata)
    if kind is not None:
        backend = sentencepiece_vocabulary.build_backend(_sentencepiece(metadata, kind))
        _frame_text(backend, metadata, add_bos=kind.add_bos, add_eos=kind.add_eos)
        return backend
    splitting = SPLITTINGS.get(metadata.get("tokenizer.ggml.pre", ""))
    merges = metadata.get("tokenizer.ggml.merges")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or splitting is None or merges is None:
        return None
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        model = BPE(
            vocab=vocabulary,
            merges=[tuple(merge.split(" ")) for merge in merges],
            ignore_merges=splitting.ignore_merges,
        )
    except Exception as error:  # the library raises bare exceptions
        raise TokenizerError(f"the GGUF file's vocabulary and merges disagree: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if splitting.normalizer is not None:
        backend.normalizer = splitting.normalizer()
    backend.pre_tokenizer = splitting.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    _frame_text(backend, metadata, add_bos=splitting.add_bos)
    return backend


def special_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    """ "bos_token", "eos_token" and so on to the token's text, as far as the file names them."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    named = {}
    for name in SPECIAL_TOKEN_KEYS:
        token_id = _special_id(metadata, name)
        if token_id is not None and 0 <= token_id < len(tokens):
            named[name] = tokens[token_id]
    return named


def chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; the usual one is called "default"."""
    templates = {}
    for key, value in metadata.items():
        match = re.fullmatch(r"tokenizer\.chat_template(?:\.(.+))?", key)
        if match and isinstance(value, str):
            templates[match[1] or "default"] = value
    return templates


def _sentencepiece_kind(metadata: dict[str, Any]) -> _SentencePiece | None:
    return SENTENCEPIECE.get(str(metadata.get("tokenizer.ggml.model")))


def _sentencepiece(metadata: dict[str, Any], kind: _SentencePiece) -> SentencePieceVocabulary:
    pieces = list(metadata["tokenizer.ggml.tokens"])
    scores = _array(metadata, "scores", "numbers")
    merges = _array(metadata, "merges", "texts")
    types = _array(metadata, "token_type", "integers")
    if scores is None and (merges is None or kind.is_unigram):
        raise TokenizerError(
            "the GGUF file's vocabulary has no scores (tokenizer.ggml.scores), which tell how text "
            "is split; convert the file again, or give a tokenizer of its own"
        )
    types = _guessed_types(metadata, pieces) if types is None else list(types)
    if PieceType.UNKNOWN not in types:
        unknown_id = _special_id(metadata, "unk_token")
        if unknown_id is not None and 0 <= unknown_id < len(types):
            types[unknown_id] = PieceType.UNKNOWN
    known = set(pieces)
    for token_id, (piece, type_) in enumerate(zip(pieces, types, strict=False)):
        spelled = piece.replace(" ", SPACE)
        if type_ == PieceType.USER_DEFINED and spelled not in known:  # as in Gemma's files
            pieces[token_id] = spelled
    has_prefix = _flag(metadata, "add_space_prefix", kind.prefix)
    character_map = _array(metadata, "precompiled_charsmap", "integers") or []
    return SentencePieceVocabulary(
        is_unigram=kind.is_unigram,
        pieces=pieces,
        scores=[0.0] * len(pieces) if scores is None else scores,
        types=types,
        prefix="always" if has_prefix else "never",
        removes_extra_spaces=_flag(metadata, "remove_extra_whitespaces", False),
        character_map=bytes(byte & 0xFF for byte in character_map),
        merges=None if merges is None else [_pair(merge) for merge in merges],
    )


def _guessed_types(metadata: dict[str, Any], pieces: list[str]) -> list[int]:
    """Types of pieces for a file without `tokenizer.ggml.token_type`."""
    special = {_special_id(metadata, name) for name in SPECIAL_TOKEN_KEYS}
    return [
        PieceType.CONTROL
        if token_id in special
        else PieceType.BYTE
        if re.fullmatch("<0x[0-9A-F]{2}>", piece)
        else PieceType.NORMAL
        for token_id, piece in enumerate(pieces)
    ]


_ELEMENTS: dict[str, tuple[type, ...]] = {
    "texts": (str,),
    "integers": (int,),
    "numbers": (int, float),
}


def _array(metadata: dict[str, Any], name: str, of: str) -> list[Any] | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None or (
        isinstance(value, list) and all(isinstance(one, _ELEMENTS[of]) for one in value)
    ):
        return value
    raise TokenizerError(f"the GGUF file's tokenizer.ggml.{name} must be an array of {of}")


def _flag(metadata: dict[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if value in (True, False):
        return bool(value)
    raise TokenizerError(f"the GGUF file's tokenizer.ggml.{name} must be true or false")


def _pair(merge: str) -> tuple[str, str]:
    """The two pieces of a merge, of which the first may begin with a space."""
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    added = [
        AddedToken(token, normalized=False, special=kind == PieceType.CONTROL)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (PieceType.CONTROL, PieceType.USER_DEFINED)
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _frame_text(
    backend: tokenizers.Tokenizer,
    metadata: dict[str, Any],
    *,
    add_bos: bool,
    add_eos: bool = False,
) -> None:
    """Let the tokenizer put BOS before and EOS behind a text, if the file says so."""
    frame: list[str] = ["$A"]
    ids: dict[str, int] = {}
    if _flag(metadata, "add_bos_token", add_bos):
        frame.insert(0, "BOS")
        ids["BOS"] = _required(metadata, "bos_token")
    if _flag(metadata, "add_eos_token", add_eos):
        frame.append("EOS")
        ids["EOS"] = _required(metadata, "eos_token")
    if not ids:
        return
    backend.post_processor = processors.TemplateProcessing(
        single=frame,
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [backend.id_to_token(token_id)]}
            for name, token_id in ids.items()
        ],
    )


def _special_id(metadata: dict[str, Any], name: str) -> int | None:
    kind = _sentencepiece_kind(metadata)
    default = None if kind is None else kind.special_ids.get(name)
    return metadata.get(SPECIAL_TOKEN_KEYS[name], default)


def _required(metadata: dict[str, Any], name: str) -> int:
    token_id = _special_id(metadata, name)
    if token_id is None or not 0 <= token_id < len(metadata["tokenizer.ggml.tokens"]):
        raise TokenizerError(
            f"the GGUF file asks for a {name} around every text but {SPECIAL_TOKEN_KEYS[name]} "
            f"is {token_id}"
        )
    return int(token_id)
