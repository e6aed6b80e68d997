"""Tokenizer: equal to Transformers' on random text; files found, converted, cached, refused."""

import json
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.checkpoint.gguf import GGUFFile
from engine.checkpoint.locate import ModelSource, embedded_model_path, resolve_model
from engine.errors import PromptError, TokenizerError
from engine.text import tokenizer_conversion
from engine.text.gguf_tokenizer import build_backend
from engine.text.tokenizer import Tokenizer, get_tokenizer

PIECES = (
    "the quick brown fox",
    " Hello",
    "don't we'LL I'm",
    "naïve café Größe",
    "你好，世界",
    "こんにちは カタカナ",
    "안녕하세요",
    "Привет мир",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "😀👩‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301a\u0300",
    "\u200b\u00a0\u3000",
    "def f(x):\n\treturn x  # note\n",
    '{"key": [null, true]}\r\n',
    "   ",
    "\n\n\n",
    "\t \t",
    "<|im_start|>user\n",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start",
    "!!??...---",
    "$€£@#%^&*()_+=",
    "\x00\x07\x7f",
    "ﬁ ﷽ 𝔘𝔫𝔦",
)
NUMBERS = ("0", "7", "12", " 345", "  2024", "3.14", "½ ² Ⅷ ٣", "a1b22", "\n\n10")


def random_text(rng: random.Random, pieces: tuple[str, ...], num_pieces: int) -> str:
    parts = []
    for _ in range(num_pieces):
        if rng.random() < 0.2:
            parts.append(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xA1, 0xD7FF)))))
        else:
            parts.append(rng.choice(pieces))
        parts.append(rng.choice(("", "", " ", "\n")))
    return "".join(parts)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return get_tokenizer(resolve_model(None))


@pytest.fixture(scope="module")
def converted_by_transformers() -> tokenizers.Tokenizer:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, vocabulary, _ = get_gguf_tokenizer(str(embedded_model_path()))
    backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    return backend


def test_equals_transformers_on_text_without_numbers(
    tokenizer: Tokenizer, converted_by_transformers: tokenizers.Tokenizer
) -> None:
    rng = random.Random(1)
    texts = [random_text(rng, PIECES, rng.randrange(1, 30)) for _ in range(400)]
    texts = [text for text in texts if not any(character.isnumeric() for character in text)]
    assert len(texts) > 300
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == converted_by_transformers.encode(text).ids, text
        for skip in (True, False):
            expected = converted_by_transformers.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_numbers_are_split_into_digits_as_the_published_tokenizer_does(
    tokenizer: Tokenizer, converted_by_transformers: tokenizers.Tokenizer
) -> None:
    """Transformers' conversion knows no pre-tokenizer "smollm"; with digits apart, it agrees."""
    reference = tokenizers.Tokenizer.from_str(converted_by_transformers.to_str())
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    rng = random.Random(2)
    differing = 0
    for _ in range(400):
        text = random_text(rng, PIECES + NUMBERS * 2, rng.randrange(1, 30))
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text).ids, text
        differing += ids != converted_by_transformers.encode(text).ids
    assert differing, "the digits would not matter, and this test with them"


