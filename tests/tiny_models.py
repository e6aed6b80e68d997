"""Tiny random Transformers checkpoints, written where a test wants them.

Knows how to make models of each family small and their logits distinct. Does not know the engine.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 128

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = _COMMON | {"num_key_value_heads": 2, "tie_word_embeddings": False}

# Family to Transformers class and configuration. gpt_neox has no modules of the engine's own.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED | {"head_dim": 32}),
    "mistral": ("MistralForCausalLM", _GROUPED | {"sliding_window": 12}),
    "gpt_neox": ("GPTNeoXForCausalLM", _COMMON | {"tie_word_embeddings": False}),
}


def build_tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 model of a family.

    Args:
        family: a key of `FAMILIES`, or the name of any Transformers class ending in ForCausalLM.
        seed: of the weights.
        overrides: configuration values besides or instead of the family's own.
    """
    class_name, settings = FAMILIES.get(family, (family, _COMMON))
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**(settings | overrides))
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights of this size make attention and logits far from uniform, so that a wrong
            # mask, position or head shows in every output.
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.1 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    return model


def build_tiny_checkpoint(
    folder: Path | str,
    family: str,
    *,
    num_shards: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write config.json, generation_config.json and safetensors of a random model.

    Args:
        folder: made if it is not there; also returned.
        family, seed, overrides: as for `build_tiny_model`.
        num_shards: 1 for model.safetensors; more for at least that many files with an index.
        dtype: of the stored weights.
    """
    folder = Path(folder)
    model = build_tiny_model(family, seed=seed, **overrides).to(dtype)
    num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    shard_bytes = num_bytes + 1 if num_shards == 1 else num_bytes // num_shards
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    return folder
