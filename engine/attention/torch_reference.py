"""Paged attention as one would write it on a blackboard: slow, float32 inside, any device.

The definition of right for all other backends. A loop over requests, no fused kernel.
"""

from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend, AttentionShape, BatchLayout


@dataclass(frozen=True, slots=True)
class ReferenceMetadata:
    """The layout, with what indexes a tensor moved to the device."""

    query_start_loc: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor  # [num_reqs, max_blocks] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64
    block_size: int


class TorchReferenceBackend(AttentionBackend):
    """Cache `[num_blocks, block_size, 2, num_kv_heads, head_dim]`: keys at 0, values at 1."""

    name = "torch_reference"

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """See `AttentionBackend`."""
        return (num_blocks, block_size, 2, num_kv_heads, head_dim)

    def build_metadata(self, layout: BatchLayout, device: torch.device) -> ReferenceMetadata:
        """See `AttentionBackend`."""
        return ReferenceMetadata(
            query_start_loc=layout.query_start_loc.tolist(),
            seq_lens=layout.seq_lens.tolist(),
            block_table=torch.from_numpy(layout.block_table.astype("int64")).to(device),
            slot_mapping=torch.from_numpy(layout.slot_mapping.astype("int64")).to(device),
            block_size=layout.block_size,
        )

    def forward(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: ReferenceMetadata,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        num_tokens = qkv.shape[0]
        query, key_value = qkv.split([shape.query_size, 2 * shape.kv_size], dim=1)
        query = query.view(num_tokens, shape.num_heads, shape.head_dim)
        key_value = key_value.view(num_tokens, 2, shape.num_kv_heads, shape.head_dim)
        kv_cache.flatten(0, 1)[metadata.slot_mapping] = key_value
        output = torch.empty_like(query)
        for request, seq_len in enumerate(metadata.seq_lens):
            start, end = metadata.query_start_loc[request : request + 2]
            num_blocks = -(-seq_len // metadata.block_size)
            blocks = metadata.block_table[request, :num_blocks]
            context = kv_cache[blocks].flatten(0, 1)[:seq_len]  # [seq_len, 2, kv_heads, head_dim]
            output[start:end] = self._attend(query[start:end], context, shape)
        return output.flatten(1)

    @staticmethod
    def _attend(query: torch.Tensor, context: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
        """The last `len(query)` tokens of a context attend over it causally."""
        query_len, seq_len = query.shape[0], context.shape[0]
        group = shape.num_heads // shape.num_kv_heads
        key, value = context.float().repeat_interleave(group, dim=2).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", query.float(), key) * shape.scale
        key_position = torch.arange(seq_len, device=query.device)
        query_position = key_position[seq_len - query_len :, None]
        hidden = key_position > query_position
        if shape.window is not None:
            hidden |= key_position <= query_position - shape.window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
