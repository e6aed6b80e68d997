"""Paged attention by the native kernels, for bfloat16 on CPUs with a matrix unit.

Knows how the kernels want a step described. Serves as the attention of a model made of modules,
and as the cache of one that runs in the kernels altogether (`engine.models.native_decoder`).
"""

import ctypes
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend, AttentionShape, BatchLayout
from engine.native.library import (
    GROUP_TOKENS,
    MAX_GROUP_SIZE,
    MAX_HEAD_DIM,
    Batch,
    Shape,
    load_library,
)


@dataclass(frozen=True, slots=True)
class NativeMetadata:
    """A step's layout as the kernels read it; `layout` owns the memory."""

    layout: BatchLayout
    batch: Batch


class NativeAttentionBackend(AttentionBackend):
    """Cache `[num_blocks, 2, num_kv_heads, block_size * head_dim]`: see src/cache.h.

    Raises:
        ConfigError: the kernels do not run here, see `load_library`.
    """

    name = "native"

    def __init__(self) -> None:
        self._library = load_library()

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """See `AttentionBackend`; a new cache need not be zeroed."""
        assert block_size % GROUP_TOKENS == 0, block_size
        return (num_blocks, 2, num_kv_heads, block_size * head_dim)

    def build_metadata(self, layout: BatchLayout, device: torch.device) -> NativeMetadata:
        """See `AttentionBackend`."""
        assert torch.device(device).type == "cpu"
        table = layout.block_table
        assert table.strides[1] == table.itemsize == 4
        batch = Batch(
            num_tokens=len(layout.slot_mapping),
            num_reqs=layout.num_reqs,
            block_size=layout.block_size,
            table_stride=table.strides[0] // table.itemsize,
            query_start_loc=layout.query_start_loc.ctypes.data,
            seq_lens=layout.seq_lens.ctypes.data,
            block_table=table.ctypes.data,
            slots=layout.slot_mapping.ctypes.data,
        )
        return NativeMetadata(layout, batch)

    def forward(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: NativeMetadata,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        assert qkv.dtype == kv_cache.dtype == torch.bfloat16
        assert qkv.is_contiguous()
        assert kv_cache.is_contiguous()
        output = qkv.new_empty(len(qkv), shape.query_size)
        self._library.isinglass_attend(
            ctypes.byref(native_shape(shape)),
            ctypes.byref(metadata.batch),
            shape.window or 0,
            qkv.data_ptr(),
            kv_cache.data_ptr(),
            output.data_ptr(),
            torch.get_num_threads(),
        )
        return output


def native_shape(shape: AttentionShape) -> Shape:
    """The constants as the kernels read them; they must pass `unsupported_shape`."""
    return Shape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.scale,
    )


def unsupported_shape(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> str | None:
    """Why the kernels cannot attend over heads and blocks of these sizes, or None."""
    if head_dim % 32 or head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of 32 up to {MAX_HEAD_DIM}"
    if num_heads % num_kv_heads or num_heads // num_kv_heads > MAX_GROUP_SIZE:
        return f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly"
    if block_size % GROUP_TOKENS:
        return f"block_size {block_size} is not a multiple of {GROUP_TOKENS}"
    return None
