"""What kind of value each key of config.json and generation_config.json may have.

Knows the keys that are read here and how wrong ones are told. Does not know what they mean. Keys of
the other architectures, which Transformers runs, are for Transformers to check.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

MAX_DIMENSION = 1 << 24
MAX_LAYERS = 1 << 16
"""Beyond any model; memory is taken for each, before a single weight has been looked for."""

_MAX_LENGTH = 1 << 40
_DIMENSIONS = frozenset(("num_key_value_heads", "num_kv_heads", "n_head_kv", "head_dim"))
_MLP_SIZES = frozenset(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"))
_LENGTHS = frozenset(
    (
        *("max_position_embeddings", "original_max_position_embeddings", "n_positions"),
        *("max_seq_len", "seq_length", "n_ctx", "sliding_window", "max_window_layers"),
    )
)
_NUMBERS = frozenset(
    ("rope_theta", "rms_norm_eps", "temperature", "top_p", "min_p", "repetition_penalty")
)
_WHOLE_NUMBERS = frozenset(("top_k", "max_new_tokens"))
_TEXTS = frozenset(
    (
        *("model_type", "dtype", "torch_dtype"),
        *("hidden_act", "hidden_activation", "activation_function"),
    )
)
_TEXT_LISTS = frozenset(("architectures", "layer_types"))
_MAPPINGS = frozenset(("rope_parameters", "rope_scaling", "quantization_config"))
_ROPE_NUMBERS = frozenset(
    (
        *("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "rope_theta"),
        *("original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"),
    )
)
_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""By rope type; the original length is that of the model where the file does not say."""


def check_kinds(content: Mapping[str, Any], path: Path) -> None:
    """Look at each key that is read, where it is there and not null.

    Raises:
        CheckpointError: one has a value of another kind; it names file and key.
    """
    for key, value in content.items():
        if value is None:
            continue
        if key in _DIMENSIONS and not _is_dimension(value):
            _refuse(path, key, f"a whole number from 0 to {MAX_DIMENSION}", value)
        if key in _MLP_SIZES and not (_is_dimension(value) or _is_list_of(value, int)):
            _refuse(path, key, f"a whole number from 0 to {MAX_DIMENSION}", value)
        if key in _LENGTHS and not _is_whole(value, least=0, most=_MAX_LENGTH):
            _refuse(path, key, "a whole number that is not negative", value)
        if key in _NUMBERS and not _is_number(value):
            _refuse(path, key, "a number", value)
        if key in _WHOLE_NUMBERS and not _is_whole(value, least=-1, most=_MAX_LENGTH):
            _refuse(path, key, "a whole number", value)
        if key in _TEXTS and not isinstance(value, str):
            _refuse(path, key, "a text", value)
        if key in _TEXT_LISTS and not _is_list_of(value, str):
            _refuse(path, key, "a list of texts", value)
        if key in _MAPPINGS and not isinstance(value, dict):
            _refuse(path, key, "an object", value)
        if key == "eos_token_id" and not (_is_list_of(value, int) or _is_token_id(value)):
            _refuse(path, key, "a token id or a list of them", value)
        if key == "bos_token_id" and not _is_token_id(value):
            _refuse(path, key, "a token id", value)


def check_rope(scaling: Mapping[str, Any], path: Path) -> None:
    """Look at one set of rope parameters, whose `rope_type` has been filled in.

    Raises:
        CheckpointError: one has a value of another kind, or one is missing that the type needs.
    """
    rope_type = scaling["rope_type"]
    if not isinstance(rope_type, str) or rope_type == "divisors":  # which GGUF files alone have
        _refuse(path, "rope_type", "the name of one of Transformers' types", rope_type)
    for key in _ROPE_NUMBERS & scaling.keys():
        if scaling[key] is not None and not (_is_number(scaling[key]) and 0 <= scaling[key] < 1e12):
            _refuse(path, key, "a number that is not negative", scaling[key])
    for key in _ROPE_NEEDS.get(rope_type, ()):
        if not scaling.get(key):
            _refuse(path, key, f"a number above 0 for rope_type {rope_type!r}", scaling.get(key))


def check_rope_theta(theta: float, path: Path) -> None:
    """Refuse a base that makes no wavelengths of different lengths.

    Raises:
        CheckpointError: it does not.
    """
    if not theta > 1:
        _refuse(path, "rope_theta", "a number above 1", theta)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -1e300 < value < 1e300  # JSON's readers let NaN and infinities pass
    )


def _is_whole(value: Any, *, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_dimension(value: Any) -> bool:
    return _is_whole(value, least=0, most=MAX_DIMENSION)


def _is_token_id(value: Any) -> bool:
    return _is_whole(value, least=-1, most=1 << 32)


def _is_list_of(value: Any, kind: type) -> bool:
    if not isinstance(value, list):
        return False
    return all(_is_token_id(one) if kind is int else isinstance(one, kind) for one in value)


def _refuse(path: Path, key: str, wanted: str, value: Any) -> None:
    shown = repr(value)
    shown = shown if len(shown) <= 100 else f"{shown[:100]}…"
    raise CheckpointError(f"{path}: {key} must be {wanted}, got {shown}")
