"""Prompts of a load: one fixed text, random words or token ids, shared prefixes, or a file's lines.

Knows prompts and how many tokens to ask for. Does not know about sending. The prompt of an index
depends on the seed and the index alone, so two runs with one seed send the same requests in the
same order, whatever the servers' speeds.
"""

import hashlib
import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.bench.settings import check_body_keys
from engine.errors import ConfigError

# Frequent short words: with the space before it, each is one token in nearly every byte-pair
# vocabulary, so that a number of words is a number of tokens without a tokenizer at hand.
_WORD_LINES = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book
eye job word business issue side kind head house service friend father power hour game line
end member law car city community name president team minute idea kid body information back
parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education foot boy age policy
music market sense nation plan college interest death experience effect use class control
field development role effort rate heart drug show leader light voice wife police mind price
report decision son view relationship town road arm difference value building action season
society tax director position player record paper space ground form event official matter
center couple site project activity star table need court oil situation cost industry figure
street image phone data picture practice piece land product doctor wall news test movie
north love support technology
"""
WORDS = tuple(dict.fromkeys(_WORD_LINES.split()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What one request asks: text, token ids or messages, and how much of an answer."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int
    extra: dict[str, Any] = field(default_factory=dict)
    """More keys for the request's body, from a file."""


class PromptSource(Protocol):
    """Gives the prompt of each index; negative indices are the warm-up's, -1 the first."""

    def prompt(self, index: int) -> Prompt:
        """The prompt of this index, always the same."""
        ...

    def document(self) -> dict[str, object]:
        """What makes them again, for a report."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPrompts:
    """One and the same prompt each time; a prefix cache will hold all of it."""

    text: str
    output_len: int

    def prompt(self, index: int) -> Prompt:
        """The prompt, whatever the index."""
        return Prompt(text=self.text, max_tokens=self.output_len)

    def document(self) -> dict[str, object]:
        """See `PromptSource`."""
        return {"dataset_name": "fixed", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPrompts:
    """Random words, or random token ids, of random lengths; no two share a prefix to speak of.

    Lengths are uniform between `len × (1 - range_ratio)` and `len × (1 + range_ratio)`, ends
    included, input and output drawn apart.
    """

    input_len: int
    output_len: int
    range_ratio: float
    seed: int
    token_id_range: tuple[int, int] | None = None
    """Draw token ids from this half-open range in place of words."""

    def prompt(self, index: int) -> Prompt:
        """The prompt of this index."""
        generator = random.Random(f"prompt-{self.seed}-{index}")
        length = _around(generator, self.input_len, self.range_ratio)
        max_tokens = _around(generator, self.output_len, self.range_ratio)
        if self.token_id_range is not None:
            ids = [generator.randrange(*self.token_id_range) for _ in range(length)]
            return Prompt(token_ids=ids, max_tokens=max_tokens)
        return Prompt(text=_words(generator, length), max_tokens=max_tokens)

    def document(self) -> dict[str, object]:
        """See `PromptSource`."""
        return {"dataset_name": "random", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixPrompts:
    """Several long prefixes, each followed by many suffixes: system prompts and their users.

    In chat the prefix is the system message. Which prefix a request has is drawn uniformly.
    """

    num_prefixes: int
    prefix_len: int
    suffix_len: int
    output_len: int
    range_ratio: float
    seed: int
    chat: bool

    def prompt(self, index: int) -> Prompt:
        """The prompt of this index."""
        generator = random.Random(f"suffix-{self.seed}-{index}")
        prefix = self._prefix(generator.randrange(self.num_prefixes))
        suffix = _words(generator, _around(generator, self.suffix_len, self.range_ratio))
        max_tokens = _around(generator, self.output_len, self.range_ratio)
        if self.chat:
            messages = [
                {"role": "system", "content": prefix},
                {"role": "user", "content": suffix},
            ]
            return Prompt(messages=messages, max_tokens=max_tokens)
        return Prompt(text=f"{prefix} {suffix}", max_tokens=max_tokens)

    def document(self) -> dict[str, object]:
        """See `PromptSource`."""
        return {"dataset_name": "shared-prefix", **asdict(self)}

    def _prefix(self, number: int) -> str:
        return _words(random.Random(f"prefix-{self.seed}-{number}"), self.prefix_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePrompts:
    """Lines of a JSONL file, in order, from the start again when they run out."""

    prompts: tuple[Prompt, ...]
    path: Path
    sha256: str
    """Of the whole file."""
    output_len: int
    """Of lines that do not say."""

    def prompt(self, index: int) -> Prompt:
        """The line of this index, modulo their number; the warm-up takes the last ones."""
        return self.prompts[index % len(self.prompts)]

    def document(self) -> dict[str, object]:
        """See `PromptSource`."""
        return {
            "dataset_name": "custom",
            "dataset_path": str(self.path),
            "sha256": self.sha256,
            "num_lines": len(self.prompts),
            "output_len": self.output_len,
        }


def read_prompts(path: Path, *, output_len: int) -> FilePrompts:
    """Read a JSONL file: each line an object with `prompt` (text or token ids) or `messages`.

    `max_tokens` is optional; every other key goes into the request's body (`n` must be 1, and the
    answer a stream).

    Raises:
        ConfigError: the file cannot be read, is empty, or a line (named) is wrong.
    """
    try:
        # Only LF ends a line of JSONL: JSON strings may hold every other separator as it is.
        content = path.read_bytes()
        lines = content.decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts from {path}: {error}") from error
    prompts = tuple(
        _parse_line(line, f"{path}:{number}", output_len)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not prompts:
        raise ConfigError(f"{path} holds no prompt; give one JSON object a line")
    return FilePrompts(
        prompts=prompts,
        path=path,
        sha256=hashlib.sha256(content).hexdigest(),
        output_len=output_len,
    )


def _parse_line(line: str, place: str, output_len: int) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not JSON: {error}") from error
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ConfigError(f"{place} must be an object with either `prompt` or `messages`")
    prompt, messages = entry.pop("prompt", None), entry.pop("messages", None)
    max_tokens = entry.pop("max_tokens", output_len)
    check_body_keys(entry, ("stream", "stream_options"), place)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ConfigError(f"{place}: max_tokens must be a whole number of at least 1")
    if isinstance(messages, list) and messages:
        return Prompt(messages=messages, max_tokens=max_tokens, extra=entry)
    if isinstance(prompt, str) and prompt:
        return Prompt(text=prompt, max_tokens=max_tokens, extra=entry)
    if isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt):
        return Prompt(token_ids=prompt, max_tokens=max_tokens, extra=entry)
    raise ConfigError(
        f"{place}: `prompt` must be text or a list of token ids, `messages` a list of messages, "
        "and neither empty"
    )


def _around(generator: random.Random, length: int, range_ratio: float) -> int:
    low = max(1, round(length * (1 - range_ratio)))
    return generator.randint(low, max(low, round(length * (1 + range_ratio))))


def _words(generator: random.Random, length: int) -> str:
    return " ".join(generator.choices(WORDS, k=length))
