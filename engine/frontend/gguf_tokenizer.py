"""Building a tokenizer from the metadata of a GGUF file.

Knows the keys under `tokenizer.` and how llama.cpp names ways of splitting text. Builds byte-level
BPE only and returns None for the rest, which `engine.frontend.tokenizer_conversion` takes over.
Does not read files.

A name such as "smollm" stands for the splitting of the model's own tokenizer, as its authors
published it: the merges were learned on it, and other splits give other tokens for the same text.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.errors import TokenizerError

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`: special tokens, and words added to the vocabulary."""

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
    for name, key in SPECIAL_TOKEN_KEYS.items():
        token_id = metadata.get(key)
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


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    added = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (CONTROL, USER_DEFINED)
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _frame_text(backend: tokenizers.Tokenizer, metadata: dict[str, Any], *, add_bos: bool) -> None:
    """Let the tokenizer put BOS before and EOS behind a text, if the file says so."""
    frame: list[str] = ["$A"]
    ids: dict[str, int] = {}
    if metadata.get("tokenizer.ggml.add_bos_token", add_bos):
        frame.insert(0, "BOS")
        ids["BOS"] = _required(metadata, "bos_token")
    if metadata.get("tokenizer.ggml.add_eos_token", False):
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


def _required(metadata: dict[str, Any], name: str) -> int:
    token_id = metadata.get(SPECIAL_TOKEN_KEYS[name])
    if token_id is None or not 0 <= token_id < len(metadata["tokenizer.ggml.tokens"]):
        raise TokenizerError(
            f"the GGUF file asks for a {name} around every text but {SPECIAL_TOKEN_KEYS[name]} "
            f"is {token_id}"
        )
    return int(token_id)
