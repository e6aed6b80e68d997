"""Frequencies of thousands of draws against the exact distribution (chi-square).

Seeds are fixed, so that a run is repeatable. A correct sampler fails a case with odds of one in
ten thousand when the seeds change; a distribution off by a few per cent fails with certainty.
"""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from engine.types.sampling import SamplingParams
from engine.worker.sampler import Sampler
from engine.worker.sampling_state import SamplingState
from tests.support import sampling_reference as reference

VOCAB_SIZE = 200
PROMPT = [1, 2, 3, 5, 8, 13, 21]
OUTPUT = [2, 2, 2, 34, 55, 89, 34]
NUM_ROWS = 64
NUM_STEPS = 80

CASES = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 12},
    "top_k of one": {"top_k": 1},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.08},
    "top_k then top_p": {"top_k": 20, "top_p": 0.6, "temperature": 1.3},
    "all three": {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.8},
    "frequency and presence": {"frequency_penalty": 0.9, "presence_penalty": -1.0},
    "bias": {"logit_bias": {4: 3.0, 7: -100.0, 150: 2.5}},
    "allowed": {"allowed_token_ids": [0, 2, 34, 60, 61, 199], "temperature": 1.2},
    "stop tokens": {"min_tokens": 400, "max_tokens": None, "stop_token_ids": [2, 9, 60]},
    "everything": {
        "temperature": 0.9,
        "top_k": 60,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logit_bias": {10: 2.0, 34: 4.0},
        "stop_token_ids": [9],
        "min_tokens": 400,
        "max_tokens": None,
    },
}


@pytest.mark.parametrize("by", ["position", "seed"])
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_exact_distribution(case, by):
    generator = torch.Generator().manual_seed(17)
    logits = torch.randn(VOCAB_SIZE, generator=generator) * 2
    params = SamplingParams(**CASES[case])
    exact = np.array(reference.distribution(logits.tolist(), params, prompt=PROMPT, output=OUTPUT))
    counts = draw_counts(logits, params, by=by)
    assert counts[exact == 0].sum() == 0
    # Rare tokens are pooled: the test needs about five expected draws in each class.
    expected = exact * counts.sum()
    common = expected >= 5
    observed_classes = np.append(counts[common], counts[~common].sum())
    expected_classes = np.append(expected[common], expected[~common].sum())
    if expected_classes[-1] < 5:
        observed_classes, expected_classes = observed_classes[:-1], expected_classes[:-1]
        assert counts[~common].sum() < 25
        expected_classes *= observed_classes.sum() / expected_classes.sum()
    if len(observed_classes) > 1:
        assert chisquare(observed_classes, expected_classes).pvalue > 1e-4


def draw_counts(logits: torch.Tensor, params: SamplingParams, *, by: str) -> np.ndarray:
    """Draw with neighbouring seeds, or with one seed a row at consecutive positions."""
    counts = np.zeros(VOCAB_SIZE, dtype=np.int64)
    sampler = Sampler()
    state = None
    for step in range(NUM_STEPS):
        if by == "seed" or state is None:
            state = SamplingState(max_num_reqs=NUM_ROWS, vocab_size=VOCAB_SIZE, device="cpu")
            for row in range(NUM_ROWS):
                seed = step * NUM_ROWS + row
                state.add_request(row, params.clone(seed=seed), PROMPT, list(OUTPUT))
        metadata = state.refresh(NUM_ROWS)
        if by == "position":
            # The output itself must stay, or the penalties would change the distribution.
            metadata.positions[:] = len(OUTPUT) + step
        batch = logits.repeat(NUM_ROWS, 1)
        sampled = sampler(batch, metadata).sampled_token_ids
        counts += np.bincount(sampled.numpy(), minlength=VOCAB_SIZE)
    return counts
