"""Rotary positions: the angles of each scaling rule, and turning queries and keys by them.

Knows Transformers' `rope_type`s that depend on the position alone, so that a token's key can be
cached once and for all. Does not know layers: `RotaryTable` is made once a step from the step's
positions and serves all of them, so no table of the whole context is kept.

Papers: rotary positions https://arxiv.org/abs/2104.09864, YaRN https://arxiv.org/abs/2309.00071
"""

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "divisors")


class RotaryTable(NamedTuple):
    """Cosine and signed sine of every token's angles, `[num_tokens, 1, head_dim]` each.

    The first half of `sine` is negated, so that turning is `x * cosine + roll(x) * sine`.
    """

    cosine: torch.Tensor
    sine: torch.Tensor


class RotaryEmbedding(nn.Module):
    """Makes the step's `RotaryTable`.

    Args:
        head_dim: elements of a head; all of them are turned.
        theta: the base of the wavelengths.
        scaling: Transformers' rope parameters, or None for plain positions.

    Raises:
        UnsupportedModelError: a rope type that is not in `ROPE_TYPES`.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        *,
        scaling: dict[str, Any] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.head_dim, self.theta, self.dtype = head_dim, theta, dtype
        self.scaling = scaling or {"rope_type": "default"}
        frequencies, self.attention_factor = inverse_frequencies(head_dim, theta, self.scaling)
        self.frequencies = nn.Buffer(frequencies.to(device), persistent=False)  # [head_dim / 2]

    def forward(self, positions: torch.Tensor) -> RotaryTable:
        """The table for `positions`, `[num_tokens]` int64."""
        cosine, sine = self.cosine_sine(positions)
        cosine = torch.cat((cosine, cosine), dim=-1).to(self.dtype)
        sine = torch.cat((-sine, sine), dim=-1).to(self.dtype)
        return RotaryTable(cosine[:, None], sine[:, None])

    def cosine_sine(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the angles of each pair of elements, `[num_tokens, head_dim / 2]` float32 each."""
        angles = positions[:, None].float() * self._frequencies_at(positions)
        cosine, sine = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cosine, sine = cosine * self.attention_factor, sine * self.attention_factor
        return cosine, sine

    def _frequencies_at(self, positions: torch.Tensor) -> torch.Tensor:
        if self.scaling["rope_type"] != "dynamic":
            return self.frequencies
        # NTK scaling stretches with the sequence. Each position takes the stretch of the sequence
        # that ends at it: right for tokens generated one by one, and keys stay valid in the cache.
        original = self.scaling["original_max_position_embeddings"]
        factor, dim = self.scaling["factor"], self.head_dim
        length = (positions + 1).clamp(min=original).float()
        base = self.theta * (factor * length / original - (factor - 1)) ** (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, device=positions.device).float() / dim
        return 1.0 / base[:, None] ** exponents


def rotate(x: torch.Tensor, table: RotaryTable, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Turn heads, `[num_tokens, num_heads, head_dim]`, by their tokens' angles.

    `out` may be `x` itself, since neither product reads it when the sum is written.
    """
    half = x.shape[-1] // 2
    return torch.addcmul(x * table.cosine, x.roll(half, -1), table.sine, out=out)


def inverse_frequencies(
    head_dim: int, theta: float, scaling: dict[str, Any]
) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair of elements, `[head_dim / 2]` float32, and a factor.

    The factor multiplies sine and cosine (YaRN's attention temperature; else 1).
    """
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    rope_type = scaling["rope_type"]
    if rope_type in ("default", "dynamic"):
        return plain, 1.0
    if rope_type == "linear":
        return plain / scaling["factor"], 1.0
    if rope_type == "divisors":
        return plain / torch.tensor(scaling["divisors"]), 1.0
    if rope_type == "llama3":
        return _llama3(plain, scaling), 1.0
    if rope_type == "yarn":
        return _yarn(plain, head_dim, theta, scaling)
    raise UnsupportedModelError(
        f"rope_type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
    )


def _llama3(plain: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between are blended."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * plain / (2 * math.pi)  # how often a wave fits the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / factor + keep * plain


def _yarn(
    plain: torch.Tensor, head_dim: int, theta: float, scaling: dict[str, Any]
) -> tuple[torch.Tensor, float]:
    original = scaling["original_max_position_embeddings"]
    factor = scaling["factor"]

    def index_with(num_turns: float) -> float:
        """Index of the frequency that turns so often within the original context."""
        return head_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low = index_with(scaling.get("beta_fast") or 32)
    high = index_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    stretch = ((torch.arange(head_dim // 2).float() - low) / span).clamp(0, 1)
    frequencies = plain / factor * stretch + plain * (1 - stretch)
    return frequencies, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: dict[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if numerator and denominator:
        return magnitude(numerator) / magnitude(denominator)
    return magnitude(1.0)
