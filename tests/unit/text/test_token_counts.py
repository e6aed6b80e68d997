"""Lower bounds and ends of texts against the tokenizers themselves, on random texts."""

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from engine.checkpoint.locate import resolve_model
from engine.config import EngineConfig
from engine.errors import PromptError
from engine.frontend.input_processor import InputProcessor
from engine.text.gguf_tokenizer import SPLITTINGS
from engine.text.sentencepiece_vocabulary import SentencePieceVocabulary, build_backend
from engine.text.text_ends import TextEnds
from engine.text.token_counts import TokenCounts
from engine.text.tokenizer import Tokenizer, get_tokenizer
from engine.types.sampling import SamplingParams
from tests.support.model_configs import model_config

CORPUS = [
    "The seven sorts of mica are known to the trade, of which five are of use here.",
    "café naïve Ångström e\u0301 ή 中文分词 こんにちは 🙂🙃 \u1100\u1161 12345 3.14159",
    "def run(x):\n        return x + 1\n\n\n====================\n",
]
PIECES = [
    *CORPUS,
    *("    <b>\u3000  ", "<|c|>sorts", "<|c|>\u0338", "<i>\u0338", "<|c|>", "<b>", "<i>"),
    *(
        " ",
        "    ",
        "\n",
        "\t\t",
        "a",
        "aaaaaaaa",
        "====",
        "e\u0301\u0301",
        "\u0338",
        "\x04",
        "\u3000",
    ),
    *(
        "🙂",
        "中",
        "\ue000",
        "12",
        "'s",
        " the",
        "sorts of",
        "▁",
        "<b>",
        "<i>",
        "<|c|>",
        "ᾂ",
        "\u1161",
    ),
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENS = [
    AddedToken("<|c|>", special=True, normalized=False),
    AddedToken("<b>", lstrip=True, rstrip=True, normalized=False),
    AddedToken("<i>", normalized=True),
]


def random_text(rng: random.Random, num_pieces: int) -> str:
    """A few kinds of pieces or many, often the same one again and again."""
    pieces = rng.sample(PIECES, rng.choice([1, 1, 2, 3, len(PIECES)]))
    text = ""
    while num_pieces > 0:
        repeats = rng.choice([1, 1, 1, rng.randint(1, 30)])
        text += rng.choice(pieces) * repeats
        num_pieces -= repeats
    return text


def byte_level(splitting: Any, *, alphabet: bool = True, added: bool = True) -> Any:
    """A trained byte-level BPE with another splitting."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=splitting.ignore_merges))
    if splitting.normalizer is not None:
        backend.normalizer = splitting.normalizer()
    backend.pre_tokenizer = splitting.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=letters, show_progress=False)
    backend.train_from_iterator(CORPUS * 5, trainer)
    if added:
        backend.add_tokens([token for token in TOKENS if not token.lstrip])
    return backend


def with_spaces_taken() -> Any:
    backend = byte_level(SPLITTINGS["llama3"])
    backend.add_tokens(TOKENS)
    return backend


def with_prefix_space() -> Any:
    backend = byte_level(SPLITTINGS["gpt-2"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


def sentence_piece(kind: str) -> Any:
    """Byte fallback over pieces with spelled spaces, as BPE or as unigrams."""
    pieces = sorted(
        {
            text[i : i + n].replace(" ", "▁")
            for text in CORPUS
            for n in (1, 2, 3)
            for i in range(len(text) - n + 1)
        }
    )
    pieces = [piece for piece in pieces if not set(piece) & set("🙃中")]
    if kind == "unigram":
        scores = [("<unk>", 0.0), *((piece, -20.0) for piece in BYTES)]
        scores += [(piece, -float(9 - len(piece))) for piece in pieces]
        backend = tokenizers.Tokenizer(models.Unigram(scores, 0, byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        singles = [piece for piece in pieces if len(piece) == 1]
        pairs = [piece for piece in pieces if len(piece) == 2 and set(piece) <= set(singles)]
        tokens = dict.fromkeys(["<unk>", *BYTES, *singles, *pairs])
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                merges=[(pair[0], pair[1]) for pair in pairs],
                unk_token="<unk>",
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    backend.add_tokens(TOKENS)
    return backend


def sentencepiece_file(prefix: str) -> Any:
    """As a file of SentencePiece's is read, with words that are cut out."""
    state = json.loads(sentence_piece("bpe").to_str())
    pieces = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
    names = [str(token) for token in TOKENS]
    types = [2, *[6] * 256, *[1] * (len(pieces) - 257)]
    return build_backend(
        SentencePieceVocabulary(
            is_unigram=False,
            pieces=[*pieces, *names, "<cut out>"],
            scores=[-float(token_id) for token_id in range(len(pieces) + len(names) + 1)],
            types=[*types, *[3] * len(names), 4],
            prefix=prefix,  # type: ignore[arg-type]
        )
    )


KINDS: dict[str, Callable[[], Any]] = {
    "smollm": lambda: get_tokenizer(resolve_model(None)).backend,
    "gpt-2": lambda: byte_level(SPLITTINGS["gpt-2"]),
    "llama3": lambda: byte_level(SPLITTINGS["llama3"]),
    "qwen2": lambda: byte_level(SPLITTINGS["qwen2"]),
    "letters missing": lambda: byte_level(SPLITTINGS["smollm"], alphabet=False),
    "spaces taken": with_spaces_taken,
    "prefix space": with_prefix_space,
    "sentencepiece": lambda: sentence_piece("bpe"),
    "unigram": lambda: sentence_piece("unigram"),
    "sentencepiece file": lambda: sentencepiece_file("always"),
    "first only": lambda: sentencepiece_file("first"),
    "never": lambda: sentencepiece_file("never"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokenizer_falls_short_of_the_bound(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = KINDS[kind]()
    counts = TokenCounts.of(backend)
    assert counts is not None
    rng = random.Random(3)
    texts = [piece * 3 for piece in PIECES]
    texts += [random_text(rng, rng.randint(0, 60)) for _ in range(50)]
    for text in texts:
        monkeypatch.setattr("engine.text.token_counts._BLOCK_BYTES", rng.choice([16, 1 << 16]))
        num_tokens = len(backend.encode(text, add_special_tokens=False).ids)
        for enough in (1, 5, num_tokens, num_tokens + 1, 10**6):
            found = counts.at_least(text, enough)
            assert found <= num_tokens, (enough, text)
    prose = CORPUS[0] * 40
    num_tokens = len(backend.encode(prose, add_special_tokens=False).ids)
    assert counts.at_least(prose, 10**6) > 0.5 * num_tokens


def test_tokenizers_of_other_kinds_have_no_bound() -> None:
    def bpe(**options: Any) -> Any:
        return tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "u": 1}, merges=[], **options))

    others = [
        tokenizers.Tokenizer(models.WordLevel({"u": 0}, unk_token="u")),
        tokenizers.Tokenizer(models.WordPiece({"u": 0}, unk_token="u")),
        tokenizers.Tokenizer(models.Unigram([("u", 0.0)], 0)),
        bpe(),
        bpe(unk_token="u", fuse_unk=True),
        bpe(end_of_word_suffix="</w>"),
    ]
    for change in (
        {"normalizer": normalizers.NFKC()},
        {"normalizer": normalizers.Strip()},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Split(Regex(r"\s+"), "removed")},
    ):
        backend = byte_level(SPLITTINGS["gpt-2"])
        for name, value in change.items():
            setattr(backend, name, value)
        others.append(backend)
    for backend in others:
        assert TokenCounts.of(backend) is None
    tokenizer = Tokenizer(others[0], special_tokens={}, chat_templates={}, source="test")
    assert tokenizer.num_tokens_at_least("u" * 99, 5) == 0


