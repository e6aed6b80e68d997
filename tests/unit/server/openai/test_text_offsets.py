"""`text_offset` against the answered text itself: characters over several tokens, echo, names."""

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from engine.checkpoint.locate import resolve_model
from engine.frontend.logprobs import LogprobsProcessor
from engine.server.openai.completion_answers import (
    CompletionCollector,
    CompletionPlan,
    CompletionWriter,
)
from engine.server.openai.text_offsets import TextOffsets, offsets_in_prompt
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer, get_tokenizer
from engine.types.logprobs import Logprob, LogprobsLists
from engine.types.outputs import CompletionOutput, RequestOutput
from engine.types.sampling import SamplingParams

TEXT = "Emoji: 🙂🙃 中文分词, naïve <|im_start|>user\nÅ こんにちは<|im_end|> 👩‍👩‍👧 end"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return get_tokenizer(resolve_model(None))


@pytest.fixture(scope="module")
def spelled() -> Tokenizer:
    """As Llama 2's: spelled spaces, byte fallback, a begin token, one leading space stripped."""
    tokens = ["<unk>", "<s>", *BYTES, "▁", *"abcdefghijklmnopqrstuvwxyz:,", "▁e", "▁m"]
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[("▁", "e"), ("▁", "m")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return Tokenizer(
        backend, special_tokens={"bos_token": "<s>"}, chat_templates={}, source="spelled"
    )


def text_of(tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skips: bool) -> str:
    params = SamplingParams(skip_special_tokens=skips)
    detokenizer = IncrementalDetokenizer.create(tokenizer, params, prompt)
    detokenizer.update(ids, finished=True)
    return detokenizer.output_text(finished=True, delta=False)


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_are_places_in_the_text(smollm: Tokenizer, skips: bool) -> None:
    """Random tokens, half of them parts of characters, valid together or not."""
    rng = random.Random(7)
    pool = [*smollm.encode(TEXT), *(rng.randrange(smollm.vocab_size) for _ in range(20)), 0, 1, 2]
    pool += smollm.encode("🙂中𝔘é" * 5)
    for _ in range(200):
        ids = rng.choices(pool, k=12)
        if rng.random() < 0.5:
            ids[3:3] = smollm.encode("a🙂𝔘b")
        offsets = TextOffsets(smollm, start=5, skip_special_tokens=skips)
        found = [offsets.take(token_id, None) for token_id in ids]
        table = smollm.token_bytes_table(skip_special_tokens=skips)
        assert table is not None
        parts = [table[token_id] for token_id in ids]
        data, begin = b"".join(parts), 0
        assert data.decode("utf-8", "replace") == text_of(smollm, [], ids, skips=skips)
        for part, offset in zip(parts, found, strict=True):
            if part:  # the character to which its first byte belongs
                wanted = len(data[: begin + 1].decode("utf-8", "replace")) - 1
                assert offset == 5 + wanted
            begin += len(part)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_the_prompt_began_counts_where_it_is_shown(
    smollm: Tokenizer, cut: int
) -> None:
    letters = {smollm.token_bytes(token_id): token_id for token_id in range(300)}
    emoji = [letters[bytes([byte])] for byte in "🙂".encode()]
    x, y = smollm.encode("x") + smollm.encode("y")
    for ids in ([*emoji[cut:], x, y], [x, y]):
        text = text_of(smollm, [x, *emoji[:cut]], ids, skips=True)
        offsets = TextOffsets(smollm, [x, *emoji[:cut]], skip_special_tokens=True)
        found = [offsets.take(token_id, None) for token_id in ids]
        assert [text[offset] for offset in found] == [*"🙂" * (4 - cut), "x", "y"][-len(ids) :]


def test_offsets_of_texts_are_those_of_their_parts(smollm: Tokenizer, spelled: Tokenizer) -> None:
    for tokenizer in (smollm, spelled):
        rng = random.Random(8)
        for _ in range(50):
            text = "e" + "".join(rng.choices([*TEXT, " ", "  e", "<|im_end|>", "🙂"], k=30))
            ids = tokenizer.encode(text)
            offsets = offsets_in_prompt(tokenizer, text, ids)
            assert offsets == sorted(offsets)
            place = 0
            for token_id, offset in zip(ids, offsets, strict=True):
                if tokenizer is spelled and token_id == 1:
                    continue  # the tokenizer's own, in front
                piece = tokenizer.token_bytes(token_id)
                wanted = len(text.encode()[: place + 1].decode("utf-8", "replace")) - 1
                if not text.encode().startswith(piece, place):
                    assert place == 0
                    piece = piece.removeprefix(b" ")
                if piece:
                    assert offset == wanted
                place += len(piece)


def test_a_space_that_no_text_has_takes_no_place(spelled: Tokenizer) -> None:
    """Behind every special token this kind of tokenizer puts one."""
    text = "em: <s>me <s><s>🙂x"
    ids = spelled.encode(text)
    offsets = offsets_in_prompt(spelled, text, ids)
    assert offsets == sorted(offsets)
    seen = set()
    for token_id, offset in zip(ids, offsets, strict=True):
        name = spelled.id_to_token(token_id).removeprefix("▁")
        if name.isalpha():
            assert text[offset : offset + 2].lstrip().startswith(name)
            seen.add(offset)
    assert {0, 1, 7, 8, 17} <= seen


def test_tokenizers_that_change_texts_say_where_tokens_came_from(smollm: Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_str(smollm.backend.to_str())
    backend.normalizer = normalizers.NFC()
    tokenizer = Tokenizer(backend, special_tokens={}, chat_templates={}, source="nfc")
    text = "cafe\u0301 au lait"
    ids = tokenizer.encode(text)
    offsets = offsets_in_prompt(tokenizer, text, ids)
    shown = [text[a:b] for a, b in zip(offsets, [*offsets[1:], len(text)], strict=True)]
    assert "".join(shown) == text
    assert shown[-3:] == [" au", " la", "it"]
    assert offsets_in_prompt(tokenizer, text, [5, *ids]) == [0] * (len(ids) + 1)


def test_without_bytes_or_tokenizer_the_texts_count(smollm: Tokenizer) -> None:
    offsets = TextOffsets(None, skip_special_tokens=True)
    assert [offsets.take(1, None), offsets.take(2, None)] == [0, 0]
    backend = tokenizers.Tokenizer.from_str(smollm.backend.to_str())
    backend.decoder = decoders.WordPiece()
    other = Tokenizer(backend, special_tokens={}, chat_templates={}, source="other")
    offsets = TextOffsets(other, start=2, skip_special_tokens=True)
    assert [offsets.take(50, "ab"), offsets.take(1, "<s>"), offsets.take(51, "c")] == [2, 4, 4]


def plan_of(tokenizer: Tokenizer, **changes: Any) -> CompletionPlan:
    values: dict[str, Any] = {
        "response_id": "cmpl-1",
        "created": 7,
        "model": "m",
        "n": 1,
        "tokenizer": tokenizer,
        "echo": True,
        "drops_output": False,
        "num_logprobs": 0,
        "wants_prompt_logprobs": False,
        "returns_token_ids": False,
        "names_tokens_by_id": False,
        "skips_special_tokens": True,
        "truncates": False,
        "include_usage": False,
        "continuous_usage": False,
    }
    return CompletionPlan(**(values | changes))


def positions_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Any]:
    return [
        {token_id: Logprob(-1.0, 1, tokenizer.token_text_after(ids[max(0, i - 4) : i], token_id))}
        for i, token_id in enumerate(ids)
    ]


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("form", ["text", "ids", "no echo"])
def test_answers_have_offsets_in_their_own_text(
    smollm: Tokenizer, form: str, skips: bool, by_id: bool
) -> None:
    """Streamed in pieces or whole, named by text or by id, all the same."""
    prompt, ids = smollm.encode(TEXT), smollm.encode(" 🙃文<|im_start|> fin🙂")
    plan = plan_of(
        smollm, echo=form != "no echo", skips_special_tokens=skips, names_tokens_by_id=by_id
    )
    of_prompt = positions_of(smollm, prompt)
    of_prompt[0] = None
    positions = positions_of(smollm, ids)
    told = TEXT if form == "text" else None

    def output(text: str, since: int, until: int, reason: str | None) -> RequestOutput:
        one = CompletionOutput(
            0, text, ids[since:until], logprobs=positions[since:until], finish_reason=reason
        )
        return RequestOutput(
            "r", told, prompt, [one], reason is not None, None if since else of_prompt
        )

    whole = CompletionCollector(plan, 1)
    whole.add(0, output(text_of(smollm, prompt, ids, skips=skips), 0, len(ids), "stop"))
    (choice,) = whole.document()["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    num_prompt = len(logprobs["tokens"]) - len(ids)
    assert num_prompt == (0 if form == "no echo" else len(prompt))
    shown = text[: len(text) - len(text_of(smollm, prompt, ids, skips=skips))]
    assert (shown == TEXT) is (form == "text" or (form == "ids" and not skips))
    joined = ([] if form == "no echo" else prompt) + ids
    hidden = smollm.special_ids if skips else frozenset()
    for place, (token_id, offset) in enumerate(zip(joined, logprobs["text_offset"], strict=True)):
        is_text = form == "text" and place < num_prompt
        if token_id in hidden and not is_text:
            continue
        alone = smollm.token_text(token_id)
        if "\ufffd" not in alone:
            assert text.startswith(alone, offset), (place, alone)
    params = SamplingParams(skip_special_tokens=skips)
    detokenizer = IncrementalDetokenizer.create(smollm, params, prompt)
    writer, streamed, since = CompletionWriter(plan), [], 0
    while since < len(ids):
        until = min(len(ids), since + 2)
        finished = until == len(ids)
        detokenizer.update(ids[since:until], finished=finished)
        delta = detokenizer.output_text(finished=finished, delta=True)
        made = writer.write(0, output(delta, since, until, "stop" if finished else None))
        streamed += [
            json.loads(line[6:])["choices"][0] for line in made.decode().split("\n\n")[:-1]
        ]
        since = until
    assert "".join(one["text"] for one in streamed) == text
    for name in ("text_offset", "tokens"):
        assert [item for one in streamed for item in one["logprobs"][name]] == logprobs[name]


@pytest.mark.parametrize("kind", ["no begin token", "begin token", "spelled"])
def test_texts_of_an_echo_are_the_text(smollm: Tokenizer, spelled: Tokenizer, kind: str) -> None:
    """Of random characters, most of them over several tokens, from the first one on."""
    tokenizer, begin = (spelled if kind == "spelled" else smollm), kind != "no begin token"
    rng = random.Random(9)
    plan = plan_of(tokenizer, drops_output=True)
    for number in range(100):
        text = "首都" if number == 0 else random_text(rng, rng.randint(1, 12))
        ids = tokenizer.encode(text)
        if kind == "begin token":
            ids = [1, *ids]
        processor = LogprobsProcessor(tokenizer, None, 0, ids)
        cut = rng.randint(1, len(ids))  # the core computes prompts in chunks
        for chunk in (ids[1:cut], ids[cut:]):
            columns = np.array(chunk, np.int32).reshape(-1, 1)
            logprobs = np.zeros(columns.shape, np.float32)
            processor.update_prompt(LogprobsLists(columns, logprobs, np.ones(len(chunk), np.int32)))
        collector = CompletionCollector(plan, 1)
        dropped = [CompletionOutput(0, "x", [30], finish_reason="length")]
        collector.add(0, RequestOutput("r", text, ids, dropped, True, processor.prompt_logprobs))
        (choice,) = collector.document()["choices"]
        assert choice["text"] == text
        tokens = choice["logprobs"]["tokens"]
        shown = tokens[begin:]
        if kind == "spelled":  # which the tokenizer has put in front
            shown[0] = shown[0].removeprefix(" ")
        assert "".join(shown) == text
        ends = list(itertools.accumulate(map(len, shown), initial=0))
        assert choice["logprobs"]["text_offset"] == [0] * begin + ends[:-1]


def random_text(rng: random.Random, num_characters: int) -> str:
    """Characters of one to four bytes."""
    planes = [(0x20, 0x7F), (0xA1, 0x800), (0x3041, 0x9FFF), (0x1F300, 0x1FAFF), (0x10000, 0x10FFF)]
    return "".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(num_characters))
