"""Log probabilities: lazy containers against dictionaries made at once."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.locate import resolve_model
from engine.frontend.logprobs import LogprobsProcessor
from engine.text.tokenizer import Tokenizer, get_tokenizer
from engine.types.logprobs import LazyLogprobs, Logprob, LogprobsLists

VOCAB_SIZE = 49_152


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return get_tokenizer(resolve_model(None))


def random_lists(rng: np.random.Generator, num_positions: int, k: int) -> LogprobsLists:
    """What a core would send: k most likely tokens behind a token that may be one of them."""
    token_ids = np.empty((num_positions, k + 1), np.int32)
    logprobs = np.empty((num_positions, k + 1), np.float32)
    ranks = np.empty(num_positions, np.int32)
    for position in range(num_positions):
        scores = rng.normal(size=VOCAB_SIZE).astype(np.float32) - 11
        order = np.argsort(-scores, kind="stable")
        rank = int(rng.integers(0, max(2 * k, 2)))
        chosen = [order[rank], *order[:k]]
        token_ids[position] = chosen
        logprobs[position] = scores[chosen]
        ranks[position] = rank + 1
    return LogprobsLists(token_ids, logprobs, ranks)


def expected_position(lists: LogprobsLists, row: int, k: int) -> dict[int, tuple[float, int]]:
    """Token id to (logprob, rank), made at once."""
    entries = {int(lists.token_ids[row, 0]): (float(lists.logprobs[row, 0]), int(lists.ranks[row]))}
    for column in range(1, k + 1):
        token_id = int(lists.token_ids[row, column])
        entries[token_id] = (float(lists.logprobs[row, column]), column)
    return entries


def plain(position: dict[int, Logprob]) -> dict[int, tuple[float, int | None]]:
    return {token_id: (entry.logprob, entry.rank) for token_id, entry in position.items()}


@pytest.mark.parametrize("k", [0, 1, 5])
def test_sample_logprobs(tokenizer: Tokenizer, k: int) -> None:
    rng = np.random.default_rng(1)
    chunks = [random_lists(rng, n, k) for n in (1, 1, 3, 1)]
    processor = LogprobsProcessor(tokenizer, k, None)
    for chunk in chunks:
        processor.update_sample(chunk)
    expected = [expected_position(c, row, k) for c in chunks for row in range(len(c.ranks))]
    assert processor.logprobs is not None
    assert [plain(position) for position in processor.logprobs] == expected
    for position, entries in zip(processor.logprobs, expected, strict=True):
        assert next(iter(position)) == next(iter(entries)), "the sampled token comes first"
        assert len(position) in (k, k + 1) if k else len(position) == 1
    total = sum(next(iter(entries.values()))[0] for entries in expected)
    assert processor.cumulative_logprob == pytest.approx(total)
    assert processor.prompt_logprobs is None
    assert processor.pop_prompt_logprobs() is None


def test_more_columns_than_asked_for(tokenizer: Tokenizer) -> None:
    """A batch is sent as wide as its greediest request."""
    lists = random_lists(np.random.default_rng(2), 2, 8)
    processor = LogprobsProcessor(tokenizer, 3, None)
    processor.update_sample(lists)
    assert [plain(position) for position in processor.logprobs] == [
        expected_position(lists, row, 3) for row in range(2)
    ]


def test_prompt_logprobs_in_chunks(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(3)
    processor = LogprobsProcessor(tokenizer, None, 2)
    chunks = [random_lists(rng, n, 2) for n in (4, 2)]
    for chunk in chunks:
        processor.update_prompt(chunk)
        processor.update_sample(chunk)
    assert processor.logprobs is None
    assert processor.cumulative_logprob is None
    assert processor.prompt_logprobs is not None
    assert len(processor.prompt_logprobs) == 7
    assert processor.prompt_logprobs[0] is None
    expected = [expected_position(c, row, 2) for c in chunks for row in range(len(c.ranks))]
    assert [plain(position) for position in processor.prompt_logprobs[1:]] == expected
    popped = processor.pop_prompt_logprobs()
    assert popped is not None
    assert len(popped) == 7
    assert processor.pop_prompt_logprobs() == []


def test_text_is_made_when_read_and_only_then(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = Tokenizer.token_text_after

    def counting(self: Tokenizer, context: Any, token_id: int) -> str:
        calls.append(token_id)
        return original(self, context, token_id)

    monkeypatch.setattr(Tokenizer, "token_text_after", counting)
    lists = random_lists(np.random.default_rng(4), 3, 5)
    processor = LogprobsProcessor(tokenizer, 5, None)
    processor.update_sample(lists)
    assert processor.logprobs is not None
    position = processor.logprobs[1]
    assert calls == []
    token_id, entry = list(position.items())[2]
    assert entry.decoded_token == entry.decoded_token == tokenizer.token_text(token_id)
    assert calls == [token_id]
    assert processor.logprobs[1] is position


def test_whole_vocabulary_is_cheap_until_read(tokenizer: Tokenizer) -> None:
    import time

    rng = np.random.default_rng(5)
    scores = rng.normal(size=(1, VOCAB_SIZE)).astype(np.float32)
    order = np.argsort(-scores, axis=1).astype(np.int32)
    token_ids = np.concatenate([order[:, :1], order], axis=1)
    lists = LogprobsLists(token_ids, np.take_along_axis(scores, token_ids, 1), np.ones(1, np.int32))
    processor = LogprobsProcessor(tokenizer, -1, None)
    unread_s, read_s = [], []
    for number in range(3):  # the quickest: others may have had the processor
        start = time.perf_counter()
        for _ in range(100):
            processor.update_sample(lists)
        unread_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        assert processor.logprobs is not None
        assert len(processor.logprobs[100 * number + 50]) == VOCAB_SIZE
        read_s.append(time.perf_counter() - start)
    assert min(unread_s) < min(read_s), "100 unread positions cost more than one read"


def test_characters_over_several_tokens(tokenizer: Tokenizer) -> None:
    """The token that completes a character has its text, so that all texts together are right."""
    text = "a👩‍👩‍👧 汉字"
    ids = tokenizer.encode(text)
    processor = LogprobsProcessor(tokenizer, 1, 0, ids)
    for index, token_id in enumerate(ids):
        columns = np.array([[token_id, 100]], np.int32)
        lists = LogprobsLists(columns, np.zeros((1, 2), np.float32), np.ones(1, np.int32))
        processor.update_sample(lists)
        if index:
            processor.update_prompt(lists)
    assert processor.logprobs is not None
    pieces = [next(iter(position.values())).decoded_token for position in processor.logprobs]
    assert "".join(pieces) == text
    assert "" in pieces
    assert processor.prompt_logprobs is not None
    prompt_pieces = [
        next(iter(position.values())).decoded_token for position in processor.prompt_logprobs[1:]
    ]
    assert prompt_pieces == pieces[1:]
    others = [position[100].decoded_token for position in processor.logprobs]
    assert all(other.endswith(tokenizer.token_text(100)) for other in others)


def test_tokens_go_on_with_the_prompts_characters(tokenizer: Tokenizer) -> None:
    """The prompt's own second token with its first, the output's first with the prompt's last."""
    ids = tokenizer.encode("首")
    assert len(ids) > 2
    for cut in range(1, len(ids)):
        processor = LogprobsProcessor(tokenizer, 0, 0, ids[:cut])
        for update, part in (
            (processor.update_prompt, ids[1:cut]),
            (processor.update_sample, ids[cut:]),
        ):
            columns = np.array(part, np.int32).reshape(-1, 1)
            logprobs, ranks = np.zeros(columns.shape, np.float32), np.ones(len(part), np.int32)
            update(LogprobsLists(columns, logprobs, ranks))
        assert processor.prompt_logprobs is not None
        assert processor.logprobs is not None
        positions = [*processor.prompt_logprobs[1:], *processor.logprobs]
        texts = [entry.decoded_token for one in positions for entry in one.values()]
        assert texts == [""] * (len(ids) - 2) + ["首"]


