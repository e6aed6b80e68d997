"""SentencePiece vocabularies as tokenizers: the same ids that the sentencepiece library gives.

Knows how SentencePiece normalises a text, merges or weighs its pieces and puts them together again.
Does not know files: `engine.text.gguf_tokenizer` and `engine.text.sentencepiece_file` do.

Control tokens that are written in a text are recognised, unlike in the library itself; what stands
between two of them is encoded as a text of its own. Otherwise these differ: a piece of which a
character has no piece itself is not merged; pieces that are marked unused are not merged even on
the way to longer ones; a tie between two unigram paths may fall the other way, because they are
weighed in double precision; and a character map is applied to grapheme clusters.

Kudo and Richardson, "SentencePiece: A simple and language independent subword tokenizer and
detokenizer for Neural Text Processing", 2018.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from engine.errors import TokenizerError

SPACE = "\u2581"
"""How a space is spelled in a piece."""

_PRIVATE = 0x10FFFD
"""The last character that is free for private use."""

PrefixScheme = Literal["always", "first", "never"]
"""Which texts between special tokens begin with a space of their own: all, the first, none."""


class PieceType(IntEnum):
    """What a piece is for; the numbers are those of the files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceVocabulary:
    """Pieces by id, and the rules around them.

    Raises:
        TokenizerError: lists of different lengths, a piece that is there twice, a score that is
            not a finite number.
    """

    is_unigram: bool
    """Whether the likeliest pieces are taken; otherwise they are merged, the best scores first."""
    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    prefix: PrefixScheme = "always"
    removes_extra_spaces: bool = False
    """Whether spaces at both ends are dropped and several in a row become one."""
    character_map: bytes = b""
    """The compiled rules for other characters; empty if all stay as they are."""
    merges: Sequence[tuple[str, str]] | None = None
    """In the order of their ranks; None to merge by the scores."""

    def __post_init__(self) -> None:
        if not len(self.pieces) == len(self.scores) == len(self.types):
            raise TokenizerError(
                f"the vocabulary has {len(self.pieces)} pieces, but {len(self.scores)} scores and "
                f"{len(self.types)} types of pieces; there must be one of each for every piece"
            )
        if not all(map(math.isfinite, self.scores)):
            raise TokenizerError("the vocabulary has a score that is not a finite number")
        ids: dict[str, int] = {}
        for token_id, piece in enumerate(self.pieces):
            if ids.setdefault(piece, token_id) != token_id:
                raise TokenizerError(
                    f"the vocabulary has {piece!r} twice, as ids {ids[piece]} and {token_id}"
                )


def build_backend(vocabulary: SentencePieceVocabulary) -> tokenizers.Tokenizer:
    """The vocabulary's tokenizer, which puts no BOS or EOS around a text.

    Raises:
        TokenizerError: the `tokenizers` library refuses the vocabulary.
    """
    try:
        return _Builder(vocabulary).build()
    except Exception as error:  # the library raises bare exceptions
        raise TokenizerError(f"the vocabulary cannot be used: {error}") from error


