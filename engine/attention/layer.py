"""`Attention`: the place in a model where its layer meets the backend.

Knows the layer's constants and its place in the cache list. Has no weights.
"""

import torch
from torch import nn

from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.forward_context import get_forward_context


class Attention(nn.Module):
    """One layer's attention call.

    Attributes:
        num_heads, num_kv_heads, head_dim, scale: as the architecture says.
        window: sliding window in tokens, the token itself included; None for full attention.
        layer_index: index of the layer's cache in `ForwardContext.kv_caches`.
    """

    def __init__(
        self, shape: AttentionShape, layer_index: int, *, backend: AttentionBackend
    ) -> None:
        super().__init__()
        self.shape = shape
        self.num_heads, self.num_kv_heads, self.head_dim, self.scale, self.window = shape
        self.layer_index = layer_index
        self.backend = backend

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        """Attend; `qkv` and the result as in `AttentionBackend.forward`."""
        context = get_forward_context()
        return self.backend.forward(
            qkv, context.kv_caches[self.layer_index], context.metadata, self.shape
        )

    def extra_repr(self) -> str:
        """Constants, for printing the model."""
        return f"{self.shape}, layer_index={self.layer_index}, backend={self.backend.name}"