def test_batch_equals_single(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    texts = ["", *(random_text(rng, PIECES + NUMBERS, 20) for _ in range(20))]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_long_texts_let_other_threads_run(tokenizer: Tokenizer) -> None:
    """And have the ids that they would have anyway."""
    text = "Some words, 12 numbers and é: all of it again. " * 8000
    expected = tokenizer.backend.encode(text).ids

    def longest_gap() -> float:
        """How long another thread had to wait, as a share of the time that it took."""
        gaps_s, is_done = [0.0], threading.Event()

        def watch() -> None:
            last_s = time.monotonic()
            while not is_done.wait(0.002):
                gaps_s.append(time.monotonic() - last_s)
                last_s = time.monotonic()

        watcher = threading.Thread(target=watch)
        watcher.start()
        began_s = time.monotonic()
        ids = tokenizer.encode(text)
        took_s = time.monotonic() - began_s
        is_done.set()
        watcher.join()
        assert ids == expected
        return max(gaps_s) / took_s

    # On a busy machine a thread may wait for a processor, but not every time.
    assert any(longest_gap() < 0.5 for _ in range(5)), "the interpreter's lock was held"


def test_facts_of_the_embedded_tokenizer(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.max_token_id) == (49_152, 49_151)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_ids == tokenizer.added_ids == frozenset(range(17))
    assert tokenizer.id_to_token(2) == "<|im_end|>"
    assert tokenizer.id_to_token(10**6) == ""
    assert tokenizer.chat_template is not None
    assert "im_start" in tokenizer.chat_template


def test_token_text_and_bytes(tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    for token_id in rng.sample(range(49_152), 3000):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        assert tokenizer.token_text(token_id) == text
        assert tokenizer.token_bytes(token_id).decode(errors="replace") == text
    ids = tokenizer.encode("a 👩‍👩‍👧 汉字 ﷽")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "a 👩‍👩‍👧 汉字 ﷽"
    texts = [tokenizer.token_text_after(ids[max(0, i - 4) : i], ids[i]) for i in range(len(ids))]
    assert "".join(texts) == "a 👩‍👩‍👧 汉字 ﷽"
    assert "" in texts, "no character was spread over tokens"


def test_refuses_what_is_no_text(tokenizer: Tokenizer) -> None:
    for text in ("a\ud800b", b"bytes", None, 3):
        with pytest.raises(PromptError):
            tokenizer.encode(text)  # type: ignore[arg-type]
        with pytest.raises(PromptError):
            tokenizer.encode_batch(["fine", text])  # type: ignore[list-item]


def test_refuses_what_is_no_list_of_ids(tokenizer: Tokenizer) -> None:
    for ids in ("abc", b"abc", 5, None, [-1], [True], [1.0], [2**32], ["1"]):
        with pytest.raises(PromptError, match=r"integers|token id .* from 0 to 4294967295"):
            tokenizer.decode(ids)  # type: ignore[arg-type]
    assert tokenizer.decode([2**32 - 1]) == ""
    assert tokenizer.decode(range(0)) == ""
    # A model's logits may be wider than the vocabulary.
    assert tokenizer.decode([*tokenizer.encode("so"), 2**31]) == "so"


def test_usual_path_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys\n"
        "from engine.text.tokenizer import get_tokenizer\n"
        "import engine.text.detokenizer, engine.frontend.logprobs\n"
        "from engine.checkpoint.locate import resolve_model\n"
        "tokenizer = get_tokenizer(resolve_model(None))\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'x'}], tokenize=True)\n"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))\n"
    )
    root = Path(__file__).parents[3]
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_threads_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    rng = random.Random(5)
    texts = [random_text(rng, PIECES + NUMBERS, 20) for _ in range(40)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda text: tokenizer.decode(tokenizer.encode(text)), texts))
    assert results == [tokenizer.decode(tokenizer.encode(text)) for text in texts]


# Folders


