"""The last tokens of a text, found without tokenizing all of it.

Knows which ways of splitting text never look behind: those of `gguf_tokenizer.SPLITTINGS`, in which
nothing but a space and the letters behind it is one word. Cut between a letter and such a space, a
text has the tokens of its two parts. Does not know requests.
"""

import re

import tokenizers

from engine.text.gguf_tokenizer import SPLITTINGS

_CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")
_CHARACTERS_PER_TOKEN = 8
_MAX_FRAME = 8
"""More than the tokens that any tokenizer puts around a text."""


class TextEnds:
    """Ends of texts for one tokenizer.

    Args:
        backend: splits as one of `SPLITTINGS` does, as `of` makes sure.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> "TextEnds | None":
        """The ends for a tokenizer; None if it may look behind any cut."""
        pre_tokenizer, normalizer = backend.pre_tokenizer, backend.normalizer
        if pre_tokenizer is None:
            return None
        known = {splitting.pre_tokenizer().__getstate__() for splitting in SPLITTINGS.values()}
        if pre_tokenizer.__getstate__() not in known:
            return None
        if normalizer is not None and not isinstance(normalizer, tokenizers.normalizers.NFC):
            return None
        for token in backend.get_added_tokens_decoder().values():
            takes_space = token.lstrip or token.rstrip or token.single_word
            if takes_space or _CUT.search(token.content):
                return None
        return cls(backend)

    def last_ids(self, text: str, num_ids: int, *, add_special_tokens: bool) -> list[int]:
        """At least the last `num_ids` of a text's ids, or all of them if there are fewer.

        Args:
            text: has no lone surrogates.
            add_special_tokens: as in `Tokenizer.encode`.
        """
        size = _CHARACTERS_PER_TOKEN * (num_ids + _MAX_FRAME)
        while size < len(text):
            cut = _CUT.search(text, len(text) - size)
            if cut is not None:
                ids = self._encode(text[cut.end() :], add_special_tokens)
                if len(ids) >= num_ids + _MAX_FRAME:
                    return ids
            size *= 4
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids
