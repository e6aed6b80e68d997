"""Token embedding."""

import torch
from torch import nn
from torch.nn import functional


class Embedding(nn.Module):
    """Rows of a table: `[num_tokens]` int64 in, `[num_tokens, size]` out."""

    def __init__(
        self, num_rows: int, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(num_rows, size, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look the ids up."""
        return functional.embedding(ids, self.weight)
