"""Random numbers that depend on a request's seed and an output position, and on nothing else.

Knows one function from (seed, position) to a number. Keeps no state, so the tokens of a seeded
request do not depend on its neighbours in the batch, on preemption or on scheduling.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

_GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_SEED_MASK: Final = 2**64 - 1


def wrap_seed(seed: int) -> np.uint64:
    """Return the low 64 bits of a Python integer of either sign."""
    return np.uint64(seed & _SEED_MASK)


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer]
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each pair of seed and output position.

    The number is element `position` of the SplitMix64 stream (Steele, Lea and Flood, 2014) whose
    starting point is the mixed seed, with its upper 53 bits as the fraction. Mixing the seed keeps
    the streams of neighbouring seeds from being shifted copies of each other.

    Args:
        seeds: uint64 [n].
        positions: integers of at least 0, [n].

    Returns:
        float64 [n].
    """
    steps = positions.astype(np.uint64) + np.uint64(1)
    mixed = _mix(_mix(seeds) + steps * _GOLDEN_GAMMA)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
