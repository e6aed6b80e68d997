"""`CausalLM`: what the model runner knows of a model.

Knows nothing of any architecture.
"""

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import nn

from engine.attention.base import AttentionBackend
from engine.attention.layer import Attention
from engine.checkpoint.locate import ModelSource
from engine.checkpoint.model_config import ModelConfig


class CausalLM(nn.Module, ABC):
    """A decoder with a language head, run on flat batches inside `forward_context`.

    Attributes:
        attention_layers: the attention calls in layer order; each has a KV cache of its own.
    """

    attention_layers: list[Attention]

    @classmethod
    @abstractmethod
    def load(
        cls,
        source: ModelSource,
        config: ModelConfig,
        *,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Build the model with its weights, ready to run.

        Raises:
            CheckpointError: a weight is missing, unexpected, cut off or of the wrong shape.
            UnsupportedModelError: the model needs a feature that is not there.
        """

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the decoder.

        Args:
            input_ids: `[num_tokens]` int64.
            positions: `[num_tokens]` int64, each token's place in its sequence.

        Returns:
            Final hidden states, normalised, `[num_tokens, hidden_size]` in the model's dtype.
        """

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states: `[num_rows, hidden]` to `[num_rows, vocab_size]` float32."""
