"""SentencePiece vocabularies: the sentencepiece library's own ids and texts, from either file."""

import functools
import json
import tempfile
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers

from engine.checkpoint.locate import ModelSource
from engine.errors import TokenizerError
from engine.server.openai.text_offsets import offsets_in_prompt
from engine.text import sentencepiece_file, tokenizer_conversion, tokenizer_files
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.sentencepiece_vocabulary import SentencePieceVocabulary, build_backend
from engine.text.tokenizer import Tokenizer, get_tokenizer
from engine.types.sampling import SamplingParams
from tests.support.sentencepiece_models import (
    ADDED,
    SPECIAL,
    WORDS,
    TrainedModel,
    Training,
    train,
    write_folder,
    write_gguf,
)

TRAININGS = [
    *(
        Training(kind=kind, prefix=prefix, removes_extra=removes, added=added)
        for kind in ("bpe", "unigram")
        for prefix in (True, False)
        for removes in (True, False)
        for added in (True, False)
    ),
    *(Training(kind=kind, fallback=False) for kind in ("bpe", "unigram")),
    *(
        Training(kind=kind, rule="nmt_nfkc", removes_extra=True, added=True)
        for kind in ("bpe", "unigram")
    ),
    Training(vocab_size=1000),
]
few = settings(max_examples=50, deadline=None)
PARTS = st.one_of(
    st.sampled_from((*WORDS, *ADDED, "<a b>", *SPECIAL, "</s", "<0x0A>", "<0x4", "▁", "▁▁")),
    st.sampled_from((" ", "  ", "   ", "\n", "\t", "\r\n", "\u3000", "\u00a0", "\u200b", "\x00")),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=4),
    st.text("abehlo ▁\n", max_size=6),
)
TEXTS = st.lists(PARTS, max_size=8).map("".join)


def read(path: Path) -> Tokenizer:
    return get_tokenizer(ModelSource("trained", "gguf" if path.is_file() else "folder", path))


@functools.cache
def from_gguf(training: Training) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return read(write_gguf(Path(folder) / "model.gguf", train(training)))


def assert_agrees(tokenizer: Tokenizer, model: TrainedModel, training: Training, text: str) -> None:
    """Same ids, and the same text from them, at once and token by token."""
    ids, expected = tokenizer.encode(text, add_special_tokens=False), model.encode(text)
    if training.kind == "unigram" and ids != expected:
        # Several ways are as likely, but for what rounding makes of them.
        assert model.weight(ids) == pytest.approx(model.weight(expected), abs=1e-3)
        assert model.library.decode(ids) == model.library.decode(expected)
    else:
        assert ids == expected
    whole = tokenizer.decode(ids)
    params = SamplingParams(max_tokens=None)
    detokenizer = IncrementalDetokenizer.create(tokenizer, params, [])
    for token_id in ids:
        detokenizer.update([token_id], finished=False)
    assert detokenizer.output_text(finished=True, delta=False) == whole
    if model.library.unk_id() in ids:
        return
    # Of a model that drops spaces, the library drops more than one in front of a text as well.
    if not (training.removes_extra and "▁" in text):
        assert whole == model.library.decode(ids)
    is_plain = training.rule == "identity" and not training.removes_extra
    if is_plain and not any(token in text for token in SPECIAL):
        assert whole == text.replace("▁", " ")


@pytest.mark.parametrize("training", TRAININGS, ids=str)
@given(text=TEXTS)
@example(text="Hello")
@example(text=" Hello")
@example(text="  Hello  world  ")
@example(text="<0x41>")
@example(text="<think>hello<think>\n\n<a b>")
@example(text="<|user|> hello<|end|>world")
@example(text="▁ ▁hello▁")
@example(text="aé世🙂\x00\x7f\u0301")
@few
def test_gguf_files_give_the_librarys_ids_and_text(training: Training, text: str) -> None:
    assert_agrees(from_gguf(training), train(training), training, text)


