"""Random numbers that depend on a request's seed, an output position and an index.

Knows one function from these three to a number. Keeps no state, so the tokens of a seeded
request do not depend on its neighbours in the batch, on preemption or on scheduling.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_SEED_MASK: Final = 2**64 - 1


def wrap_seed(seed: int) -> np.uint64:
    """Return the low 64 bits of a Python integer of either sign."""
    return np.uint64(seed & _SEED_MASK)


def draw_keys(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer]
) -> npt.NDArray[np.uint64]:
    """Return one key for each pair of seed and output position: what a draw's noise begins with.

    The key is element `position` of the SplitMix64 stream (Steele, Lea and Flood, 2014) whose
    starting point is the mixed seed. Mixing the seed keeps the streams of neighbouring seeds from
    being shifted copies of each other.

    Args:
        seeds: uint64 [n].
        positions: integers of at least 0, [n].

    Returns:
        uint64 [n].
    """
    return _element(_mix(seeds), positions)


def exponentials(
    keys: npt.NDArray[np.uint64], indices: npt.NDArray[np.integer]
) -> npt.NDArray[np.float64]:
    """Return exponentially distributed noise of mean 1 for pairs of a key and an index.

    From element `index` of the SplitMix64 stream that starts at the key, whose upper 52 bits are
    the fraction of a uniform number: never 0 or 1, so that the noise is positive and finite.

    Args:
        keys: uint64, from `draw_keys`.
        indices: integers of at least 0; the two broadcast.

    Returns:
        float64 of the common shape.
    """
    fractions = (_element(keys, indices) >> np.uint64(12)).astype(np.float64)
    return -np.log((fractions + 0.5) * 2.0**-52)


def exponentials_on_device(keys: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`exponentials` in PyTorch, for other devices; int64 stands for the bits of uint64."""
    values = keys + (indices + 1) * _signed(_GOLDEN_GAMMA)
    values = (values ^ _shifted(values, 30)) * _signed(_MIX_1)
    values = (values ^ _shifted(values, 27)) * _signed(_MIX_2)
    values = values ^ _shifted(values, 31)
    return -torch.log((_shifted(values, 12).double() + 0.5) * 2.0**-52)


def _element(
    starts: npt.NDArray[np.uint64], indices: npt.NDArray[np.integer]
) -> npt.NDArray[np.uint64]:
    return _mix(starts + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)


def _signed(value: np.uint64) -> int:
    return int(value.astype(np.int64))


def _shifted(values: torch.Tensor, num_bits: int) -> torch.Tensor:
    """A logical shift to the right; PyTorch's own repeats the sign bit."""
    return (values >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
