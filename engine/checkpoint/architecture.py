"""From a checkpoint to its `ModelConfig`.

Knows the keys of Transformers' config.json and generation_config.json, old and new. Does not
know which architectures the engine can run (`engine.models.registry`) nor any tensor. GGUF
metadata is translated in `engine.checkpoint.gguf_architecture`.
"""

import json
import struct
from pathlib import Path
from typing import Any

from engine.checkpoint import families
from engine.checkpoint.gguf import GGUFFile
from engine.checkpoint.gguf_architecture import gguf_model_config
from engine.checkpoint.locate import ModelSource
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.value_kinds import (
    MAX_DIMENSION,
    MAX_LAYERS,
    check_kinds,
    check_rope,
    check_rope_theta,
)
from engine.errors import CheckpointError, UnsupportedModelError

GENERATION_DEFAULT_KEYS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)

# Rope types whose factor is already part of max_position_embeddings.
_ROPE_TYPES_WITHOUT_EXTENSION = ("default", "llama3", "proportional", "mrope")
_LAYER_KEYS = (
    *("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    *("decoder_layers", "num_decoder_layers"),
)
_HEAD_KEYS = (
    *("num_attention_heads", "n_head", "num_heads", "n_heads"),
    *("attention_heads", "decoder_attention_heads", "num_decoder_attention_heads"),
)
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def read_model_config(source: ModelSource) -> ModelConfig:
    """Read a model's configuration; opens no weight file but for its header.

    Raises:
        CheckpointError: a file or a key is missing or malformed.
        UnsupportedModelError: a kind of model that no backend of ours runs.
    """
    if source.is_gguf:
        return gguf_model_config(GGUFFile(source.path))
    path = source.path / "config.json"
    raw = read_json(path)
    check_kinds(raw, path)
    generation_path = source.path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    check_kinds(generation, generation_path)
    return _from_transformers(raw, generation, source.path)


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        CheckpointError: the file is missing, is not JSON, or holds no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except RecursionError:
        raise CheckpointError(f"cannot read {path}: it is nested too deep") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _from_transformers(
    raw: dict[str, Any], generation: dict[str, Any], folder: Path
) -> ModelConfig:
    _refuse_unsupported(raw, folder)
    architectures = raw.get("architectures") or []
    if not architectures:
        raise CheckpointError(f"{folder / 'config.json'} names no class under 'architectures'")
    family = families.family_of(raw)
    attention_bias, attention_output_bias = families.attention_biases(raw, family)
    num_layers = _num_layers(raw, folder)
    num_heads = _required(raw, folder, *_HEAD_KEYS)
    hidden_size = _required(raw, folder, "hidden_size", "n_embd", "d_model", "emb_dim")
    intermediate = _first(raw, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    rope_theta, rope_scaling = _rope(raw, folder)
    return ModelConfig(
        architecture=architectures[0],
        model_type=raw.get("model_type") or "",
        vocab_size=_required(raw, folder, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(raw, num_heads),
        head_dim=families.head_dim(raw, family, hidden_size, num_heads),
        intermediate_size=_one_size(intermediate) or 4 * hidden_size,
        max_position_embeddings=_context_limit(raw, family, rope_scaling),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_norm_eps=float(_first(raw, "rms_norm_eps") or 1e-6),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=attention_bias,
        attention_output_bias=attention_output_bias,
        mlp_bias=families.has_mlp_bias(raw, family),
        qk_norm=family == "qwen3",
        layer_windows=families.layer_windows(raw, family, num_layers, folder),
        hidden_act=_first(raw, "hidden_act", "hidden_activation", "activation_function") or "silu",
        dtype=_dtype(raw, folder),
        bos_token_id=_bos_token_id(raw, generation),
        eos_token_ids=_eos_token_ids(raw, generation),
        generation_defaults={
            key: generation[key]
            for key in GENERATION_DEFAULT_KEYS
            if generation.get(key) is not None
        },
        raw=raw,
    )


def _refuse_unsupported(raw: dict[str, Any], folder: Path) -> None:
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{folder}: encoder-decoder models are not supported, only decoders are."
        )
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") or quantization.get("quant_algo") or "unknown"
        raise UnsupportedModelError(
            f"{folder}: weights quantised with {method!r} are not supported. Use the unquantised "
            "checkpoint or a GGUF file."
        )


def _num_layers(raw: dict[str, Any], folder: Path) -> int:
    kinds = raw.get("layers_block_type")  # where each layer's kind is listed and nothing counted
    if _first(raw, *_LAYER_KEYS) is None and isinstance(kinds, list) and kinds:
        return len(kinds)
    return _required(raw, folder, *_LAYER_KEYS, most=MAX_LAYERS)


def _one_size(value: int | list[int] | None) -> int | None:
    """The largest, where each layer has its own: only Transformers runs those."""
    return max(value, default=None) if isinstance(value, list) else value


def _first(raw: dict[str, Any], *keys: str) -> Any:
    for key in keys:
        if raw.get(key) is not None:
            return raw[key]
    return None


def _required(raw: dict[str, Any], folder: Path, *keys: str, most: int = MAX_DIMENSION) -> int:
    value = _first(raw, *keys)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        if value is None and "text_config" in raw:
            raise UnsupportedModelError(
                f"{folder}: models with a text_config (multi-modal ones) are not supported."
            )
        if value is None and keys == _HEAD_KEYS and families.family_of(raw) is None:
            raise UnsupportedModelError(
                f"{folder}: {raw['architectures'][0]} is not supported. Its config.json names no "
                "attention heads, like those of state-space and recurrent models without "
                "attention layers."
            )
        raise CheckpointError(
            f"{folder / 'config.json'}: {' or '.join(keys)} must be a positive integer, at most "
            f"{most}, got {value!r}"
        )
    return value


def _num_kv_heads(raw: dict[str, Any], num_heads: int) -> int:
    if raw.get("multi_query") and not raw.get("new_decoder_architecture"):
        return 1  # Falcon's and GPTBigCode's older spelling
    return int(_first(raw, "num_key_value_heads", "num_kv_heads", "n_head_kv") or num_heads)


def _rope(raw: dict[str, Any], folder: Path) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling from `rope_parameters` (Transformers 5) or `rope_scaling` (before)."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in scaling.values()):
        # One set per layer type: no model of ours, and the Transformers backend reads its own.
        return float(raw.get("rope_theta") or 10000.0), None
    rope_type = scaling.pop("type", None)
    scaling["rope_type"] = scaling.get("rope_type") or rope_type or "default"
    check_rope(scaling, folder / "config.json")
    theta = float(scaling.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    check_rope_theta(theta, folder / "config.json")
    if scaling["rope_type"] == "su":
        scaling["rope_type"] = "longrope"
    if scaling["rope_type"] == "default":
        return theta, None
    limit = raw.get("max_position_embeddings")
    original = raw.get("original_max_position_embeddings")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    elif scaling.get("original_max_position_embeddings") is None and limit is not None:
        scaling["original_max_position_embeddings"] = limit
    return theta, scaling


def _context_limit(raw: dict[str, Any], family: str | None, scaling: dict[str, Any] | None) -> int:
    keys = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
    limit = _first(raw, *keys)
    if limit is None:
        limit = 2048
    if scaling is None:
        return int(limit)
    rope_type = scaling["rope_type"]
    if rope_type == "longrope":
        # Beyond the original length Transformers switches the angles of the whole batch, cached
        # keys would no longer fit: stay where one set of angles is right.
        return int(min(limit, scaling["original_max_position_embeddings"]))
    if rope_type in _ROPE_TYPES_WITHOUT_EXTENSION:
        return int(limit)
    if rope_type == "dynamic" and family is None:
        # Only our own modules rotate every position by a rule of its own; Transformers would let
        # the longest request of a batch change the angles of all others.
        return int(limit)
    if rope_type == "yarn":
        limit = scaling["original_max_position_embeddings"]
    return int(limit * float(scaling.get("factor") or 1.0))


def _dtype(raw: dict[str, Any], folder: Path) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is not None:
        return str(name).removeprefix("torch.")
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _safetensors_header(path).items():
            if name != "__metadata__":
                kind = entry.get("dtype") if isinstance(entry, dict) else ""
                return _SAFETENSORS_DTYPES.get(str(kind), "float32")
    return "float32"


def _safetensors_header(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            head = file.read(8)
            size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            header = json.loads(file.read(min(size, path.stat().st_size)))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is truncated: no complete header") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is no safetensors file: its header is no JSON object")
    return header


def _bos_token_id(raw: dict[str, Any], generation: dict[str, Any]) -> int | None:
    value = _first(generation, "bos_token_id")
    return value if value is not None else raw.get("bos_token_id")


def _eos_token_ids(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """Every id that ends a text, generation_config.json's first, without repetition."""
    found: dict[int, None] = {}
    for value in (generation.get("eos_token_id"), raw.get("eos_token_id")):
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                found[int(token_id)] = None
    return tuple(found)
