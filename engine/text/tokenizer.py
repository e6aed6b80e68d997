"""The tokenizer: text to token ids and back, conversations to prompts.

Knows one vocabulary and hides which kind of file it came from. Does not know requests or
streaming, nor where the files are (`engine.text.tokenizer_files`).
"""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from engine.checkpoint.locate import ModelSource
from engine.errors import PromptError
from engine.text.chat_template import render_chat
from engine.text.text_ends import TextEnds
from engine.text.token_bytes import TokenBytes, new_utf8_decoder, piece_decoder
from engine.text.token_counts import TokenCounts
from engine.text.tokenizer_files import find_tokenizer, read_tokenizer
from engine.types.sampling_checks import short

LONG_TEXT = 2000
"""Characters from which on a text, about a millisecond's work, is encoded as a batch of one: that
lets other threads run, while `encode` of the library keeps Python to itself for as long as it
takes, which is seconds for a megabyte."""

_MAX_ID = 2**32 - 1
"""The highest id that the library takes, whatever the vocabulary."""


class Tokenizer:
    """Encodes and decodes text with one vocabulary.

    Threads may share it. Encoding releases the interpreter lock.

    Args:
        backend: a tokenizer of the `tokenizers` library.
        special_tokens: "bos_token", "eos_token" ... to the token's text.
        chat_templates: Jinja templates by name; the usual one is "default".
        source: where it came from, for messages.

    Attributes:
        backend: the tokenizer of the `tokenizers` library.
        special_tokens: what chat templates know as `bos_token` and so on.
        chat_templates: Jinja templates by name.
        bos_token_id, eos_token_id: None if the tokenizer names none.
        special_ids: tokens that `skip_special_tokens` leaves out.
        added_ids: special tokens and words added to the vocabulary.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str],
        chat_templates: dict[str, str],
        source: str,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = special_tokens
        self.chat_templates = chat_templates
        self.source = source
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        decoder = piece_decoder(backend)
        self.strips_leading_space = decoder is not None and decoder.strips_leading_space
        self._bytes: dict[bool, TokenBytes] = {}
        if decoder is not None:
            self._bytes[False] = TokenBytes(backend, decoder.to_bytes)
            self._bytes[True] = TokenBytes(backend, decoder.to_bytes, skipped=self.special_ids)

    def __repr__(self) -> str:
        return f"Tokenizer({self.source!r}, vocab_size={self.vocab_size})"

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_token_id(self) -> int:
        """The highest token id; above `vocab_size` - 1 if ids have gaps."""
        return max(self.backend.get_vocab(with_added_tokens=True).values())

    @property
    def chat_template(self) -> str | None:
        """The usual chat template; None if the model has none."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: let the tokenizer put its BOS or EOS token around the text, if it
                has such a rule. Special tokens written in the text are recognised in any case.

        Raises:
            PromptError: not a string, or one with lone surrogates.
        """
        _check_text(text)
        if len(text) > LONG_TEXT:
            return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of several texts, encoded in parallel.

        Raises:
            PromptError: one is not a string, or one with lone surrogates.
        """
        for text in texts:
            _check_text(text)
        encodings = self.backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def num_tokens_at_least(self, text: str, enough: int) -> int:
        """Tokens that a text has at least, found in less time than it takes to tokenize it.

        Args:
            enough: the number that is to be reached; what is behind it is hardly looked at.

        Returns:
            A number that `encode` never falls short of; 0 if nothing is known of this tokenizer.

        Raises:
            PromptError: not a string, or one with lone surrogates.
        """
        _check_text(text)
        return 0 if self._counts is None else self._counts.at_least(text, enough)

    def encode_end(
        self, text: str, num_tokens: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The last `num_tokens` of what `encode` gives; without tokenizing all, where possible.

        Raises:
            PromptError: not a string, or one with lone surrogates.
        """
        if self._ends is None or len(text) <= LONG_TEXT:
            ids = self.encode(text, add_special_tokens=add_special_tokens)
        else:
            _check_text(text)
            ids = self._ends.last_ids(text, num_tokens, add_special_tokens=add_special_tokens)
        return ids[-num_tokens:]

    @cached_property
    def _counts(self) -> TokenCounts | None:
        return TokenCounts.of(self.backend)

    @cached_property
    def _ends(self) -> TextEnds | None:
        return TextEnds.of(self.backend)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; bytes that are not UTF-8 become U+FFFD.

        Ids that the vocabulary does not have add nothing: a model's logits may be wider than it.

        Raises:
            PromptError: not a list of integers from 0 to 4294967295.
        """
        return self.backend.decode(checked_ids(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str:
        """The vocabulary's spelling of a token; empty for ids outside the vocabulary."""
        return self.backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text behind others, as bytes."""
        table = self._bytes.get(False)
        return self._decode_alone(token_id).encode() if table is None else table[token_id]

    def token_text(self, token_id: int) -> str:
        """What a token adds to a text behind others; part of a character becomes U+FFFD."""
        table = self._bytes.get(False)
        if table is None:
            return self._decode_alone(token_id)
        return table[token_id].decode("utf-8", "replace")

    def token_text_after(self, context: Sequence[int], token_id: int) -> str:
        """What a token adds behind `context`, where a character may be spread over tokens.

        The token that completes a character has all of it; those before it have none of it.
        """
        table = self._bytes.get(False)
        if table is None:
            return self._decode_alone(token_id)
        decoder = new_utf8_decoder("replace")
        decoder.decode(b"".join([table[previous] for previous in context]))
        return decoder.decode(table[token_id])

    def token_bytes_table(self, *, skip_special_tokens: bool) -> TokenBytes | None:
        """Bytes of every token, with none for skipped ones; None if the decoder is no such kind."""
        return self._bytes.get(skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        tokenize: bool = False,
        **kwargs: Any,
    ) -> str | list[int]:
        """Render a conversation as the model's prompt.

        Args:
            messages: dictionaries with "role" and "content" (see `render_chat`).
            add_generation_prompt: end with the beginning of an assistant message.
            continue_final_message: end within the last message, for the model to go on with it.
            tools: JSON schemas of functions that the model may call.
            chat_template: a template, or the name of one of the model's; the model's own if None.
            tokenize: return token ids.
            kwargs: further variables for the template.

        Returns:
            The prompt's text, or its token ids. The text has its special tokens already: encode
            it with `add_special_tokens=False`.

        Raises:
            PromptError: the messages or the template are no good, or there is no template.
        """
        text = render_chat(
            self._find_template(chat_template, has_tools=bool(tools)),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**self.special_tokens, **kwargs},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _find_template(self, wanted: str | None, *, has_tools: bool) -> str:
        if wanted is not None:
            if wanted not in self.chat_templates and "{" not in wanted:
                raise PromptError(
                    f"chat_template is neither Jinja nor the name of one of {self.source} "
                    f"({', '.join(sorted(self.chat_templates)) or 'it has none'}): {wanted[:80]!r}",
                    param="chat_template",
                )
            return self.chat_templates.get(wanted, wanted)
        template = self.chat_templates.get("tool_use") if has_tools else None
        template = template or self.chat_template
        if template is None:
            others = ", ".join(sorted(self.chat_templates))
            raise PromptError(
                f"{self.source} has no chat template"
                + (f" called default (it has {others})" if others else "")
                + "; give one as chat_template, or a prompt instead of messages"
            )
        return template

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _decode_alone(self, token_id: int) -> str:
        return self.backend.decode([token_id], skip_special_tokens=False)


def get_tokenizer(
    source: ModelSource, *, name: str | None = None, download_dir: str | None = None
) -> Tokenizer:
    """The tokenizer of a model, or another one.

    Args:
        source: the model's files.
        name: take this one instead: a folder, a tokenizer.json, a .gguf file or a hub repository.
        download_dir: where hub downloads are kept; the hub's own cache by default.

    Raises:
        TokenizerError: there is none, or it cannot be read.
    """
    path = source.path if name is None else find_tokenizer(name, download_dir=download_dir)
    files = read_tokenizer(path)
    return Tokenizer(
        files.backend,
        special_tokens=files.special_tokens,
        chat_templates=files.chat_templates,
        source=str(path),
    )


def checked_ids(ids: Any) -> list[int]:
    """Token ids as a plain list.

    Raises:
        PromptError: not a list of integers from 0 to 4294967295.
    """
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise PromptError(f"token ids must be a list of integers, got {short(ids)}")
    ids = list(ids)
    for position, one in enumerate(ids):
        integral = isinstance(one, numbers.Integral) and not isinstance(one, bool)
        if not integral or not 0 <= one <= _MAX_ID:
            raise PromptError(
                f"token id {short(one)} at position {position} is not an integer from 0 to "
                f"{_MAX_ID}"
            )
    return [int(one) for one in ids]


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise PromptError(f"a text must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text has a lone surrogate at position {error.start}, which is no character; "
            'replace it, for example by text.encode("utf-8", "replace").decode()'
        ) from error
