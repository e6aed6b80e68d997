"""Finding and reading tokenizers: Hugging Face folders, tokenizer.json files, GGUF files.

Knows which files there may be and what is in them. Does not know what a tokenizer is used for.
Imports `tokenizers` only; what needs Transformers is converted once by
`engine.text.tokenizer_conversion`.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from engine.checkpoint.gguf import GGUFFile
from engine.errors import CheckpointError, TokenizerError
from engine.text import gguf_tokenizer
from engine.text.tokenizer_conversion import SLOW_TOKENIZER_FILES, converted_folder

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
HUB_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")


class TokenizerFiles(NamedTuple):
    """What a tokenizer's files say."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    """"bos_token", "eos_token" and so on to the token's text."""
    chat_templates: dict[str, str]
    """Jinja templates by name; the usual one is "default"."""


def read_tokenizer(path: Path) -> TokenizerFiles:
    """Read a folder, a tokenizer.json or a .gguf file.

    Raises:
        TokenizerError: there is no tokenizer, or it cannot be read.
    """
    if path.is_dir():
        return _read_folder(path)
    if path.suffix.lower() == ".gguf":
        return _read_gguf(path)
    if path.suffix.lower() == ".json":
        return _read_tokenizer_json(path)
    raise TokenizerError(f"no tokenizer at {path}: give a folder, a tokenizer.json or a .gguf file")


def find_tokenizer(name: str, *, download_dir: str | None = None) -> Path:
    """The file or folder of a tokenizer that a user named; fetched if it is a hub repository.

    Raises:
        TokenizerError: nothing answers to the name.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or path.suffix in {".json", ".gguf"}:
        raise TokenizerError(f"no tokenizer at {name!r}: there is no such file or folder")
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(name, cache_dir=download_dir, allow_patterns=list(HUB_PATTERNS))
    except Exception as error:  # the hub client and its HTTP library raise errors of many kinds
        raise TokenizerError(
            f"no tokenizer {name!r}: there is no such folder, and the hub repository could not be "
            f"fetched ({type(error).__name__}: {error})"
        ) from error
    return Path(folder)


def _read_gguf(path: Path) -> TokenizerFiles:
    try:
        metadata = GGUFFile(path).metadata
    except CheckpointError as error:
        raise TokenizerError(f"no tokenizer in {path}: {error}") from error
    backend = gguf_tokenizer.build_backend(metadata)
    if backend is None:
        return _read_tokenizer_json(converted_folder(path) / "tokenizer.json")
    return TokenizerFiles(
        backend, gguf_tokenizer.special_tokens(metadata), gguf_tokenizer.chat_templates(metadata)
    )


def _read_folder(folder: Path) -> TokenizerFiles:
    file = folder / "tokenizer.json"
    if file.is_file():
        return _read_tokenizer_json(file)
    if any((folder / name).is_file() for name in SLOW_TOKENIZER_FILES):
        return _read_tokenizer_json(converted_folder(folder) / "tokenizer.json")
    raise TokenizerError(
        f"no tokenizer in {folder}: looked for tokenizer.json, {', '.join(SLOW_TOKENIZER_FILES)}. "
        "Give another tokenizer's folder, or prompts as token ids without a tokenizer"
    )


def _read_tokenizer_json(file: Path) -> TokenizerFiles:
    """Read tokenizer.json and, from its folder, the settings that say what its tokens are for."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare exceptions
        raise TokenizerError(f"cannot read {file}: {error}") from error
    settings = {
        **_read_json(file.parent / "special_tokens_map.json"),
        **_read_json(file.parent / "tokenizer_config.json"),
    }
    special_tokens = {
        name: _token_content(settings[name], name, file.parent)
        for name in SPECIAL_TOKEN_NAMES
        if settings.get(name) is not None
    }
    _complete_added_tokens(backend, _added_tokens(settings, file.parent), special_tokens)
    return TokenizerFiles(backend, special_tokens, _read_chat_templates(file.parent, settings))


def _added_tokens(settings: dict[str, Any], folder: Path) -> list[AddedToken]:
    """What the settings name beyond tokenizer.json, in the order of ids."""
    entries = settings.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict) or not all(
        key.isdecimal()
        and len(key) < 20
        and isinstance(entry, dict)
        and isinstance(entry.get("content"), str)
        for key, entry in entries.items()
    ):
        raise _wrong_setting(folder, "added_tokens_decoder", "objects with a content, by token id")
    tokens = []
    for _, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        flags = {
            name: bool(entry.get(name, False))
            for name in ("lstrip", "rstrip", "single_word", "special")
        }
        normalized = bool(entry.get("normalized", not flags["special"]))
        tokens.append(AddedToken(entry["content"], normalized=normalized, **flags))
    return tokens


def _complete_added_tokens(
    backend: tokenizers.Tokenizer, added: list[AddedToken], special_tokens: dict[str, str]
) -> None:
    """Add what the settings name beyond tokenizer.json, so that it is kept whole and skipped."""
    for token in added:
        if backend.token_to_id(token.content) is None:
            backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
    known = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    missing = [
        token
        for token in dict.fromkeys(special_tokens.values())
        if token not in known and backend.token_to_id(token) is not None
    ]
    if missing:
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in missing])


def _read_chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    inline = settings.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in inline
    ):
        templates.update((entry["name"], entry["template"]) for entry in inline)
    elif inline is not None:
        raise _wrong_setting(
            folder, "chat_template", "a text, or a list of objects with name and template"
        )
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = _read_text(file)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    return templates


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(_read_text(file))
    except ValueError as error:
        raise TokenizerError(f"cannot read {file}: {error}") from error
    except RecursionError:
        raise TokenizerError(f"cannot read {file}: it is nested too deep") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"cannot read {file}: it holds no JSON object")
    return content


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read {file}: {error}") from error


def _token_content(value: Any, name: str, folder: Path) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str):
        raise _wrong_setting(folder, name, "a text, or an object with a content")
    return content


def _wrong_setting(folder: Path, name: str, wanted: str) -> TokenizerError:
    return TokenizerError(
        f"cannot read the tokenizer in {folder}: {name} must be {wanted} (tokenizer_config.json, "
        "or special_tokens_map.json)"
    )
