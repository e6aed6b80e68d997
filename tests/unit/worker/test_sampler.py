"""Sampler: every feature against the plain reference, and independence of the rest of the batch."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from engine.errors import ConfigError
from engine.types.sampling import SamplingParams
from engine.worker.penalties import TokenCounts
from engine.worker.random import (
    draw_keys,
    exponentials,
    exponentials_on_device,
    wrap_seed,
)
from engine.worker.sampler import LOGPROBS_MODES, Sampler
from engine.worker.sampling_state import SamplingState
from engine.worker.token_logprobs import compute_prompt_logprobs, slice_logprobs
from engine.worker.truncation import NO_TOKEN, Truncation, draw_by_row, draw_by_sort
from tests.support import sampling_reference as reference

pytestmark = pytest.mark.usefixtures("several_threads")

VOCAB_SIZES = (33, 300, 1280)
"""Less than a block, blocks and a rest, whole blocks."""


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    """Each feature is on in about a third of the requests."""

    def maybe(value: object, default: object) -> object:
        return value if rng.random() < 0.35 else default

    def some_tokens(count: int) -> list[int]:
        return rng.choice(vocab_size, size=count, replace=False).tolist()

    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        top_k=maybe(int(rng.integers(1, vocab_size)), 0),
        top_p=maybe(float(rng.uniform(0.05, 0.99)), 1.0),
        min_p=maybe(float(rng.uniform(0.001, 0.5)), 0.0),
        seed=int(rng.integers(0, 2**63)),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2.0)), 1.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        logit_bias=maybe({t: float(rng.uniform(-5, 5)) for t in some_tokens(5)}, None),
        allowed_token_ids=maybe(some_tokens(20), None),
        stop_token_ids=some_tokens(3),
        min_tokens=maybe(4, 0),
        logprobs=maybe(int(rng.integers(0, 6)), None),
    )
    words = maybe([some_tokens(1), some_tokens(2), some_tokens(3)], None)
    return params.clone(bad_words_token_ids=words)


def random_batch(rng: np.random.Generator, num_reqs: int, vocab_size: int):
    params = [random_params(rng, vocab_size) for _ in range(num_reqs)]
    prompts = [rng.integers(0, vocab_size, rng.integers(1, 20)).tolist() for _ in params]
    outputs = [rng.integers(0, vocab_size, rng.integers(0, 9)).tolist() for _ in params]
    for one, output in zip(params, outputs, strict=True):
        # Let the output end with a bad word's beginning, so that the ban has something to do.
        if one.bad_words_token_ids and rng.random() < 0.7:
            output.extend(one.bad_words_token_ids[int(rng.integers(1, 3))][:-1])
    logits = rng.standard_normal((num_reqs, vocab_size)).astype(np.float32) * 3
    return params, prompts, outputs, logits


def state_of(params, prompts, outputs, vocab_size) -> SamplingState:
    state = SamplingState(max_num_reqs=len(params), vocab_size=vocab_size, device="cpu")
    for row, request in enumerate(zip(params, prompts, outputs, strict=True)):
        state.add_request(row, *request)
    return state


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("seed", range(6))
def test_tokens_and_logits_match_the_reference(vocab_size, seed):
    rng = np.random.default_rng(seed)
    params, prompts, outputs, logits = random_batch(rng, 24, vocab_size)
    metadata = state_of(params, prompts, outputs, vocab_size).refresh(len(params))
    processed = Sampler.apply_logits_processors(torch.from_numpy(logits.copy()), metadata)
    sampled = Sampler()(torch.from_numpy(logits.copy()), metadata).sampled_token_ids.tolist()
    for row, one in enumerate(params):
        given = {"prompt": prompts[row], "output": outputs[row]}
        expected = reference.processed(logits[row].tolist(), one, **given)
        np.testing.assert_allclose(processed[row].numpy(), expected, rtol=1e-5, atol=1e-5)
        exact = reference.distribution(logits[row].tolist(), one, **given)
        if one.is_greedy:
            assert exact[sampled[row]] == 1.0
            continue
        token, margin = reference.drawn(exact, one.seed, len(outputs[row]))
        assert sampled[row] == token or margin < 1e-4, (row, one)
        assert exact[sampled[row]] > 0.0


@pytest.mark.parametrize("vocab_size", [*VOCAB_SIZES, 9001])
@pytest.mark.parametrize("seed", range(4))
def test_both_implementations_of_truncation_agree(vocab_size, seed):
    rng = np.random.default_rng(seed)
    num_rows = 60
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab_size)).astype(np.float32) * 3)
    logits[::2] *= 0.2  # flat: top-p keeps most of the vocabulary
    logits[:10, rng.integers(0, vocab_size, vocab_size // 2)] = -torch.inf
    logits[10:20] = logits[10:20].round()  # many ties
    top_k = np.where(rng.random(num_rows) < 0.5, rng.integers(1, vocab_size, num_rows), vocab_size)
    top_p = np.where(rng.random(num_rows) < 0.5, rng.uniform(0.01, 0.999, num_rows), 1.0)
    min_p = np.where(rng.random(num_rows) < 0.3, rng.uniform(0.0001, 0.5, num_rows), 0.0)
    truncates = (top_k < vocab_size) | (top_p < 1) | (min_p > 0)
    truncation = Truncation(top_k, top_p, min_p, truncates)
    by_row, by_sort = logits.clone(), logits.clone()
    keys = draw_keys(np.arange(num_rows, dtype=np.uint64), np.full(num_rows, seed))
    tokens = draw_by_row(by_row, keys, truncation, mask_logits=True)
    same = draw_by_sort(by_sort, keys, truncation, mask_logits=True)
    assert torch.equal(by_row.isneginf(), by_sort.isneginf())
    assert torch.equal(by_row, by_sort)
    assert torch.equal(tokens, same)
    assert not by_row.gather(1, tokens[:, None]).isneginf().any()
    unmasked = logits.clone()
    assert torch.equal(draw_by_row(unmasked, keys, truncation), tokens)
    assert torch.equal(unmasked, logits)


def test_ties_at_the_border_stay():
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]]).repeat(200, 1)
    keys = draw_keys(np.arange(200, dtype=np.uint64), np.zeros(200, dtype=np.int64))
    for top_k, top_p in ((2, 1.0), (5, 0.6)):
        truncation = Truncation(
            np.full(200, top_k), np.full(200, top_p), np.zeros(200), np.ones(200, dtype=bool)
        )
        for implementation in (draw_by_row, draw_by_sort):
            tokens = implementation(logits.clone(), keys, truncation)
            assert set(tokens.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("implementation", [draw_by_row, draw_by_sort])
def test_a_token_of_probability_zero_is_never_drawn(implementation):
    """Not even by noise of the extremes, which a weight of zero must survive."""
    rng = np.random.default_rng(0)
    keys = draw_keys(np.arange(200, dtype=np.uint64), np.zeros(200, dtype=np.int64))
    logits = torch.full((200, 500), -torch.inf)
    allowed = torch.from_numpy(rng.integers(1, 499, (200, 7)))
    logits.scatter_(1, allowed, torch.randn(200, 7, generator=torch.Generator().manual_seed(0)))
    for row in range(200):
        # Weights that underflow to zero at both ends count as impossible too.
        logits[row, 0] = logits[row, 499] = -1e4
    plain = Truncation(
        np.full(200, 500), np.ones(200), np.zeros(200), np.zeros(200, dtype=np.bool_)
    )
    cut = plain._replace(
        top_k=np.tile([3, 500, 500, 6], 50),
        top_p=np.tile([0.9, 0.5, 1.0, 1.0], 50),
        min_p=np.tile([0.0, 0.0, 0.1, 0.2], 50),
        truncates=np.ones(200, dtype=np.bool_),
    )
    for truncation in (plain, cut):
        tokens = implementation(logits.clone(), keys, truncation)
        assert (allowed == tokens[:, None]).any(1).all()


@pytest.mark.parametrize("implementation", [draw_by_row, draw_by_sort])
def test_rows_without_a_finite_logit_draw_nothing(implementation):
    logits = torch.zeros(6, 300)
    logits[0] = -torch.inf
    logits[1, 7] = torch.nan
    logits[2, 7] = torch.inf
    logits[3:] = logits[:3]
    truncation = Truncation(
        np.array([300] * 3 + [5] * 3),
        np.array([1.0] * 3 + [0.5] * 3),
        np.zeros(6),
        np.array([False] * 3 + [True] * 3),
    )
    assert (
        implementation(logits, np.arange(6, dtype=np.uint64), truncation).tolist() == [NO_TOKEN] * 6
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_in_which_everything_is_forbidden_falls_back(temperature):
    params = SamplingParams(temperature=temperature, seed=1, allowed_token_ids=[5, 3], logprobs=2)
    params = params.clone(bad_words_token_ids=[[3], [9, 5]])
    neighbour = SamplingParams(temperature=0.0)
    state = state_of([params, neighbour], [[1], [1]], [[9], [9]], 50)
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    best = int(logits[1].argmax())
    output = Sampler("processed_logprobs")(logits, state.refresh(2))
    assert output.sampled_token_ids.tolist() == [3, best]
    assert np.isneginf(output.logprobs.logprobs[0]).all()


@pytest.mark.parametrize("seed", range(5))
def test_a_request_gets_the_same_tokens_in_every_batch(seed):
    """Row, neighbours and batch size change the shape of every kernel, never a token."""
    rng = np.random.default_rng(seed)
    vocab_size = 4003
    params, prompts, outputs, logits = random_batch(rng, 16, vocab_size)
    sampler = Sampler()
    alone = []
    for row in range(16):
        state = state_of(
            params[row : row + 1], prompts[row : row + 1], outputs[row : row + 1], vocab_size
        )
        one = torch.from_numpy(logits[row : row + 1].copy())
        alone.append(int(sampler(one, state.refresh(1)).sampled_token_ids))
    for _ in range(4):
        order = rng.permutation(16)[: rng.integers(2, 17)]
        state = state_of(
            [params[i] for i in order],
            [prompts[i] for i in order],
            [outputs[i] for i in order],
            vocab_size,
        )
        batch = torch.from_numpy(logits[order])
        sampled = sampler(batch, state.refresh(len(order))).sampled_token_ids
        assert sampled.tolist() == [alone[i] for i in order]


def test_a_resumed_request_continues_its_random_sequence():
    """Preemption drops the row and adds it later with its output: the draws must not restart."""
    vocab_size, params = 200, SamplingParams(seed=11, temperature=1.5)
    generator = torch.Generator().manual_seed(3)
    steps = [torch.randn(1, vocab_size, generator=generator) for _ in range(12)]
    outputs: list[list[int]] = []
    for preempt_at in (None, 1, 5, 11):
        output: list[int] = []
        state = state_of([params], [[1]], [output], vocab_size)
        for step, logits in enumerate(steps):
            if step == preempt_at:
                state.remove_request(0)
                state.refresh(0)
                output = list(output)
                state.add_request(0, params, [1], output)
            sampled = Sampler()(logits.clone(), state.refresh(1)).sampled_token_ids
            output.append(int(sampled))
        outputs.append(output)
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    assert len(set(outputs[0])) > 6


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("num_logprobs", [0, 4, -1])
def test_logprobs_match_the_reference(mode, num_logprobs):
    rng = np.random.default_rng(5)
    vocab_size = 290
    params, prompts, outputs, logits = random_batch(rng, 20, vocab_size)
    params = [
        one.clone(logprobs=num_logprobs if row % 3 else None) for row, one in enumerate(params)
    ]
    state = state_of(params, prompts, outputs, vocab_size)
    output = Sampler(mode)(torch.from_numpy(logits.copy()), state.refresh(20))
    width = vocab_size if num_logprobs == -1 else num_logprobs
    assert output.logprobs.token_ids.shape == (20, width + 1)
    assert output.logprobs.token_ids.dtype == output.logprobs.ranks.dtype == np.int32
    assert output.logprobs.logprobs.dtype == np.float32
    for row, one in enumerate(params):
        if one.logprobs is None:
            assert (output.logprobs.token_ids[row] == -1).all()
            continue
        values = logits[row].astype(np.float64).tolist()
        if mode.startswith("processed"):
            given = {"prompt": prompts[row], "output": outputs[row]}
            exact = reference.distribution(values, one, **given)
            values = reference.processed(values, one, **given)
            if not one.is_greedy:
                values = [
                    x / one.temperature if p > 0 else -math.inf
                    for x, p in zip(values, exact, strict=True)
                ]
        if mode.endswith("_logprobs"):
            values = reference.log_softmax(values)
        lists = slice_logprobs(output.logprobs, row, num_logprobs)
        sampled = int(output.sampled_token_ids[row])
        token_ids = lists.token_ids[0].tolist()
        assert token_ids[0] == sampled
        np.testing.assert_allclose(
            lists.logprobs[0], [values[i] for i in token_ids], rtol=1e-4, atol=1e-4
        )
        best = sorted(values, reverse=True)[:width]
        np.testing.assert_allclose(lists.logprobs[0, 1:], best, rtol=1e-4, atol=1e-4)
        assert len(set(token_ids[1:])) == width
        assert lists.ranks[0] == 1 + sum(x > values[sampled] for x in values)


def test_logprobs_are_as_wide_as_the_widest_request():
    params = [SamplingParams(seed=1, logprobs=k) for k in (1, 5, 3)]
    state = state_of(params, [[0]] * 3, [[], [], []], 64)
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    output = Sampler()(logits, state.refresh(3))
    for row, one in enumerate(params):
        lists = slice_logprobs(output.logprobs, row, one.logprobs)
        assert lists.token_ids.shape == lists.logprobs.shape == (1, one.logprobs + 1)
        assert lists.ranks.shape == (1,)


def test_no_logprobs_unless_asked_for():
    state = state_of([SamplingParams(seed=1)], [[0]], [[]], 64)
    assert Sampler()(torch.zeros(1, 64), state.refresh(1)).logprobs is None


def test_an_unknown_logprobs_mode_is_refused():
    with pytest.raises(ConfigError, match="logprobs_mode must be one of raw_logprobs"):
        Sampler("cooked_logprobs")


@pytest.mark.parametrize("num_logprobs", [0, 3, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_logprobs(num_logprobs, dtype):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(150, 130, generator=generator).to(dtype)
    targets = torch.randint(0, 130, (150,), generator=generator)
    lists = compute_prompt_logprobs(logits, targets, num_logprobs)
    width = 130 if num_logprobs == -1 else num_logprobs
    assert lists.token_ids.shape == lists.logprobs.shape == (150, width + 1)
    for position in range(0, 150, 7):
        values = reference.log_softmax(logits[position].double().tolist())
        target = int(targets[position])
        assert lists.token_ids[position, 0] == target
        expected = [values[i] for i in lists.token_ids[position]]
        np.testing.assert_allclose(lists.logprobs[position], expected, atol=1e-5)
        assert lists.ranks[position] == 1 + sum(x > values[target] for x in values)
        best = sorted(values, reverse=True)[:width]
        np.testing.assert_allclose(lists.logprobs[position, 1:], best, atol=1e-5)


def test_greedy_takes_the_first_of_equals():
    state = state_of([SamplingParams(temperature=0)], [[0]], [[]], 64)
    logits = torch.zeros(1, 64)
    logits[0, [20, 40]] = 1.0
    assert Sampler()(logits, state.refresh(1)).sampled_token_ids.tolist() == [20]


def test_counts_follow_the_output_as_it_grows():
    rng = np.random.default_rng(4)
    output: list[int] = []
    params = SamplingParams(repetition_penalty=1.5)
    counts = TokenCounts(params, prompt_token_ids=[3, 3, 9], output_token_ids=output)
    for _ in range(40):
        output.extend(rng.integers(0, 300, rng.integers(0, 12)).tolist())
        counts.catch_up()
        seen = dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True))
        assert seen == {token: output.count(token) for token in {3, 9, *output}}


def test_noise_is_reproducible_exponential_and_independent():
    seeds = np.arange(2000, dtype=np.uint64)
    keys = draw_keys(seeds, np.zeros(2000, dtype=np.int64))
    first, second = exponentials(keys, np.array([0])), exponentials(keys, np.array([1]))
    later = exponentials(draw_keys(seeds, np.ones(2000, dtype=np.int64)), np.array([0]))
    assert np.array_equal(first, exponentials(keys, np.array([0])))
    by_position = exponentials(draw_keys(seeds[:1].repeat(2000), np.arange(2000)), np.array([5]))
    by_index = exponentials(keys[:1], np.arange(2000))
    for noise in (first, second, later, by_position, by_index):
        assert (noise > 0).all()
        assert scipy.stats.kstest(noise, "expon").pvalue > 1e-4
    for other in (second, later, np.roll(first, 1)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.07


def test_noise_is_that_of_the_reference_on_every_device():
    """The reference has an independent SplitMix64 in Python integers."""
    indices = np.array([0, 1, 128, 49_151, 2**32, 2**32 + 383])
    for seed in (0, 1, -1, -(2**63), 2**64 - 1, 1234567890123456789):
        for position in (0, 1, 77, 2**31):
            key = draw_keys(np.array([wrap_seed(seed)]), np.array([position]))
            expected = [reference.noise(seed, position, int(index)) for index in indices]
            np.testing.assert_allclose(exponentials(key, indices), expected, rtol=1e-14)
            by_torch = exponentials_on_device(
                torch.from_numpy(key.view(np.int64)), torch.from_numpy(indices)
            )
            np.testing.assert_allclose(by_torch.numpy(), expected, rtol=1e-14)


def test_few_draws_change_when_logits_change_in_their_last_bits():
    """The logits of a request differ so between batches. The bound is the least that any way of
    drawing can do, the distance of the two distributions; an inverse distribution function over
    the ids changes many times as many draws."""
    generator = torch.Generator().manual_seed(3)
    num_rows, vocab_size = 3000, 4096
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 2.5
    other = logits + 0.02 * torch.randn(num_rows, vocab_size, generator=generator)
    ours, theirs = logits.softmax(-1).double(), other.softmax(-1).double()
    least = float((ours - theirs).abs().sum() / 2)
    keys = draw_keys(np.arange(num_rows, dtype=np.uint64), np.zeros(num_rows, dtype=np.int64))
    plain = Truncation(
        np.full(num_rows, vocab_size),
        np.ones(num_rows),
        np.zeros(num_rows),
        np.zeros(num_rows, dtype=np.bool_),
    )
    changed = int((draw_by_row(logits, keys, plain) != draw_by_row(other, keys, plain)).sum())
    uniforms = torch.rand(num_rows, 1, generator=generator).double()
    inverse = [torch.searchsorted(one.cumsum(-1), uniforms) for one in (ours, theirs)]
    changed_by_inversion = int((inverse[0] != inverse[1]).sum())
    assert changed < 4 * least
    assert changed_by_inversion > 3 * changed
