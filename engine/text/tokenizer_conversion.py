"""Tokenizers that only Transformers can read, converted once and kept as tokenizer.json.

Knows the cache and how to ask Transformers; imports it here and only when something is converted.
Does not know what is in a tokenizer: `engine.text.sentencepiece_file` mends what a conversion
gets wrong of SentencePiece's rules.

The cache is `$XDG_CACHE_HOME/isinglass/tokenizers` (`~/.cache/...`), one folder for each source:
its name is made of the source's path, sizes and modification times, Transformers' version and that
of the rules here.
"""

import atexit
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path

import tokenizers

from engine.errors import TokenizerError
from engine.log import get_logger
from engine.text import sentencepiece_file

logger = get_logger(__name__)

SLOW_TOKENIZER_FILES = (
    *sentencepiece_file.FILE_NAMES,
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tiktoken.model",
    "qwen.tiktoken",
)
"""Files in a model folder from which Transformers can make a tokenizer."""
_RULES = "2"
"""Counts what was mended of conversions: results of before are made again."""
_SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def cache_root() -> Path:
    """Folder of the converted tokenizers."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "isinglass" / "tokenizers"


def converted_folder(source: Path) -> Path:
    """A folder with tokenizer.json, made from a GGUF file or from a model folder that has none.

    Raises:
        TokenizerError: Transformers is not installed or cannot read the tokenizer either.
    """
    target = cache_root() / _cache_key(source)
    if (target / "tokenizer.json").is_file():
        return target
    work = Path(tempfile.mkdtemp(prefix="converted-tokenizer-"))
    try:
        _convert(source, work)
        return _publish(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _cache_key(source: Path) -> str:
    if source.is_dir():
        names = (*SLOW_TOKENIZER_FILES, *_SETTINGS_FILES, "config.json")
        files = [source / name for name in names if (source / name).is_file()]
    else:
        files = [source]
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    parts = [_RULES, version, str(source.resolve())]
    for file in files:
        status = file.stat()
        parts.append(f"{file.name}:{status.st_size}:{status.st_mtime_ns}")
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"{source.stem[:40]}-{digest[:24]}"


def _convert(source: Path, work: Path) -> None:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerError(
            f"the tokenizer of {source} must be converted, for which transformers is needed: "
            "install it, or give a folder with a tokenizer.json"
        ) from error
    logger.info("converting the tokenizer of %s; the result is kept", source)
    try:
        if source.is_dir():
            converted = AutoTokenizer.from_pretrained(str(source), local_files_only=True)
        else:
            converted = AutoTokenizer.from_pretrained(
                str(source.parent), gguf_file=source.name, local_files_only=True
            )
        converted.save_pretrained(str(work))
    except Exception as error:  # the many kinds that Transformers raises for unreadable files
        raise TokenizerError(
            f"transformers cannot read the tokenizer of {source}: {error}"
        ) from error
    if not (work / "tokenizer.json").is_file():
        raise TokenizerError(
            f"the tokenizer of {source} is a {type(converted).__name__}, which has no "
            "tokenizer.json; give a folder with one, or prompts as token ids"
        )
    if source.is_dir():
        _restore_rules(source, work)


def _restore_rules(source: Path, work: Path) -> None:
    """Let a tokenizer that came from a SentencePiece file split text by the file's own rules."""
    names = [name for name in sentencepiece_file.FILE_NAMES if (source / name).is_file()]
    model = sentencepiece_file.parse_model((source / names[0]).read_bytes()) if names else None
    if model is None:
        return
    result = work / "tokenizer.json"
    settings = source / "tokenizer_config.json"
    restored = sentencepiece_file.with_rules_of_file(
        tokenizers.Tokenizer.from_file(str(result)),
        model,
        json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {},
    )
    if restored is None:
        logger.warning(
            "the tokenizer of %s is not split by the rules of %s: it has others of its own",
            source,
            names[0],
        )
    else:
        restored.save(str(result))


def _publish(work: Path, target: Path) -> Path:
    """Move the result into the cache at once; another process may have done the same."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix="new-", dir=target.parent))
        try:
            shutil.copytree(work, staging, dirs_exist_ok=True)
            os.replace(staging, target)
        except OSError:
            if not (target / "tokenizer.json").is_file():
                raise
        finally:  # after an error, or an interrupt: moved, there is none
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        logger.warning("cannot keep the converted tokenizer in %s: %s", target.parent, error)
        atexit.register(shutil.rmtree, work, ignore_errors=True)
        return work
    shutil.rmtree(work, ignore_errors=True)
    return target