class _Builder:
    """Makes the parts of one tokenizer."""

    def __init__(self, vocabulary: SentencePieceVocabulary) -> None:
        self._vocabulary = vocabulary
        self._by_type: dict[int, dict[str, int]] = {kind: {} for kind in PieceType}
        for token_id, piece in enumerate(vocabulary.pieces):
            self._by_type.setdefault(vocabulary.types[token_id], {})[piece] = token_id
        self._normal = self._by_type[PieceType.NORMAL]
        self._added = sorted(self._by_type[PieceType.USER_DEFINED], key=len, reverse=True)
        self._unknown = next(iter(self._by_type[PieceType.UNKNOWN]), None)
        self._has_bytes = len(self._by_type[PieceType.BYTE]) == 256
        self._has_prefix = vocabulary.prefix != "never"

    def build(self) -> tokenizers.Tokenizer:
        cuts: list[pre_tokenizers.PreTokenizer] = []
        model: models.Model
        if self._vocabulary.is_unigram:
            model = self._unigram()
            if self._has_bytes:  # a text that reads like a byte's piece is not a byte
                cuts = [_cut("<(?=0x[0-9A-F]{2}>)", "merged_with_previous")]
        else:
            model = bpe = self._bpe()
            if self._added:  # words without merges: they are cut out, and taken as they are
                cuts = [_cut("|".join(map(re.escape, self._added)))]
                cuts += self._cuts_of_unmade_pieces(bpe)
                bpe.ignore_merges = True
        backend = tokenizers.Tokenizer(model)
        backend.normalizer = self._normalizer()
        backend.pre_tokenizer = pre_tokenizers.Sequence([*self._prefix(), *cuts])
        backend.decoder = self._decoder()
        special = {**self._by_type[PieceType.UNKNOWN], **self._by_type[PieceType.CONTROL]}
        backend.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
        return backend

    # Models

    def _bpe(self) -> models.BPE:
        spelled = self._spelled_bytes()
        pieces = [spelled.get(piece, piece) for piece in self._vocabulary.pieces]
        merges = self._vocabulary.merges
        return models.BPE(
            vocab={piece: token_id for token_id, piece in enumerate(pieces)},
            merges=self._ranked_merges({*self._normal, *spelled.values()})
            if merges is None
            else list(merges),
            unk_token=self._unknown,
            fuse_unk=True,
            byte_fallback=self._has_bytes,
        )

    def _spelled_bytes(self) -> dict[str, str]:
        """ASCII characters that only longer pieces and a byte have, by the byte's piece.

        A byte merges with nothing, but the character does: Gemma's tabs are such a case.
        """
        missing = {character for piece in self._normal for character in piece}
        missing -= set(self._vocabulary.pieces)
        names = {f"<0x{ord(one):02X}>": one for one in missing if one.isascii()}
        return {name: names[name] for name in names.keys() & self._by_type[PieceType.BYTE].keys()}

    def _ranked_merges(self, parts: set[str]) -> list[tuple[str, str]]:
        """Each way to put a piece together from two, best pieces first."""
        scores = self._vocabulary.scores
        ranked = sorted(self._normal.items(), key=lambda item: (-scores[item[1]], item[1]))
        return [
            (piece[:middle], piece[middle:])
            for piece, _ in ranked
            for middle in range(1, len(piece))
            if piece[:middle] in parts and piece[middle:] in parts
        ]

    def _unigram(self) -> models.Unigram:
        """The library knows no types of pieces, so that they must show in the scores."""
        normal = [self._vocabulary.scores[token_id] for token_id in self._normal.values()]
        lowest = min(0.0, *normal, 0.0)
        entries = []
        for token_id, piece in enumerate(self._vocabulary.pieces):
            kind, score = self._vocabulary.types[token_id], self._vocabulary.scores[token_id]
            if kind == PieceType.USER_DEFINED:  # likelier than any other way, the longest most
                score = 0.1 * (len(piece.encode()) - 1)
            elif kind != PieceType.NORMAL:  # its characters are likelier one by one
                score = (len(piece) + 1) * (lowest - 1)
            entries.append((piece, score))
        unknown_id = self._by_type[PieceType.UNKNOWN].get(self._unknown or "")
        return models.Unigram(entries, unknown_id, byte_fallback=self._has_bytes)

    def _cuts_of_unmade_pieces(self, model: models.BPE) -> list[pre_tokenizers.PreTokenizer]:
        """Cuts through texts that are a piece as they stand, but which no merges make.

        A word that is in the vocabulary will be one token: so would be a byte's written name.
        """
        special = {*self._added, *self._by_type[PieceType.UNKNOWN]}
        special |= self._by_type[PieceType.CONTROL].keys()
        heads: dict[str, str] = {}
        for piece in self._vocabulary.pieces:
            tokens = [] if piece in special else model.tokenize(piece)
            if len(tokens) > 1:
                end = tokens[0].offsets[1]  # in bytes, perhaps within a character
                heads[piece] = piece[: len(piece.encode()[:end].decode(errors="replace"))]
        depth, rests = 0, set(heads)
        while rests:  # what is left of one may be another
            rests = {piece[len(heads[piece]) :] for piece in rests} & heads.keys()
            depth += 1
        cuts = [
            rf"{re.escape(head)}(?={re.escape(piece[len(head) :])}\z)"
            for piece, head in heads.items()
            if head != piece
        ]
        return [_cut(rf"\A(?:{'|'.join(cuts)})") for _ in range(depth if cuts else 0)]

    # Rules for texts

    def _normalizer(self) -> normalizers.Normalizer:
        """What happens to characters; added words are kept out of it by private characters."""
        steps: list[normalizers.Normalizer] = []
        kept: dict[str, str] = {}
        if self._vocabulary.character_map:
            mapped = normalizers.Precompiled(self._vocabulary.character_map)
            changed = [piece for piece in self._added if mapped.normalize_str(piece) != piece]
            kept = {piece: chr(_PRIVATE - i) for i, piece in enumerate(changed)}
            steps += [normalizers.Replace(piece, mark) for piece, mark in kept.items()]
            steps.append(mapped)
        removes, has_prefix = self._vocabulary.removes_extra_spaces, self._has_prefix
        if removes:
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps += [normalizers.Replace(mark, piece) for piece, mark in kept.items()]
        if removes:
            steps.append(normalizers.Replace(Regex(rf"[ {SPACE}]+\z"), ""))
        if removes and not has_prefix:
            steps.append(normalizers.Replace(Regex(r"\A "), ""))
        if not (removes and has_prefix):  # where a space in front is the prefix
            steps.append(normalizers.Replace(" ", SPACE))
        return normalizers.Sequence(steps)

    def _prefix(self) -> list[pre_tokenizers.PreTokenizer]:
        """The prefix is put in front as a plain space, and spelled after that.

        `Metaspace` adds none to a text that has it. SentencePiece does, so that texts have had
        their own spaces spelled before, unless a space in front is to count as the prefix.
        """
        if not self._has_prefix:
            return []
        scheme = self._vocabulary.prefix
        return [
            pre_tokenizers.Metaspace(replacement=" ", prepend_scheme=scheme, split=False),
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=False),
        ]

    def _decoder(self) -> decoders.Decoder:
        steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
        if self._has_bytes:
            steps.append(decoders.ByteFallback())
        steps.append(decoders.Fuse())
        if self._has_prefix or self._vocabulary.removes_extra_spaces:
            steps.append(decoders.Strip(" ", 1, 0))
        return decoders.Sequence(steps)


def _cut(pattern: str, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior)