def test_without_a_tokenizer() -> None:
    lists = random_lists(np.random.default_rng(6), 1, 2)
    processor = LogprobsProcessor(None, 2, None)
    processor.update_sample(lists)
    assert processor.logprobs is not None
    assert {entry.decoded_token for entry in processor.logprobs[0].values()} == {None}


def test_logprob_compares_prints_and_pickles() -> None:
    lazy = Logprob.lazy(-0.5, 2, token_id=7, decode=lambda token_id: f"t{token_id}")
    assert lazy == Logprob(-0.5, 2, "t7")
    assert lazy != Logprob(-0.5, 2, "t8")
    assert lazy != Logprob(-0.5, 3, "t7")
    assert lazy != (-0.5, 2, "t7")
    assert repr(Logprob.lazy(-0.5, 2, token_id=7, decode=str)) == (
        "Logprob(logprob=-0.5, rank=2, decoded_token='7')"
    )
    unread = Logprob.lazy(-0.5, 2, token_id=7, decode=lambda token_id: f"t{token_id}")
    assert pickle.loads(pickle.dumps(unread)) == copy.deepcopy(unread) == lazy
    with pytest.raises(TypeError):
        hash(lazy)


def test_container_behaves_as_a_list(tokenizer: Tokenizer) -> None:
    lists = random_lists(np.random.default_rng(7), 4, 2)
    processor = LogprobsProcessor(tokenizer, 2, None)
    processor.update_sample(lists)
    lazy = processor.logprobs
    assert lazy is not None
    whole = list(lazy)
    assert lazy == whole
    assert lazy[-1] == whole[-1]
    assert lazy[1:3] == whole[1:3]
    assert isinstance(lazy[1:3], LazyLogprobs)
    assert lazy[:2] + lazy[2:] == whole
    assert lazy[:2] + whole[2:] == whole
    assert lazy != whole[:3]
    assert repr(lazy) == repr(whole)
    with pytest.raises(IndexError):
        lazy[4]
    unpickled = pickle.loads(pickle.dumps(lazy))
    assert type(unpickled) is list
    assert unpickled == whole
    assert len(pickle.dumps(lazy)) < 2000, "the tokenizer must not be pickled"


def test_copies_are_independent_of_later_tokens(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(8)
    processor = LogprobsProcessor(tokenizer, 1, None)
    processor.update_sample(random_lists(rng, 2, 1))
    assert processor.logprobs is not None
    first = processor.logprobs[0]
    copies = [
        processor.logprobs[:],
        copy.copy(processor.logprobs),
        copy.deepcopy(processor.logprobs),
    ]
    processor.update_sample(random_lists(rng, 1, 1))
    assert [len(each) for each in copies] == [2, 2, 2]
    assert all(each == processor.logprobs[:2] for each in copies)
    assert copies[2][0] is not first
    assert isinstance(copies[2], LazyLogprobs)


def test_ties_have_the_order_of_the_columns(tokenizer: Tokenizer) -> None:
    """Of two tokens with the same logprob the sampler gives both the last rank."""
    lists = LogprobsLists(
        np.array([[20, 20, 30]], np.int32),
        np.array([[-1.0, -1.0, -1.0]], np.float32),
        np.array([2], np.int32),
    )
    processor = LogprobsProcessor(tokenizer, 2, None)
    processor.update_sample(lists)
    assert processor.logprobs is not None
    assert plain(processor.logprobs[0]) == {20: (-1.0, 1), 30: (-1.0, 2)}
