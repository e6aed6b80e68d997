"""`ModelConfig` from the metadata of a GGUF file.

Knows llama.cpp's keys for the architectures that have modules of ours. Does not dequantise.
"""

import struct
from typing import Any

from engine.checkpoint.gguf import GGUFFile
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError, UnsupportedModelError

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# llama.cpp ends a text at each of these; the last two belong to chat turns.
_EOS_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
_DTYPES = {"F32": "float32", "F16": "float16"}


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """Translate a GGUF file's metadata.

    Raises:
        CheckpointError: a key or the embedding tensor is missing.
        UnsupportedModelError: another architecture, a mixture of experts, or a split file.
    """
    metadata = file.metadata
    arch = metadata.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES or metadata.get(f"{arch}.expert_count"):
        name = f"{arch} with experts" if arch in GGUF_ARCHITECTURES else repr(arch)
        raise UnsupportedModelError(
            f"{file.path}: GGUF files of architecture {name} are not supported. Supported: "
            f"{', '.join(GGUF_ARCHITECTURES)}. Others run from a Transformers checkpoint."
        )
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"{file.path} is one of {metadata['split.count']} parts. Merge them first "
            "(llama-gguf-split --merge)."
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no tensor 'token_embd.weight'")
    num_layers, num_heads = (
        _integer(file, f"{arch}.block_count"),
        _integer(file, f"{arch}.attention.head_count"),
    )
    hidden_size = _integer(file, f"{arch}.embedding_length")
    rope_scaling = _rope_scaling(file, arch)
    return ModelConfig(
        architecture=GGUF_ARCHITECTURES[arch],
        model_type=arch,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_integer(file, f"{arch}.attention.head_count_kv", num_heads),
        head_dim=_integer(file, f"{arch}.attention.key_length", hidden_size // num_heads),
        intermediate_size=_integer(file, f"{arch}.feed_forward_length"),
        max_position_embeddings=_integer(file, f"{arch}.context_length"),
        rope_theta=float(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        rope_scaling=rope_scaling,
        rms_norm_eps=float(metadata.get(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        # Some files of these architectures name a window, which neither llama.cpp nor Transformers
        # applies to them.
        layer_windows=(None,) * num_layers,
        hidden_act="silu",
        dtype=_dtype(file),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(metadata),
        raw={key: value for key, value in metadata.items() if not isinstance(value, list)},
    )


def _integer(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModelError(
                f"{file.path}: {key} differs between layers, which is not supported."
            )
        value = value[0]
    if not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"{file.path}: {key} must be a positive integer, got {value!r}")
    return value


def _rope_scaling(file: GGUFFile, arch: str) -> dict[str, Any] | None:
    metadata = file.metadata
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        # Llama 3.1's rule, already worked out by the converter: one divisor per frequency.
        values = struct.unpack(f"<{factors.num_elements}f", file.data("rope_freqs.weight"))
        return {"rope_type": "divisors", "divisors": list(values)}
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind in ("none", ""):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: rope scaling {kind!r} is not supported in GGUF files; none, linear "
            "and yarn are."
        )
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": float(metadata.get(f"{arch}.rope.scaling.factor", 1.0)),
        "original_max_position_embeddings": metadata.get(
            f"{arch}.rope.scaling.original_context_length", metadata.get(f"{arch}.context_length")
        ),
    }
    attention_factor = metadata.get(f"{arch}.rope.scaling.attn_factor")
    if attention_factor is not None:
        scaling["attention_factor"] = float(attention_factor)
    return scaling


def _dtype(file: GGUFFile) -> str:
    weight = file.tensors.get("blk.0.attn_q.weight")
    return _DTYPES.get(weight.type.name, "bfloat16") if weight is not None else "bfloat16"


def _eos_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    found = [metadata[key] for key in _EOS_KEYS if metadata.get(key) is not None]
    return tuple(dict.fromkeys(found))
