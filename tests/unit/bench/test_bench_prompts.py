"""Prompts: lengths, what they share, files and what is wrong with them."""

import hashlib
import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from scipy import stats

from engine.bench.prompts import (
    WORDS,
    FixedPrompts,
    RandomPrompts,
    SharedPrefixPrompts,
    read_prompts,
)
from engine.errors import ConfigError


def random_prompts(**changes: object) -> RandomPrompts:
    """Prompts of a hundred words, unless told otherwise."""
    settings = {"input_len": 100, "output_len": 40, "range_ratio": 0.0, "seed": 0}
    return RandomPrompts(**(settings | changes))


def shared_prompts(**changes: object) -> SharedPrefixPrompts:
    """Four prefixes, unless told otherwise."""
    settings = {
        "num_prefixes": 4,
        "prefix_len": 30,
        "suffix_len": 10,
        "output_len": 5,
        "range_ratio": 0.0,
        "seed": 1,
        "chat": False,
    }
    return SharedPrefixPrompts(**(settings | changes))


def test_a_prompt_depends_on_seed_and_index_alone() -> None:
    source = random_prompts(range_ratio=0.5)
    backwards = [source.prompt(index) for index in reversed(range(20))]
    assert backwards[::-1] == [random_prompts(range_ratio=0.5).prompt(i) for i in range(20)]
    assert source.prompt(3) != random_prompts(range_ratio=0.5, seed=1).prompt(3)


def test_random_prompts_have_their_length_and_nothing_in_common() -> None:
    texts = [random_prompts().prompt(index).text or "" for index in range(-10, 200)]
    assert {len(text.split()) for text in texts} == {100}
    assert len({" ".join(text.split()[:8]) for text in texts}) == len(texts)


def test_lengths_are_uniform_within_the_ratio() -> None:
    source = random_prompts(input_len=20, output_len=10, range_ratio=0.5)
    prompts = [source.prompt(index) for index in range(4200)]
    inputs = Counter(len((prompt.text or "").split()) for prompt in prompts)
    outputs = Counter(prompt.max_tokens for prompt in prompts)
    assert set(inputs) == set(range(10, 31))
    assert set(outputs) == set(range(5, 16))
    assert stats.chisquare(list(inputs.values())).pvalue > 0.01
    assert stats.chisquare(list(outputs.values())).pvalue > 0.01


def test_no_length_is_zero() -> None:
    source = random_prompts(input_len=1, output_len=1, range_ratio=1.0)
    prompts = [source.prompt(index) for index in range(50)]
    assert {len((prompt.text or "").split()) for prompt in prompts} == {1, 2}
    assert {prompt.max_tokens for prompt in prompts} == {1, 2}


def test_token_ids_stay_in_their_range() -> None:
    prompts = [random_prompts(token_id_range=(5, 9)).prompt(index) for index in range(20)]
    ids = list(itertools.chain.from_iterable(prompt.token_ids or [] for prompt in prompts))
    assert len(ids) == 2000
    assert set(ids) == {5, 6, 7, 8}
    assert all(prompt.text is None for prompt in prompts)


def test_prefixes_are_shared_and_suffixes_are_not() -> None:
    texts = [(shared_prompts().prompt(index).text or "").split() for index in range(200)]
    prefixes = Counter(" ".join(words[:30]) for words in texts)
    assert len(prefixes) == 4
    assert stats.chisquare(list(prefixes.values())).pvalue > 0.01
    assert len({" ".join(words[30:]) for words in texts}) == 200
    assert {len(words) for words in texts} == {40}


def test_in_chat_the_prefix_is_the_system_message() -> None:
    messages = shared_prompts(chat=True).prompt(7).messages
    assert messages is not None
    assert [message["role"] for message in messages] == ["system", "user"]
    text = " ".join(message["content"] for message in messages)
    assert text == shared_prompts().prompt(7).text


def test_a_fixed_prompt_is_always_the_same() -> None:
    source = FixedPrompts(text="Hello", output_len=3)
    assert source.prompt(0) == source.prompt(-5) == source.prompt(99)


def test_a_report_says_what_makes_the_prompts_again(tmp_path: Path) -> None:
    for source in (
        FixedPrompts(text="Hello", output_len=3),
        random_prompts(token_id_range=(5, 9)),
        shared_prompts(chat=True),
    ):
        document = source.document()
        assert document.pop("dataset_name") in ("fixed", "random", "shared-prefix")
        assert type(source)(**cast(Any, document)) == source
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hi"}\n{"prompt": [5], "max_tokens": 2}\n')
    assert read_prompts(file, output_len=7).document() == {
        "dataset_name": "custom",
        "dataset_path": str(file),
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "num_lines": 2,
        "output_len": 7,
    }


def test_each_word_is_one_token_of_the_embedded_model() -> None:
    from engine.checkpoint.locate import resolve_model
    from engine.text.tokenizer import get_tokenizer

    tokenizer = get_tokenizer(resolve_model(None))
    counts = Counter(len(tokenizer.encode(f" {word}")) for word in WORDS)
    assert len(WORDS) > 150
    assert counts[1] == len(WORDS)


def test_a_file_gives_its_lines_in_order_and_again(tmp_path: Path) -> None:
    lines = [
        {"prompt": "one", "max_tokens": 9, "temperature": 0.5},
        {"prompt": [1, 2, 3]},
        {"messages": [{"role": "user", "content": "hi"}], "stop": ["."]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    source = read_prompts(path, output_len=77)
    first, second, third = (source.prompt(index) for index in range(3))
    assert (first.text, first.max_tokens, first.extra) == ("one", 9, {"temperature": 0.5})
    assert (second.token_ids, second.max_tokens) == ([1, 2, 3], 77)
    assert third.messages == lines[2]["messages"]
    assert third.extra == {"stop": ["."]}
    assert source.prompt(4) == second
    assert source.prompt(-1) == third


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    texts = ["a\u2028b", "c\u2029d", "e\x85f", "g\x7fh"]
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    for line_end in ("\n", "\r\n"):
        path.write_bytes(line_end.join([*lines, ""]).encode())
        source = read_prompts(path, output_len=1)
        assert [prompt.text for prompt in source.prompts] == texts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2 is not JSON"),
        ("[]", "either `prompt` or `messages`"),
        ('{"prompt": "a", "messages": []}', "either `prompt` or `messages`"),
        ('{"prompt": ""}', "neither empty"),
        ('{"prompt": [1, "2"]}', "neither empty"),
        ('{"prompt": [true]}', "neither empty"),
        ('{"messages": []}', "neither empty"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be"),
        ('{"prompt": "a", "max_tokens": "9"}', "max_tokens must be"),
        ('{"prompt": "a", "n": 2}', ":2 may not set n"),
        ('{"prompt": "a", "stream": false}', ":2 may not set stream"),
        ('{"prompt": "a", "top_p": NaN}', ":2 cannot be sent as JSON"),
        ("[" * 100_000, ":2 is not JSON"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=message) as caught:
        read_prompts(path, output_len=1)
    assert f"{path}:2" in str(caught.value)


def test_a_file_without_prompts_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    with pytest.raises(ConfigError, match="cannot read"):
        read_prompts(path, output_len=1)
    path.write_bytes(os.urandom(4) + b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        read_prompts(path, output_len=1)
    path.write_text(" \n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(path, output_len=1)
