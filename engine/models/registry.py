"""Model classes by architecture name, imported only when chosen."""

import importlib

from engine.checkpoint.model_config import ModelConfig
from engine.errors import UnsupportedModelError
from engine.layers.rotary import ROPE_TYPES
from engine.models.base import CausalLM

_MODELS = {
    "LlamaForCausalLM": ("engine.models.llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("engine.models.llama", "MistralForCausalLM"),
    "Qwen2ForCausalLM": ("engine.models.qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("engine.models.qwen3", "Qwen3ForCausalLM"),
}


def supported_architectures() -> tuple[str, ...]:
    """Architectures with modules of our own; others go through Transformers."""
    return tuple(_MODELS)


def model_class(config: ModelConfig, *, is_gguf: bool = False) -> type[CausalLM]:
    """The class that runs this model.

    An architecture of ours with a rope type that is not falls to the Transformers backend too.

    Raises:
        UnsupportedModelError: neither we nor Transformers have a decoder of that name.
    """
    rope_type = (config.rope_scaling or {}).get("rope_type", "default")
    if config.architecture in _MODELS and rope_type in ROPE_TYPES:
        module, class_name = _MODELS[config.architecture]
        return getattr(importlib.import_module(module), class_name)
    if not is_gguf:
        from engine.models.transformers_backend import (
            TransformersForCausalLM,
            has_transformers_decoder,
        )

        if has_transformers_decoder(config):
            return TransformersForCausalLM
    raise UnsupportedModelError(
        f"architecture {config.architecture!r} is not supported. Supported: "
        f"{', '.join(_MODELS)}, and every decoder (…ForCausalLM) that the installed Transformers "
        "knows without remote code."
    )