def test_a_space_in_front_counts(tmp_path: Path) -> None:
    model = train(Training())
    with_prefix = read(write_gguf(tmp_path / "a.gguf", model))
    assert with_prefix.encode(" Hello") != with_prefix.encode("Hello")
    assert with_prefix.decode(with_prefix.encode(" Hello")) == " Hello"
    without = read(write_gguf(tmp_path / "b.gguf", model, add_space_prefix=False))
    assert without.encode(" hello") == with_prefix.encode("hello")
    assert without.decode(without.encode(" hello")) == " hello"
    assert not without.strips_leading_space
    assert without.token_bytes_table(skip_special_tokens=True) is not None


def test_what_a_gguf_file_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is converted, and nothing needs Transformers."""
    monkeypatch.setattr(tokenizer_files, "converted_folder", lambda path: pytest.fail("converted"))
    left_out = dict.fromkeys(
        ("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces")
    )
    left_out |= dict.fromkeys(("bos_token_id", "eos_token_id", "unknown_token_id"))
    bpe = train(Training())
    tokenizer = read(write_gguf(tmp_path / "a.gguf", bpe, **left_out))
    assert tokenizer.encode("hello fox") == [1, *bpe.encode("hello fox")]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_tokens["unk_token"] == "<unk>"
    assert {0, 1, 2} < tokenizer.special_ids
    unigram = train(Training(kind="unigram", prefix=False))
    tokenizer = read(write_gguf(tmp_path / "b.gguf", unigram, **left_out | {"eos_token_id": 2}))
    assert tokenizer.encode("hello fox") == [*unigram.encode("hello fox"), 2]
    without_types = write_gguf(tmp_path / "c.gguf", bpe, token_type=None)
    assert read(without_types).encode("hello é<s><0x41>") == bpe.encode("hello é<s><0x41>")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(("bos", "eos"), [(True, True), (True, False), (False, True)])
def test_frames(kind: str, bos: bool, eos: bool, tmp_path: Path) -> None:
    model = train(Training(kind=kind))
    path = write_gguf(tmp_path / "a.gguf", model, add_bos_token=bos, add_eos_token=eos)
    tokenizer, plain = read(path), model.encode(" hello")
    assert tokenizer.encode(" hello") == [1] * bos + plain + [2] * eos
    assert tokenizer.encode(" hello", add_special_tokens=False) == plain
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"
    assert tokenizer.encode("") == [1] * bos + [2] * eos


def test_added_words_are_kept_whole(tmp_path: Path) -> None:
    """A space in one may be written as such: Gemma's files do so."""
    model = train(Training(added=True))
    tokens = [piece.piece.replace("<a▁b>", "<a b>") for piece in model.proto.pieces]
    tokenizer = read(write_gguf(tmp_path / "a.gguf", model, tokens=tokens))
    for text in ("<a b>", "x<a b>\n<a▁b>", " <think> a<think>b", "<thin<think>"):
        assert tokenizer.encode(text) == model.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")
    added = model.library.piece_to_id("<think>")
    assert added in tokenizer.encode("hello<think>")
    assert added not in tokenizer.special_ids
    assert tokenizer.decode([added]) == "<think>"


def test_pieces_that_no_merges_make(tmp_path: Path) -> None:
    """They are in the vocabulary, but no text is split so, whatever stands around them."""
    model = TrainedModel(train(Training(added=True, prefix=False)).bytes)
    last = model.proto.pieces[-1].score
    for index, piece in enumerate(("qzx", "zxq", "世q界z", "q世", "aqzx")):
        model.proto.pieces.add(piece=piece, score=last - index)
    for piece in {*"qzx"} - {piece.piece for piece in model.proto.pieces}:
        model.proto.pieces.add(piece=piece, score=last - 10)
    model = TrainedModel(model.proto.SerializeToString())
    tokenizer = read(write_gguf(tmp_path / "a.gguf", model))
    for text in ("qzx", "zxq", "世q界z", "q世", "aqzx", "<0x41>", "aqz", "<0xE4>"):
        for text_of in (text, f"<think>{text}<think>", f"{text}\n", f"x{text}\n{text}"):
            assert tokenizer.encode(text_of) == model.encode(text_of), text_of


