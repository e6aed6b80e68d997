"""Applying grammars' bitmasks to logits, compared with a loop over bits."""

import numpy as np
import pytest
import torch

from engine.structured.matching import bits_of, num_words
from engine.types.plan import GrammarOutput
from engine.worker import grammar_mask
from engine.worker.grammar_mask import GrammarMask
from engine.worker.sampler import Sampler
from engine.worker.sampling_state import SamplingState
from tests.fakes import sampling_params


def naive(logits: np.ndarray, row: int, words: np.ndarray) -> None:
    for token in range(logits.shape[1]):
        if not (int(words[token // 32]) >> (token % 32)) & 1:
            logits[row, token] = -np.inf


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 0.98, 1.0])
@pytest.mark.parametrize("few", [0, 4, 256])
def test_rows_equal_a_loop_over_bits(
    vocab_size: int, density: float, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_mask, "_FEW", few)
    rng = np.random.default_rng(vocab_size)
    logits = rng.standard_normal((5, vocab_size)).astype(np.float32)
    bits = rng.random((3, num_words(vocab_size) * 32)) < density  # padding bits too
    bitmask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    row_of = {"a": 4, "b": 0, "c": 2, "other": 1}
    expected = logits.copy()
    for req_id, words in zip("abc", bitmask, strict=True):
        naive(expected, row_of[req_id], words)
    actual = torch.from_numpy(logits.copy())
    GrammarMask(GrammarOutput(["a", "b", "c"], bitmask), row_of).apply(actual)
    np.testing.assert_array_equal(actual.numpy(), expected)


@pytest.mark.parametrize("vocab_size", [33, 1000])
def test_a_device_computes_the_same(vocab_size: int) -> None:
    """The path of a device, called directly on tensors of the CPU."""
    rng = np.random.default_rng(1)
    bits = rng.random((2, num_words(vocab_size) * 32)) < 0.5
    bitmask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    logits = torch.from_numpy(rng.standard_normal((3, vocab_size)).astype(np.float32))
    mask = GrammarMask(GrammarOutput(["x", "y"], bitmask), {"x": 2, "y": 0})
    expected = logits.clone()
    mask.apply(expected)
    mask.apply_on_device(logits)
    assert torch.equal(logits, expected)


def test_bits_of_tokens() -> None:
    words = bits_of([0, 31, 32, 70], 71)
    assert words.dtype == np.int32
    assert [int(w) & 0xFFFFFFFF for w in words] == [0x80000001, 1, 1 << 6]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_raw_logprobs_ignore_the_mask_and_processed_ones_show_it(mode: str) -> None:
    state = SamplingState(max_num_reqs=2, vocab_size=40, device="cpu")
    params = sampling_params(temperature=0, logprobs=40)
    for row in range(2):
        state.add_request(row, params, [1], [])
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    best = logits[1].argmax().item()
    allowed = [token for token in (3, 5, 39) if token != best]
    mask = GrammarMask(GrammarOutput(["r"], bits_of(allowed, 40)[None]), {"q": 0, "r": 1})
    raw = torch.log_softmax(logits, -1)
    out = Sampler(mode)(logits.clone(), state.refresh(2), mask)
    assert out.sampled_token_ids[0] == logits[0].argmax()
    assert out.sampled_token_ids[1] == max(allowed, key=lambda token: logits[1, token])
    assert out.logprobs is not None
    reported = dict(zip(*(part[1].tolist() for part in out.logprobs[:2]), strict=True))
    if mode == "raw_logprobs":
        assert reported[best] == pytest.approx(raw[1, best].item(), abs=1e-5)
    else:
        assert reported[best] == -np.inf
