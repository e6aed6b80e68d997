"""Qwen3: the plain decoder with a norm on every query and key head.

Paper: https://arxiv.org/abs/2505.09388
"""

import torch

from engine.attention.base import AttentionBackend
from engine.checkpoint.model_config import ModelConfig
from engine.layers.norm import RMSNorm
from engine.models.decoder import DecoderForCausalLM, SelfAttention


class Qwen3Attention(SelfAttention):
    """Self-attention that norms the heads of queries and keys before turning them."""

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        *,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, layer_index, backend=backend, dtype=dtype, device=device)
        eps = config.rms_norm_eps
        self.query_norm = RMSNorm(config.head_dim, eps, dtype=dtype, device=device)
        self.key_norm = RMSNorm(config.head_dim, eps, dtype=dtype, device=device)

    def normalise(self, heads: torch.Tensor) -> torch.Tensor:
        """Norm each head over its own elements, with one weight for queries, one for keys."""
        query, key = heads.tensor_split([self.attention.num_heads], dim=1)
        return torch.cat((self.query_norm(query), self.key_norm(key)), dim=1)

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """The plain slots and the two norms."""
        return super().weight_slots() | {
            "q_norm.weight": self.query_norm.weight.data,
            "k_norm.weight": self.key_norm.weight.data,
        }


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen3, dense."""

    attention_class = Qwen3Attention
