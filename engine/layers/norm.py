"""Root mean square norm, computed in float32.

Paper: https://arxiv.org/abs/1910.07467
"""

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Scales rows to unit root mean square, then by `weight`; `[..., size]` in and out."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(size, dtype=dtype, device=device), requires_grad=False
        )
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
