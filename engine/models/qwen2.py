"""Qwen2 and Qwen2.5: the plain decoder, always with biases on queries, keys and values."""

import torch

from engine.attention.base import AttentionBackend
from engine.checkpoint.model_config import ModelConfig
from engine.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen2. Paper: https://arxiv.org/abs/2407.10671"""

    def __init__(
        self,
        config: ModelConfig,
        *,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert config.attention_bias, "Qwen2 has query, key and value biases by definition"
        super().__init__(config, backend=backend, dtype=dtype, device=device)
