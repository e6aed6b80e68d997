"""GGUF tensors as PyTorch tensors under Transformers' names.

Knows the layouts of the common ggml number types and what llama.cpp's converter renames and
reorders. The rarer types go through the `gguf` package.

Decoding is numpy's work and not PyTorch's: hundreds of small parallel regions cost 10 s instead
of 0.5 s when another process keeps one of two cores busy.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from engine.checkpoint.gguf import GGUFFile, GGUFTensor
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError, UnsupportedModelError

NUM_DECODERS = 2

_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Tensors that are part of the configuration, see `gguf_architecture`.
_CONFIGURATION = ("rope_freqs.weight",)


def iterate_gguf_weights(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight, dequantised to float32 (or as stored, if that is a float type).

    Raises:
        CheckpointError: a tensor of unknown name.
        UnsupportedModelError: a number type that not even the `gguf` package dequantises.
    """
    names = [name for name in file.tensors if name not in _CONFIGURATION]
    for name, weight in zip(names, _dequantize_ahead(file, names), strict=True):
        # llama.cpp pairs neighbouring elements in rotary positions, Transformers the two halves;
        # the converter reorders the rows of Llama's (not Qwen's) queries and keys to fit.
        if config.model_type == "llama":
            kind = name.split(".")[2] if name.startswith("blk.") else ""
            if kind == "attn_q":
                weight = _unpair(weight, config.num_heads)
            elif kind == "attn_k":
                weight = _unpair(weight, config.num_kv_heads)
        yield _transformers_name(name, file), weight


def _dequantize_ahead(file: GGUFFile, names: list[str]) -> Iterator[torch.Tensor]:
    """Decode in threads (numpy lets go of the interpreter), a few tensors ahead, in order."""
    pending: deque[Future[torch.Tensor]] = deque()
    with ThreadPoolExecutor(NUM_DECODERS, thread_name_prefix="gguf-decode") as pool:
        for name in names:
            pending.append(pool.submit(dequantize, file, file.tensors[name]))
            if len(pending) > NUM_DECODERS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def dequantize(file: GGUFFile, tensor: GGUFTensor) -> torch.Tensor:
    """Decode one tensor to floating point, in its own shape.

    Raises:
        UnsupportedModelError: the number type cannot be decoded.
    """
    data = np.frombuffer(file.data(tensor.name), dtype=np.uint8)
    plain = _PLAIN_TYPES.get(tensor.type.name)
    if plain is not None:
        return torch.from_numpy(data.copy()).view(plain).view(tensor.shape)
    decode = _BLOCK_DECODERS.get(tensor.type.name)
    if decode is None:
        return _dequantize_rare(file, tensor)
    values = decode(data.reshape(-1, tensor.type.block_bytes))
    return torch.from_numpy(values).view(tensor.shape)


def _transformers_name(name: str, file: GGUFFile) -> str:
    parts = name.split(".")
    suffix = parts[-1]
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{suffix}"
    if len(parts) == 2 and parts[0] in _OUTER_NAMES:
        return f"{_OUTER_NAMES[parts[0]]}.{suffix}"
    raise CheckpointError(f"{file.path}: tensor {name!r} belongs to no part of the model")


def _unpair(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from (0, 1), (2, 3), ... back to first half, second half."""
    paired = weight.view(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return paired.transpose(1, 2).reshape(weight.shape)


# Each decoder maps blocks, `[num_blocks, block_bytes]` uint8, to float32 `[num_blocks, 32]`. A
# block opens with its scale (float16), in the _1 types followed by its minimum; then come the
# fifth bits (Q5, 32 of them) and the values, of which 4-bit ones hold the first 16 in their low
# halves.


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)  # [n, 1]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    values = np.empty((len(packed), 32), np.uint8)
    np.bitwise_and(packed, 0x0F, out=values[:, :16])
    np.right_shift(packed, 4, out=values[:, 16:])
    return values


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    return np.unpackbits(packed, axis=1, bitorder="little") << 4  # [n, 32]


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return (_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8)) * _half(blocks, 0)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    values = _nibbles(blocks[:, 4:]) * _half(blocks, 0)
    values += _half(blocks, 2)
    return values


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return (values.view(np.int8) - np.int8(16)) * _half(blocks, 0)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    values = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])) * _half(blocks, 0)
    values += _half(blocks, 2)
    return values


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, 2:].view(np.int8) * _half(blocks, 0)


_PLAIN_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
_BLOCK_DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}


def _dequantize_rare(file: GGUFFile, tensor: GGUFTensor) -> torch.Tensor:
    from gguf import GGMLQuantizationType
    from gguf import dequantize as gguf_dequantize

    data = np.frombuffer(file.data(tensor.name), dtype=np.uint8)
    try:
        rows = data.reshape(tensor.num_elements // tensor.shape[-1], -1)
        values = gguf_dequantize(rows, GGMLQuantizationType(tensor.type_id))
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModelError(
            f"{file.path}: tensor {tensor.name!r} has the number type {tensor.type.name}, which "
            f"cannot be dequantised ({error}). Use another quantisation of the model."
        ) from error
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(tensor.shape)