def small_backend(words: str = "abc") -> tokenizers.Tokenizer:
    vocabulary = {character: index for index, character in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    backend.enable_truncation(2)
    return backend


def write_folder(folder: Path, config: dict[str, Any] | None = None) -> ModelSource:
    small_backend().save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelSource("small", "folder", folder)


def test_folder(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "pad_token": None,
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "added_tokens_decoder": {
            "5": {"content": "<tool>", "special": False},
            "4": {"content": "</s>", "special": True},
        },
    }
    tokenizer = get_tokenizer(write_folder(tmp_path, config))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (3, 4)
    assert tokenizer.special_ids == {3, 4}
    assert tokenizer.added_ids == {3, 4, 5}
    assert tokenizer.encode("abcabc</s><tool>") == [0, 1, 2, 0, 1, 2, 4, 5]
    assert tokenizer.decode([0, 3, 1, 4, 5]) == "ab<tool>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "cab"}]) == "<s>cab"
    for name in (str(tmp_path), str(tmp_path / "tokenizer.json")):
        other = get_tokenizer(resolve_model(None), name=name)
        assert other.vocab_size == 6


def test_end_token_of_the_plain_vocabulary_is_skipped(tmp_path: Path) -> None:
    tokenizer = get_tokenizer(write_folder(tmp_path, {"eos_token": "c"}))
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode([0, 1, 2]) == "ab"
    assert tokenizer.vocab_size == 4


def test_named_chat_templates(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{1}}"},
    ]
    source = write_folder(tmp_path, {"chat_template": templates})
    messages = [{"role": "user", "content": "x"}]
    tokenizer = get_tokenizer(source)
    assert tokenizer.apply_chat_template(messages) == "plain"
    assert tokenizer.apply_chat_template(messages, tools=[{"name": "f"}]) == "1"
    assert tokenizer.apply_chat_template(messages, chat_template="tool_use") == "1"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    tokenizer = get_tokenizer(source)
    assert tokenizer.chat_template == "from the file"
    assert tokenizer.apply_chat_template(messages, chat_template="rag") == "rag"
    with pytest.raises(PromptError, match="default, rag, tool_use"):
        tokenizer.apply_chat_template(messages, chat_template="ragg")


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = get_tokenizer(write_folder(tmp_path))
    assert tokenizer.chat_template is None
    with pytest.raises(PromptError, match="has no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_missing_and_broken_files(tmp_path: Path) -> None:
    source = ModelSource("none", "folder", tmp_path)
    with pytest.raises(TokenizerError, match=r"looked for tokenizer\.json, tokenizer\.model"):
        get_tokenizer(source)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot read"):
        get_tokenizer(source)
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        get_tokenizer(source)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: it is nested too deep"):
        get_tokenizer(source)
    for name, values in {
        "bos_token": ([1], {}, 5, {"content": None}),
        "added_tokens_decoder": ([1], {"x": {"content": "a"}}, {"1": "a"}, {"1": {}}),
        "chat_template": (5, ["x"], [{"name": "default"}]),
    }.items():
        for value in values:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: value}))
            with pytest.raises(TokenizerError, match=f"{name} must be"):
                get_tokenizer(source)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: 'utf-8'"):
        get_tokenizer(source)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(TokenizerError, match=r"broken\.gguf"):
        get_tokenizer(ModelSource("broken", "gguf", tmp_path / "broken.gguf"))
    for name in ("./nothing", "/a/b/c", "a/b/c", "gone.gguf"):
        with pytest.raises(TokenizerError, match="no such file or folder"):
            get_tokenizer(source, name=name)


def test_folder_without_tokenizer_json_is_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    vocabulary = {"h": 0, "e": 1, "l": 2, "o": 3, "he": 4, "Ġ": 5, "<|endoftext|>": 6, "el": 7}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = ModelSource("slow", "folder", folder)
    first = get_tokenizer(source)
    reference = AutoTokenizer.from_pretrained(str(folder))
    assert first.encode("hello hell") == reference.encode("hello hell") == [4, 2, 2, 3, 5, 4, 2, 2]
    assert first.eos_token_id == reference.eos_token_id == 6
    assert str(folder) in repr(first)

    def refuse(*_: object) -> None:
        raise AssertionError("converted again")

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_conversion, "_convert", refuse)
        assert get_tokenizer(source).encode("hello") == [4, 2, 2, 3]
        (folder / "merges.txt").write_text("#version: 0.2\ne l\n")
        with pytest.raises(AssertionError, match="converted again"):
            get_tokenizer(source)
    assert get_tokenizer(source).encode("hello") == [0, 7, 2, 3]