def test_a_tab_that_is_only_a_byte_merges(tmp_path: Path) -> None:
    model = TrainedModel(train(Training()).bytes)
    kept = [piece for piece in model.proto.pieces if piece.piece != "\t"]
    del model.proto.pieces[:]
    model.proto.pieces.extend(kept)
    model.proto.pieces.add(piece="\t\t", score=-0.5)
    model = TrainedModel(model.proto.SerializeToString())
    tokenizer = read(write_gguf(tmp_path / "a.gguf", model))
    for text in ("\t", "\t\t", "a\t\t\tb", "<0x09>"):
        assert tokenizer.encode(text) == model.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(model.library)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "no scores"),
        ({"scores": [1.0, 2.0]}, "but 2 scores"),
        ({"scores": 5}, "scores must be an array of numbers"),
        ({"scores": "-1"}, "scores must be an array of numbers"),
        ({"token_type": [1]}, "1 types of pieces"),
        ({"token_type": ["a"]}, "token_type must be an array of integers"),
        ({"merges": ["not there"]}, "cannot be used"),
        ({"add_bos_token": True, "bos_token_id": 400}, "bos_token_id is 400"),
        ({"precompiled_charsmap": [1, 2, 3]}, "cannot be used"),
        ({"add_space_prefix": "false"}, "add_space_prefix must be true or false"),
        ({"add_eos_token": 2}, "add_eos_token must be true or false"),
    ],
)
def test_files_that_are_wrong(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=message):
        read(write_gguf(tmp_path / "a.gguf", train(Training()), **changes))


def test_vocabularies_that_are_wrong() -> None:
    for pieces, scores, message in (
        (["a", "b", "a"], [0.0] * 3, "'a' twice, as ids 0 and 2"),
        (["a"], [float("nan")], "not a finite number"),
    ):
        with pytest.raises(TokenizerError, match=message):
            SentencePieceVocabulary(
                is_unigram=False, pieces=pieces, scores=scores, types=[1] * len(pieces)
            )


def test_merges_of_a_file_without_scores(tmp_path: Path) -> None:
    model = train(Training())
    backend = from_gguf(Training()).backend
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    tokenizer = read(write_gguf(tmp_path / "a.gguf", model, scores=None, merges=merges))
    assert tokenizer.encode(" the quick fox") == model.encode(" the quick fox")


def test_offsets_of_texts_that_begin_with_spaces() -> None:
    """The space that is put in front is not in the text."""
    tokenizer = from_gguf(Training())
    for text in ("hello", " hello", "  hello world", "世é\n a"):
        ids = tokenizer.encode(text)
        offsets = offsets_in_prompt(tokenizer, text, ids)
        assert len(offsets) == len(ids)
        assert offsets[0] == 0
        assert offsets == sorted(offsets)
        last = tokenizer.token_text(ids[-1])
        assert text[offsets[-1] :] == last or text.endswith(last.strip())


# Folders with a SentencePiece file


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


