"""Arrivals have the distribution that they are named for."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from engine.bench.arrivals import arrival_offsets_ns
from engine.bench.settings import LoadSettings

COUNT = 20_000


def gaps_s(rate: float, burstiness: float, seed: int) -> np.ndarray:
    """The first gaps, the one before the first request included."""
    offsets = list(itertools.islice(arrival_offsets_ns(rate, burstiness, seed=seed), COUNT))
    return np.diff([0, *offsets]) / 1e9


@pytest.mark.parametrize(("rate", "burstiness"), [(4.0, 1.0), (250.0, 1.0), (8.0, 0.3), (8.0, 5.0)])
def test_gaps_follow_the_gamma_distribution(rate: float, burstiness: float) -> None:
    gaps = gaps_s(rate, burstiness, seed=3)
    expected = stats.gamma(burstiness, scale=1 / (rate * burstiness))
    assert stats.kstest(gaps, expected.cdf).pvalue > 0.01
    # And the test would notice another shape.
    other = stats.gamma(burstiness * 1.1, scale=1 / (rate * burstiness * 1.1))
    assert stats.kstest(gaps, other.cdf).pvalue < 0.01


def test_counts_of_a_poisson_process_follow_its_distribution() -> None:
    rate, window_s = 5.0, 1.0
    arrivals = np.cumsum(gaps_s(rate, 1.0, seed=11))
    num_windows = int(arrivals[-1] / window_s)
    counts = np.bincount((arrivals / window_s).astype(int), minlength=num_windows)[:num_windows]
    most = 11
    observed = np.bincount(np.minimum(counts, most), minlength=most + 1)
    chances = stats.poisson(rate).pmf(np.arange(most))
    expected = num_windows * np.append(chances, 1 - chances.sum())
    assert stats.chisquare(observed, expected).pvalue > 0.01


def test_the_gaps_do_not_depend_on_each_other() -> None:
    gaps = gaps_s(10.0, 1.0, seed=5)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 3 / math.sqrt(COUNT)


def test_an_infinite_rate_is_a_burst_at_the_start() -> None:
    assert list(itertools.islice(arrival_offsets_ns(math.inf, 1.0, seed=0), 5)) == [0] * 5


@pytest.mark.parametrize(
    ("rate", "burstiness"), [(1e-6, 1e-3), (1e-6, 1e6), (1e9, 1e-3), (1e9, 1e6)]
)
def test_offsets_are_numbers_at_the_limits_of_the_settings(rate: float, burstiness: float) -> None:
    LoadSettings(base_url="http://h", request_rate=rate, burstiness=burstiness)
    offsets = list(itertools.islice(arrival_offsets_ns(rate, burstiness, seed=0), 1000))
    assert offsets == sorted(offsets)
    assert offsets[0] >= 0


def test_a_seed_repeats_the_offsets_and_another_does_not() -> None:
    def first(seed: int) -> list[int]:
        return list(itertools.islice(arrival_offsets_ns(7.0, 0.5, seed=seed), 50))

    assert first(1) == first(1)
    assert first(1) != first(2)
    assert first(1) == sorted(first(1))
