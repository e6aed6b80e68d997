"""Configurations of models, as small as they can be."""

from typing import Any

from engine.checkpoint.model_config import ModelConfig


def model_config(**changes: Any) -> ModelConfig:
    values = {
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "intermediate_size": 32,
        "max_position_embeddings": 1_000,
        "layer_windows": (None,),
    }
    return ModelConfig(**(values | changes))