def test_conversion_works_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(
        tokenizer_conversion,
        "_convert",
        lambda _, work: small_backend().save(f"{work}/tokenizer.json"),
    )
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    assert get_tokenizer(ModelSource("slow", "folder", tmp_path)).encode("abc") == [0, 1, 2]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_cache_that_is_full_is_left_as_it_was(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(
        tokenizer_conversion,
        "_convert",
        lambda _, work: small_backend().save(f"{work}/tokenizer.json"),
    )

    def fill(_: Path, folder: Path, **options: Any) -> None:
        (folder / "tokenizer.json").write_text("{")
        raise error

    monkeypatch.setattr(shutil, "copytree", fill)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    source = ModelSource("slow", "folder", tmp_path)
    if isinstance(error, OSError):
        assert get_tokenizer(source).encode("abc") == [0, 1, 2]
    else:
        with pytest.raises(KeyboardInterrupt):
            get_tokenizer(source)
    assert not list((cache / "isinglass" / "tokenizers").iterdir())


# GGUF metadata


def metadata_of(pre: str, **changes: Any) -> dict[str, Any]:
    full = GGUFFile(embedded_model_path()).metadata
    values = {key: value for key, value in full.items() if key.startswith("tokenizer.")}
    values["tokenizer.ggml.pre"] = pre
    del values["tokenizer.ggml.add_bos_token"]
    values.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return values


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_split_patterns_are_those_of_transformers(pre: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend = build_backend(metadata_of(pre))
    assert backend is not None
    assert backend.pre_tokenizer is not None
    rng = random.Random(6)
    for _ in range(200):
        text = random_text(rng, PIECES + NUMBERS, 20)
        assert backend.pre_tokenizer.pre_tokenize_str(text) == split.pre_tokenize_str(text)


def test_frame_around_texts() -> None:
    def frame(pre: str, **changes: Any) -> tuple[list[int], list[int]]:
        backend = build_backend(metadata_of(pre, **changes))
        assert backend is not None
        return backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids

    _, bare = frame("smollm")
    assert len(bare) == 1
    assert frame("smollm") == (bare, bare)
    assert frame("llama-bpe") == ([1, *bare], bare)
    assert frame("llama-bpe", add_bos_token=False) == (bare, bare)
    assert frame("qwen2", add_bos_token=True, add_eos_token=True) == ([1, *bare, 2], bare)
    with pytest.raises(TokenizerError, match="bos_token_id is 49152"):
        frame("smollm", add_bos_token=True, bos_token_id=49_152)


def test_token_types() -> None:
    types = [1] * 49_152
    types[3], types[4] = 3, 4
    backend = build_backend(metadata_of("gpt-2", token_type=types))
    assert backend is not None
    assert backend.encode("x<repo_name><reponame>x").ids[1:-1] == [3, 4]
    assert backend.decode([3, 4]) == "<reponame>"
    assert len(backend.encode("<|im_start|>").ids) > 1


def test_metadata_that_is_not_built_here_or_wrong() -> None:
    assert build_backend(metadata_of("something-new")) is None
    assert build_backend(metadata_of("smollm", model="rwkv")) is None
    with pytest.raises(TokenizerError, match="no vocabulary"):
        build_backend({})
    with pytest.raises(TokenizerError, match="disagree"):
        build_backend(metadata_of("smollm", merges=["not there"]))


def test_other_gguf_vocabularies_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a splitting that only Transformers knows."""
    from gguf import GGUFWriter

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokens = ["<s>", "</s>", "a", "b", "Ġ", "ab", "Ġab"]
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(str(path), "llama")
    for name, value in (
        ("block_count", 1),
        ("context_length", 8),
        ("embedding_length", 4),
        ("feed_forward_length", 4),
        ("attention.head_count", 1),
        ("vocab_size", len(tokens)),
    ):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_token_types([3, 3] + [1] * 5)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = get_tokenizer(ModelSource("small", "gguf", path))
    assert tokenizer.encode("ab ab</s>", add_special_tokens=False) == [5, 6, 1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.decode([5, 6, 1]) == "ab ab"
