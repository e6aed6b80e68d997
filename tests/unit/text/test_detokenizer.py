"""Detokenizer: streamed text against decoding the whole sequence at once with `tokenizers`."""

import random
import time

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from engine.checkpoint.locate import resolve_model
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop_strings import StopStringMatcher
from engine.text.tokenizer import Tokenizer, get_tokenizer
from engine.types.sampling import SamplingParams

WORDS = (
    "hello ",
    "wörld",
    "你好世界",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    " the end.",
    "\n\n",
    "ﷺ",
    "aab",
    "123",
    "𝔘",
    "<|im_end|>",
)


def params(**fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=None, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return get_tokenizer(resolve_model(None))


def wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, special_tokens={}, chat_templates={}, source="test")


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "▁end", "a", "b", "▁a", "é", "世", ".", "\n"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer = wrap(backend)
    assert tokenizer.strips_leading_space
    return tokenizer


@pytest.fixture(scope="module")
def word_piece() -> Tokenizer:
    """A decoder that glues some tokens to the one before: the general way, by windows."""
    pieces = ["[UNK]", "un", "##related", "##able", "read", "the", ".", ",", "世", "##é"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    tokenizer = wrap(backend)
    assert tokenizer.token_bytes_table(skip_special_tokens=True) is None
    return tokenizer


def steps(rng: random.Random, ids: list[int]) -> list[list[int]]:
    """Cut a sequence into steps of one token, seldom of none or several."""
    cut = []
    position = 0
    while position < len(ids):
        size = rng.choice((0, 1, 1, 1, 1, 2, 5))
        cut.append(ids[position : position + size])
        position += size
    return cut


def stream(
    detokenizer: IncrementalDetokenizer, parts: list[list[int]], **last: bool
) -> tuple[list[str], str | None]:
    """Feed all parts; the deltas and the stop string, after checking the cumulative text."""
    deltas: list[str] = []
    for index, part in enumerate(parts):
        finished = index == len(parts) - 1
        stop = detokenizer.update(part, finished=finished, **(last if finished else {}))
        finished = finished or stop is not None
        deltas.append(detokenizer.output_text(finished=finished, delta=True))
        assert "".join(deltas) == detokenizer.output_text(finished=finished, delta=False)
        if finished:
            return deltas, stop
    return deltas, None


def behind(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """What the output adds to the prompt's text, decoded at once by the library."""
    start = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    if not whole.startswith(start):
        assert start.endswith("\ufffd")
        start = start[:-1]  # the output completed the prompt's last character
    return whole[len(start) :]


@pytest.mark.parametrize("skip", [True, False])
def test_byte_level_text_and_random_tokens(byte_level: Tokenizer, skip: bool) -> None:
    """Random tokens make many invalid bytes, which must become the same replacements."""
    rng = random.Random(1)
    fragments = [i for i in range(49_152) if "\ufffd" in byte_level.token_text(i)]
    assert len(fragments) > 100
    for round_ in range(300):
        prompt = rng.choices(range(49_152), k=rng.randrange(8))
        if round_ % 3 == 0:
            output = byte_level.encode("".join(rng.choices(WORDS, k=12)))
        elif round_ % 3 == 1:
            output = rng.choices(range(49_152), k=30)
        else:
            output = rng.choices(fragments + list(range(17)), k=30)
            prompt = rng.choices(fragments, k=rng.randrange(4))
        detokenizer = IncrementalDetokenizer.create(
            byte_level, params(skip_special_tokens=skip), prompt
        )
        deltas, _ = stream(detokenizer, steps(rng, output) or [[]])
        assert "".join(deltas) == behind(byte_level, prompt, output, skip)
        assert detokenizer.output_token_ids == output


def test_valid_text_never_shows_a_replacement(byte_level: Tokenizer) -> None:
    rng = random.Random(2)
    held = 0
    for _ in range(100):
        text = "".join(rng.choices(WORDS, k=10))
        output = byte_level.encode(text)
        detokenizer = IncrementalDetokenizer.create(
            byte_level, params(skip_special_tokens=False), [1]
        )
        deltas, _ = stream(detokenizer, [[token_id] for token_id in output])
        assert "".join(deltas) == text
        assert not any("\ufffd" in delta for delta in deltas)
        held += "" in deltas
    assert held, "no character was spread over tokens"


def test_unfinished_character_at_the_end(byte_level: Tokenizer) -> None:
    output = byte_level.encode("x👩")[:-1]
    assert byte_level.decode(output).endswith("\ufffd")
    detokenizer = IncrementalDetokenizer.create(byte_level, params(), [1])
    assert detokenizer.update(output, finished=False) is None
    shown = detokenizer.output_text(finished=False, delta=True)
    assert "\ufffd" not in shown
    # An abort: no further update, only the last read.
    shown += detokenizer.output_text(finished=True, delta=True)
    assert shown == byte_level.decode(output)
    assert detokenizer.output_text(finished=True, delta=True) == ""


def test_character_begun_by_the_prompt(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("👩")
    assert len(ids) > 1
    detokenizer = IncrementalDetokenizer.create(byte_level, params(), ids[:1])
    assert stream(detokenizer, [ids[1:]])[0] == ["👩"]
    after = byte_level.encode("ok")
    detokenizer = IncrementalDetokenizer.create(byte_level, params(), ids[:1])
    assert stream(detokenizer, [after])[0] == ["ok"]


def test_ids_outside_the_vocabulary_add_nothing(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer.create(byte_level, params(), [])
    ids = [*byte_level.encode("ab"), 60_000]
    assert stream(detokenizer, [[token_id] for token_id in ids])[0][-1] == ""
    assert detokenizer.output_token_ids == ids


@pytest.mark.parametrize("skip", [True, False])
def test_sentencepiece(sentencepiece: Tokenizer, skip: bool) -> None:
    rng = random.Random(3)
    usual = [i for i in range(sentencepiece.vocab_size) if not 1 <= i <= 256]
    for _ in range(400):
        prompt = rng.choices(usual, k=rng.choice((0, 0, 1, 3)))
        output: list[int] = []
        while len(output) < 12:
            output.append(rng.choice(usual))
            if rng.random() < 0.3:
                output += [1 + byte for byte in rng.choice("é世😀a").encode()]
        detokenizer = IncrementalDetokenizer.create(
            sentencepiece, params(skip_special_tokens=skip), prompt
        )
        deltas, _ = stream(detokenizer, steps(rng, output))
        expected = sentencepiece.decode(prompt + output, skip_special_tokens=skip)
        start = sentencepiece.decode(prompt, skip_special_tokens=skip)
        assert "".join(deltas) == expected[len(start) :]


def test_sentencepiece_spaces_and_invalid_bytes(sentencepiece: Tokenizer) -> None:
    def text(prompt: list[str], output: list[str], **fields: object) -> str:
        find = sentencepiece.backend.token_to_id
        detokenizer = IncrementalDetokenizer.create(
            sentencepiece, params(**fields), [find(piece) for piece in prompt]
        )
        return "".join(stream(detokenizer, [[find(piece)] for piece in output])[0])

    assert text([], ["▁the", "▁end"]) == "the end"
    assert text(["<s>"], ["▁the"]) == "the"
    assert text(["<s>"], ["▁the"], skip_special_tokens=False) == " the"
    assert text(["▁a"], ["▁the"]) == " the"
    assert text([], ["<think>", "<s>", "▁the"]) == "<think> the"
    # The library would turn the whole run of bytes into six replacements.
    assert (
        text(["a"], ["<0xE4>", "<0xB8>", "<0x96>", "<0xFF>", "<0xE4>", "<0xB8>"])
        == "世\ufffd\ufffd"
    )


@pytest.mark.parametrize("skip", [True, False])
def test_general_decoder(word_piece: Tokenizer, skip: bool) -> None:
    rng = random.Random(4)
    for _ in range(200):
        prompt = rng.choices(range(word_piece.vocab_size), k=rng.choice((0, 1, 9)))
        output = rng.choices(range(word_piece.vocab_size), k=15)
        detokenizer = IncrementalDetokenizer.create(
            word_piece, params(skip_special_tokens=skip), prompt
        )
        deltas, _ = stream(detokenizer, steps(rng, output))
        assert "".join(deltas) == behind(word_piece, prompt, output, skip)


def test_general_decoder_with_byte_runs() -> None:
    """Byte fallback in an unusual decoder: replacements are held back, but not without end."""
    pieces = ["a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback()])
    tokenizer = wrap(backend)
    assert tokenizer.token_bytes_table(skip_special_tokens=True) is None
    emoji = [1 + byte for byte in "😀".encode()]
    detokenizer = IncrementalDetokenizer.create(tokenizer, params(), [0])
    deltas, _ = stream(detokenizer, [[token_id] for token_id in [*emoji, 0, *emoji[:2]]])
    assert deltas == ["", "", "", "😀", "a", "", "\ufffd\ufffd"]
    detokenizer = IncrementalDetokenizer.create(tokenizer, params(), [0])
    for _ in range(8):
        detokenizer.update([1 + 0xFF], finished=False)
    assert detokenizer.output_text(finished=False, delta=True) == "\ufffd" * 8


def test_spaces_between_special_tokens(word_piece: Tokenizer) -> None:
    separator = word_piece.backend.token_to_id("[SEP]")

    def text(**fields: object) -> str:
        detokenizer = IncrementalDetokenizer.create(word_piece, params(**fields), [5])
        return "".join(stream(detokenizer, [[separator], [separator], [5]])[0])

    assert text(skip_special_tokens=False) == " [SEP] [SEP] the"
    assert text(skip_special_tokens=False, spaces_between_special_tokens=False) == " [SEP][SEP] the"
    assert text(spaces_between_special_tokens=False) == " the"


def test_without_text(byte_level: Tokenizer) -> None:
    for tokenizer, wanted in ((None, True), (byte_level, False)):
        detokenizer = IncrementalDetokenizer.create(tokenizer, params(detokenize=wanted), [1])
        assert detokenizer.update([5, 6], finished=False) is None
        assert detokenizer.update([2], finished=True, stop_terminated=True) is None
        assert detokenizer.output_token_ids == [5, 6, 2]
        assert detokenizer.output_text(finished=True, delta=True) == ""
        assert detokenizer.output_text(finished=True, delta=False) == ""


@pytest.mark.parametrize("stop", [[], ["zzz"]])
def test_stop_token_leaves_no_text(byte_level: Tokenizer, stop: list[str]) -> None:
    ids = byte_level.encode("one two")
    for include, expected in ((False, "one"), (True, "one two")):
        fields = params(include_stop_str_in_output=include, stop=stop)
        detokenizer = IncrementalDetokenizer.create(byte_level, fields, [1])
        deltas, hit = stream(detokenizer, [ids], stop_terminated=True)
        assert (deltas, hit) == ([expected], None)
        assert detokenizer.output_token_ids == ids


# Stop strings


def first_stop(text: str, stops: list[str], allowed_from: int) -> tuple[int, int, str] | None:
    """(start, end, stop) of the stop string that is complete first behind `allowed_from`."""
    for end in range(allowed_from + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end - len(stop), end, stop
    return None


def could_grow(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    for length in range(min(len(text), max(map(len, stops)) - 1), 0, -1):
        if any(len(stop) > length and stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


@pytest.mark.parametrize("include", [True, False])
def test_matcher_against_a_naive_one(include: bool) -> None:
    rng = random.Random(5)
    hits = 0
    for _ in range(3000):
        alphabet = rng.choice(("ab", "abc"))
        stops = list(
            {
                "".join(rng.choices(alphabet, k=rng.randrange(1, 7)))
                for _ in range(rng.randrange(1, 4))
            }
        )
        text = "".join(rng.choices(alphabet, k=rng.randrange(1, 25)))
        allowed_from = rng.choice((0, 0, rng.randrange(len(text))))
        expected = first_stop(text, stops, allowed_from)
        matcher = StopStringMatcher(stops, include=include)
        shown, position, found = "", 0, None
        while position < len(text) and found is None:
            size = rng.randrange(1, 5)
            if position < allowed_from:
                size = min(size, allowed_from - position)
            new, found = matcher.feed(
                text[position : position + size], may_stop=position >= allowed_from
            )
            shown += new
            position = min(position + size, len(text))
            if found is None:
                held = 0 if include else could_grow(text[:position], stops)
                assert shown == text[: position - held]
        if expected is None:
            assert found is None
            assert shown + matcher.flush() == text
        else:
            hits += 1
            start, end, stop = expected
            assert found == stop
            assert shown == text[: end if include else start]
    assert 500 < hits < 2900


@pytest.mark.parametrize("include", [True, False])
def test_stop_strings_over_tokens(byte_level: Tokenizer, include: bool) -> None:
    rng = random.Random(6)
    hits = 0
    for _ in range(200):
        text = "".join(rng.choices(WORDS[:-1], k=15))
        output = byte_level.encode(text)
        stops = []
        for _ in range(rng.randrange(1, 4)):
            start = rng.randrange(len(text))
            stops.append(text[start : start + rng.randrange(1, 9)])
        stops = list(dict.fromkeys(stops))
        min_tokens = rng.choice((0, 0, 3, 20))
        fields = params(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
        detokenizer = IncrementalDetokenizer.create(byte_level, fields, [1])
        allowed_from = len(byte_level.decode(output[:min_tokens]).rstrip("\ufffd"))
        if byte_level.decode(output[:min_tokens]).endswith("\ufffd"):
            continue  # the naive reference cannot tell where the allowed text begins
        expected = first_stop(text, stops, allowed_from)
        parts = steps(rng, output)
        deltas, hit = stream(detokenizer, parts)
        if expected is None:
            assert hit is None
            assert "".join(deltas) == text
            continue
        hits += 1
        start, end, stop = expected
        assert hit == stop
        assert "".join(deltas) == text[: end if include else start]
        # No token behind the one that completed the stop string is kept, and none before is lost.
        kept = detokenizer.output_token_ids
        assert kept == output[: len(kept)]
        assert byte_level.decode(kept)[:end] == text[:end]
        assert len(byte_level.decode(kept[:-1]).rstrip("\ufffd")) < end
    assert hits > 50


def test_min_tokens_hides_stop_strings_before_it(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a.b.c.")
    assert len(ids) == 6
    for min_tokens, expected in ((0, "a"), (1, "a"), (2, "a.b"), (3, "a.b"), (6, "a.b.c.")):
        detokenizer = IncrementalDetokenizer.create(
            byte_level, params(stop=["."], min_tokens=min_tokens), [1]
        )
        deltas, stop = stream(detokenizer, [ids])
        assert "".join(deltas) == expected
        assert stop == ("." if expected != "a.b.c." else None)


def test_only_what_may_become_a_stop_string_is_held_back(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer.create(byte_level, params(stop=["User: stop now"]), [1])
    ids = byte_level.encode("Hi User: go")
    deltas = []
    for token_id in ids:
        assert detokenizer.update([token_id], finished=False) is None
        deltas.append(detokenizer.output_text(finished=False, delta=True))
    assert deltas == ["Hi", " ", "", "User: go"]


def test_stop_string_on_the_last_step_wins_over_the_flush(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer.create(byte_level, params(stop=["two"]), [1])
    deltas, stop = stream(detokenizer, [byte_level.encode("one two")])
    assert (deltas, stop) == (["one "], "two")


def test_cost_per_token_is_constant(byte_level: Tokenizer) -> None:
    """Quadratic cost would make the long run 64 times as dear; constant cost makes it 8 times."""
    ids = byte_level.encode("The quick brown fox jumps over the lazy dog 👩‍👩‍👧. ") * 20

    def seconds(copies: int) -> float:
        best = float("inf")
        for _ in range(3):
            detokenizer = IncrementalDetokenizer.create(
                byte_level, params(stop=["never seen", "fox!"]), [1]
            )
            start = time.perf_counter()
            for token_id in ids * copies:
                detokenizer.update([token_id], finished=False)
                detokenizer.output_text(finished=False, delta=True)
            best = min(best, time.perf_counter() - start)
        return best

    seconds(1)
    assert seconds(32) < 32 * 3 * seconds(4) / 4