@pytest.mark.parametrize("kind", ["smollm", "gpt-2", "llama3", "qwen2"])
@pytest.mark.parametrize("adds", [True, False])
def test_ends_are_those_of_the_whole(kind: str, adds: bool) -> None:
    backend = KINDS[kind]()
    if kind == "llama3":
        frame = [("<|c|>", backend.token_to_id("<|c|>"))]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|c|> $A <|c|>", special_tokens=frame
        )
    ends = TextEnds.of(backend)
    assert ends is not None
    rng, lengths = random.Random(4), []
    for _ in range(30):
        text = random_text(rng, rng.randint(0, 400))
        whole = backend.encode(text, add_special_tokens=adds).ids
        for most in (1, 3, 40):
            found = ends.last_ids(text, most, add_special_tokens=adds)
            assert found[-most:] == whole[-most:]
            lengths.append(len(found) < len(whole))
    assert any(lengths)


def test_ends_of_other_kinds_are_not_cut() -> None:
    for kind in ("letters missing", "sentencepiece", "unigram", "prefix space", "spaces taken"):
        assert (TextEnds.of(KINDS[kind]()) is not None) == (kind == "letters missing")


def test_long_texts_are_refused_without_being_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = get_tokenizer(resolve_model(None))
    processor = InputProcessor(
        EngineConfig.from_kwargs(max_model_len=1000), model_config(), tokenizer
    )
    processor._model = model_config(vocab_size=tokenizer.vocab_size)
    tokenizer.num_tokens_at_least("a", 1)  # makes its tables
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counting(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    rng = random.Random(5)
    for unit in ("words and more words, ", "x", "中文 ", "".join(rng.choices(CORPUS[0], k=999))):
        text = (unit * (4_000_000 // len(unit) + 1))[:4_000_000]
        began_s = time.monotonic()
        for prompt in (text, {"prompt": text, "add_special_tokens": False}):
            with pytest.raises(PromptError, match=r"context length is 1000 .*has at least \d+\."):
                processor.process_prompt(prompt, SamplingParams())
        refused_s, began_s = time.monotonic() - began_s, time.monotonic()
        encode(tokenizer, text[: len(text) // 20])
        assert refused_s < 10 * (time.monotonic() - began_s), "half of what tokenizing all takes"
        with pytest.raises(PromptError, match="truncate_prompt_tokens=1000 keeps too many"):
            processor.process_prompt(text, SamplingParams(truncate_prompt_tokens=1000))
    assert encoded == []
    text = "words and more words, " * 20_000
    kept = processor.process_prompt(text, SamplingParams(truncate_prompt_tokens=999)).token_ids
    assert encoded == []
    assert kept == encode(tokenizer, text)[-999:]
    fits = " " * 60_000  # many characters, few tokens
    assert processor.process_prompt(fits, SamplingParams()).token_ids == encode(tokenizer, fits)
