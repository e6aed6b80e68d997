"""What the families with modules of our own read of config.json.

Knows which keys Transformers' class of each family reads and what it takes for those left out: a
key that means something to one family is ignored by the next. Does not know tensors.
"""

from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Each is the `model_type` of its plain members; others use its class under a name of their own."""

_QWEN = ("qwen2", "qwen3")
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_QWEN3_HEAD_DIM = 128  # Qwen3Config's default does not follow hidden_size


def family_of(raw: dict[str, Any]) -> str | None:
    """Whose keys count in this config.json; None where only Transformers has the class."""
    architecture = (raw.get("architectures") or [""])[0]
    by_class = architecture.removesuffix("ForCausalLM").lower()
    if by_class not in FAMILIES:
        return None
    model_type = raw.get("model_type")
    return model_type if model_type in FAMILIES else by_class


def attention_biases(raw: dict[str, Any], family: str | None) -> tuple[bool, bool]:
    """Whether queries, keys and values have biases, and whether the output projection has."""
    if family == "qwen2":
        return True, False
    has_biases = family != "mistral" and bool(raw.get("attention_bias", False))
    return has_biases, has_biases


def has_mlp_bias(raw: dict[str, Any], family: str | None) -> bool:
    """Whether the MLP's three projections have biases."""
    return family == "llama" and bool(raw.get("mlp_bias", False))


def head_dim(raw: dict[str, Any], family: str | None, hidden_size: int, num_heads: int) -> int:
    """Elements of an attention head."""
    given = raw.get("head_dim")
    if given is None and family == "qwen3":
        return _QWEN3_HEAD_DIM
    return int(given or hidden_size // num_heads)


def layer_windows(
    raw: dict[str, Any], family: str | None, num_layers: int, folder: Path
) -> tuple[int | None, ...]:
    """Per layer the sliding window, None where it attends to everything before.

    Llama's files may name a window, but no layer of its class looks at it.

    Raises:
        CheckpointError: the list of the layers' kinds has another length.
    """
    has_window = family == "mistral" or (family in _QWEN and raw.get("use_sliding_window"))
    window = raw.get("sliding_window", _DEFAULT_WINDOW) if has_window else None
    if not window:
        return (None,) * num_layers
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        if len(layer_types) != num_layers:
            raise CheckpointError(
                f"{folder / 'config.json'}: layer_types has {len(layer_types)} entries for "
                f"{num_layers} layers"
            )
        return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)
    # The first max_window_layers layers attend in full, the ones above them in the window.
    first = raw.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS) if family in _QWEN else 0
    return tuple(int(window) if layer >= first else None for layer in range(num_layers))