FOLDERS = [
    (Training(added=True), {"tokenizer_class": "LlamaTokenizer", "legacy": True}),
    (Training(), {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
    (Training(), {"tokenizer_class": "CodeLlamaTokenizer"}),
    (Training(prefix=False), {"tokenizer_class": "LlamaTokenizer"}),
    (Training(prefix=False, added=True), {"tokenizer_class": "GemmaTokenizer"}),
    (Training(kind="unigram", added=True), {}),
    (Training(kind="unigram"), {"tokenizer_class": "LlamaTokenizer"}),
    (
        Training(kind="unigram", rule="nmt_nfkc", removes_extra=True, fallback=False),
        {"tokenizer_class": "T5Tokenizer"},
    ),
]


@pytest.mark.parametrize(("training", "settings"), FOLDERS, ids=str)
def test_converted_tokenizers_give_the_librarys_ids(
    training: Training, settings: dict[str, object], tmp_path: Path
) -> None:
    model = train(training)
    name = "spiece.model" if "T5Tokenizer" in settings.values() else "tokenizer.model"
    tokenizer = read(write_folder(tmp_path / "model", model, name=name, **settings))

    @given(text=TEXTS.filter(lambda text: not any(token in text for token in SPECIAL)))
    @example(text=" Hello")
    @example(text="<think>hello")
    @example(text="  a  b  ")
    @few
    def agree(text: str) -> None:
        assert_agrees(tokenizer, model, training, text)

    agree()
    assert {0, 1, 2} <= tokenizer.special_ids
    assert tokenizer.encode("hello<s>", add_special_tokens=False)[-1] == 1


def test_settings_beside_the_file_say_more(tmp_path: Path) -> None:
    """BOS, a space in front or none, and whether texts behind special tokens begin with one."""
    model = train(Training(added=True))

    def ids(name: str, text: str, **settings: object) -> list[int]:
        settings |= {"tokenizer_class": "LlamaTokenizer"}
        return read(write_folder(tmp_path / name, model, **settings)).encode(text)

    spaced = model.encode("hello")
    bare = TrainedModel(model.bytes)
    bare.proto.normalizer_spec.add_dummy_prefix = False
    within = TrainedModel(bare.proto.SerializeToString()).encode("hello")
    assert within != spaced
    assert ids("a", "<s>hello", legacy=True, add_bos_token=False) == [1, *spaced]
    assert ids("b", "<s>hello", legacy=False, add_bos_token=False) == [1, *within]
    assert ids("c", "hello<s>", add_bos_token=True) == [1, *spaced, 1]
    assert ids("d", "hello", add_prefix_space=False, add_bos_token=False) == within
    folder = write_folder(
        tmp_path / "e", model, tokenizer_class="LlamaTokenizer", extra_special_tokens=["<|new|>"]
    )
    tokenizer = read(folder)
    assert tokenizer.encode("<|new|>", add_special_tokens=False) == [len(model.library)]
    assert len(model.library) in tokenizer.special_ids


def test_rules_of_a_tokenizers_own_stay() -> None:
    model = train(Training())
    file = sentencepiece_file.parse_model(model.bytes)
    assert file is not None
    assert list(file.pieces) == [piece.piece for piece in model.proto.pieces]
    converted = build_backend(
        SentencePieceVocabulary(
            is_unigram=False,
            pieces=list(file.pieces),
            scores=[score for score, _ in file.pieces.values()],
            types=[type_ for _, type_ in file.pieces.values()],
        )
    )
    restored = sentencepiece_file.with_rules_of_file(converted, file, {})
    assert restored is not None
    assert restored.encode(" Hello").ids == model.encode(" Hello")
    assert sentencepiece_file.with_rules_of_file(converted, file._replace(model_type=4), {}) is None
    assert (
        sentencepiece_file.with_rules_of_file(converted, file._replace(is_usual=False), {}) is None
    )
    converted.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.NFKD()])
    assert sentencepiece_file.with_rules_of_file(converted, file, {}) is None
    lost = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("<s>", 0.0)], 0))
    with pytest.raises(TokenizerError, match="none of the file's pieces"):
        sentencepiece_file.with_rules_of_file(lost, file, {})


def test_files_of_other_formats() -> None:
    """Names such as tokenizer.model are used for other things as well."""
    whole = train(Training()).bytes
    for data in (b"", b"IQ== 0\nIg== 1\n", b"\xff" * 40, whole[:-3], b'{"vocab": 1}', b"\n\x00"):
        assert sentencepiece_file.parse_model(data) is None


def test_conversions_of_before_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "m", train(Training()), tokenizer_class="LlamaTokenizer")
    first = tokenizer_conversion.converted_folder(folder)
    assert tokenizer_conversion.converted_folder(folder) == first
    monkeypatch.setattr(tokenizer_conversion, "_RULES", "1")
    assert tokenizer_conversion.converted_folder(folder) != first
