"""Paged attention for CPUs, made of PyTorch's own kernels.

Knows how to turn a step's layout into few large calls of the CPU flash-attention kernel. Does
not know layers: the plan of a step is made once and serves all of them.

What measurement decided (two AMX cores, bfloat16, 9 query and 3 KV heads of 64, microseconds a
layer unless said otherwise):
- Key and value of a token lie side by side, so one `index_copy_` writes both straight from the
  fused projection and one `index_select` of whole blocks fetches both.
- Rows in generation: the query heads of one KV head become the query's length, which needs no
  copy of keys or values. Batched matrix products take 2 to 4 times as long as the flash kernel.
- The gathered blocks go to a buffer that is kept: a fresh one costs more in page faults than the
  gather itself once it is larger than the allocator's limit (64 rows of 1000 tokens: 21 ms
  against 2.4 ms).
- A prompt's chunk behind cached tokens: one call with an explicit mask below about a thousand
  tokens; above it, one call for the cached part and a causal one for the chunk's own, merged by
  their log-sum-exps (2048 behind 2048: 105 ms against 140 ms).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.base import AttentionBackend, AttentionShape, BatchLayout
from engine.attention.row_order import RowOrder

# Rows of a decode group may be padded to this multiple of their true tokens, plus a little.
MAX_PADDING_RATIO = 1.3
FREE_PADDING_TOKENS = 64
# Tokens gathered at once, so that they are still in the cache when they are attended to (64 rows
# of 1000 tokens, one core: 12.9 ms a layer in groups of 8 rows, 19.7 ms in one).
MAX_GROUP_TOKENS = 8192
# Chunks of at least this many tokens behind a cached context are merged from two calls.
MIN_MERGE_TOKENS = 1024

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class DecodeGroup(NamedTuple):
    """Rows of one token each, of similar context, attended in one call."""

    start: int
    """First row, counted in the plan's order of decode rows."""
    end: int
    blocks: torch.Tensor | slice  # [num_rows * blocks_per_row] int64
    first_key: int
    """First token of a row's gathered blocks that any row sees."""
    last_key: int
    """One past the last that any row sees."""
    mask: torch.Tensor | None  # [num_rows, 1, 1, last_key - first_key] float32


class Chunk(NamedTuple):
    """Several tokens of one request: the rows `start` to `end` of the flat batch.

    Its keys are gathered from `blocks`, of which the first `num_keys` tokens count, or read from
    the batch itself if `blocks` is None.
    """

    start: int
    end: int
    blocks: torch.Tensor | slice | None  # [num_blocks] int64
    num_keys: int
    mask: torch.Tensor | None  # [num_queries, num_keys] float32


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The calls of one step for layers of one window."""

    decode_rows: RowOrder
    """Rows of one token, in the groups' order: a group's `start` and `end` count in it."""
    decode_groups: list[DecodeGroup]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class CPUMetadata:
    """A step's layout and, by window, the plans that its layers have asked for so far."""

    layout: BatchLayout
    slots: torch.Tensor  # [num_tokens] int64
    plans: dict[int | None, WindowPlan] = field(default_factory=dict)

    def plan(self, window: int | None) -> WindowPlan:
        """The plan for layers of that window, made on first use."""
        plan = self.plans.get(window)
        if plan is None:
            plan = self.plans[window] = make_plan(self.layout, window)
        return plan


class CPUAttentionBackend(AttentionBackend):
    """Cache `[num_blocks, block_size, 2 * num_kv_heads * head_dim]`: a token's keys, its values."""

    name = "cpu"

    def __init__(self) -> None:
        # Scratch memory for gathered blocks; grows to the largest gather, holds nothing of use
        # between calls.
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """See `AttentionBackend`."""
        return (num_blocks, block_size, 2 * num_kv_heads * head_dim)

    def build_metadata(self, layout: BatchLayout, device: torch.device) -> CPUMetadata:
        """See `AttentionBackend`."""
        assert torch.device(device).type == "cpu"
        return CPUMetadata(layout, _tensor(layout.slot_mapping))

    def forward(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CPUMetadata,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        query_size = shape.query_size
        kv_cache.flatten(0, 1).index_copy_(0, metadata.slots, qkv[:, query_size:])
        plan = metadata.plan(shape.window)
        output = qkv.new_empty(qkv.shape[0], query_size)
        if plan.decode_groups:
            rows = plan.decode_rows
            results = rows.results_for(output)
            self._decode(rows.take(qkv[:, :query_size]), kv_cache, plan, shape, results)
            rows.put_back(results, output)
        for chunk in plan.chunks:
            output[chunk.start : chunk.end] = self._attend_chunk(qkv, kv_cache, chunk, shape)
        return output

    def _decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        plan: WindowPlan,
        shape: AttentionShape,
        output: torch.Tensor,
    ) -> None:
        """Attend rows of one token each; query and output `[num_rows, query_size]`."""
        kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
        group_size = shape.num_heads // kv_heads
        for group in plan.decode_groups:
            num_rows = group.end - group.start
            context = self._gather(kv_cache, group.blocks)
            context = context.view(num_rows, -1, 2, kv_heads, head_dim)
            context = context[:, group.first_key : group.last_key].permute(2, 0, 3, 1, 4)
            grouped = query[group.start : group.end].view(num_rows, kv_heads, group_size, head_dim)
            mask = group.mask
            if mask is not None:
                mask = mask.expand(-1, 1, group_size, -1)
            result, _ = _flash(
                grouped, context[0], context[1], attn_mask=mask, scale=shape.scale
            )  # [num_rows, kv_heads, group_size, head_dim]
            output[group.start : group.end].view_as(grouped).copy_(result)

    def _attend_chunk(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, chunk: Chunk, shape: AttentionShape
    ) -> torch.Tensor:
        """Attend several tokens of one request, `[num_queries, query_size]`."""
        heads = qkv[chunk.start : chunk.end].view(chunk.end - chunk.start, -1, shape.head_dim)
        heads = heads.transpose(0, 1)[None]  # [1, all heads, num_queries, head_dim]
        query, own_key, own_value = heads.split(
            [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1
        )
        if chunk.blocks is None:
            result, own_sums = _flash(query, own_key, own_value, is_causal=True, scale=shape.scale)
            return result[0].transpose(0, 1).flatten(1)
        context = self._gather(kv_cache, chunk.blocks)
        context = context.view(-1, 2, shape.num_kv_heads, shape.head_dim)[: chunk.num_keys]
        key, value = context.permute(1, 2, 0, 3)[:, None]  # [1, kv_heads, num_keys, head_dim]
        mask = None if chunk.mask is None else chunk.mask[None, None]
        result, sums = _flash(query, key, value, attn_mask=mask, scale=shape.scale)
        if chunk.mask is None:
            own, own_sums = _flash(query, own_key, own_value, is_causal=True, scale=shape.scale)
            share = torch.sigmoid(sums - own_sums).unsqueeze(-1).to(own.dtype)
            result = torch.lerp(own, result, share)
        return result[0].transpose(0, 1).flatten(1)

    def _gather(self, kv_cache: torch.Tensor, blocks: torch.Tensor | slice) -> torch.Tensor:
        """Blocks side by side, `[num_blocks, elements of a block]`; often the scratch buffer."""
        flat = kv_cache.flatten(1)
        if isinstance(blocks, slice):
            return flat[blocks]
        num_bytes = len(blocks) * flat.shape[1] * flat.element_size()
        if num_bytes > len(self._scratch):
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        buffer = self._scratch[:num_bytes].view(flat.dtype).view(len(blocks), -1)
        return torch.index_select(flat, 0, blocks, out=buffer)


def make_plan(layout: BatchLayout, window: int | None) -> WindowPlan:
    """Sort a step's requests into decode groups and chunks for layers of one window."""
    query_lens = np.diff(layout.query_start_loc)
    decode = np.flatnonzero(query_lens == 1)
    lengths = _visible(layout.seq_lens[decode], window)
    limits = [len(decode)] if len(decode) else []
    if not _fits_one_group(int(lengths.max(initial=0)), int(lengths.sum()), len(lengths)):
        # Groups are runs of neighbours: rows of similar length must be neighbours.
        order = np.argsort(-lengths, kind="stable")
        decode = decode[order]
        limits = _group_limits(lengths[order])
    groups, start = [], 0
    for end in limits:
        groups.append(_decode_group(layout, decode[start:end], window, start))
        start = end
    rows = RowOrder(layout.query_start_loc[decode], int(layout.query_start_loc[-1]))
    chunks = [_chunk(layout, int(request), window) for request in np.flatnonzero(query_lens > 1)]
    return WindowPlan(rows, groups, chunks)


def _visible(seq_lens: np.ndarray, window: int | None) -> np.ndarray:
    return seq_lens if window is None else np.minimum(seq_lens, window)


def _fits_one_group(longest: int, num_tokens: int, num_rows: int) -> bool:
    """Whether padding rows of `num_tokens` in all to the longest of them wastes little."""
    padded = longest * num_rows
    most = MAX_PADDING_RATIO * num_tokens + FREE_PADDING_TOKENS * num_rows
    return num_rows <= 1 or padded <= min(most, MAX_GROUP_TOKENS)


def _group_limits(lengths: np.ndarray) -> list[int]:
    """Ends of groups of neighbours among one row or more, each group as long as it may be."""
    limits: list[int] = []
    start, longest, total = 0, 0, 0
    for index, length in enumerate(lengths.tolist()):
        longest, total = max(longest, length), total + length
        if not _fits_one_group(longest, total, index - start + 1):
            limits.append(index)
            start, longest, total = index, length, length
    return [*limits, len(lengths)]


def _decode_group(
    layout: BatchLayout, requests: np.ndarray, window: int | None, start: int
) -> DecodeGroup:
    size = layout.block_size
    seq_lens = layout.seq_lens[requests]
    first_keys = np.zeros_like(seq_lens) if window is None else np.maximum(seq_lens - window, 0)
    first_blocks = first_keys // size
    num_blocks = int((-(-seq_lens // size) - first_blocks).max())
    # Beyond a short row's end the table may hold anything: repeat the row's own first block, which
    # the mask hides, so that no request ever reads another's numbers.
    columns = first_blocks[:, None] + np.arange(num_blocks)
    inside = columns < -(-seq_lens // size)[:, None]
    columns = np.where(inside, columns, first_blocks[:, None])
    blocks = np.take_along_axis(layout.block_table[requests], columns, axis=1)
    # Only what some row sees is attended to: rows of one length need no mask at all.
    starts = first_keys - first_blocks * size
    ends = seq_lens - first_blocks * size
    first_key, last_key = int(starts.min()), int(ends.max())
    mask = None
    if (starts != first_key).any() or (ends != last_key).any():
        key = np.arange(first_key, last_key)
        visible = (key < ends[:, None]) & (key >= starts[:, None])
        mask = torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf)))
        mask = mask[:, None, None]
    index = _block_index(blocks.ravel())
    return DecodeGroup(start, start + len(requests), index, first_key, last_key, mask)


def _chunk(layout: BatchLayout, request: int, window: int | None) -> Chunk:
    start, end = (int(row) for row in layout.query_start_loc[request : request + 2])
    seq_len, num_queries = int(layout.seq_lens[request]), end - start
    num_cached = seq_len - num_queries
    reach = seq_len if window is None else window
    limited = seq_len > reach
    if num_cached == 0 and not limited:
        return Chunk(start, end, None, seq_len, None)
    merged = num_queries >= MIN_MERGE_TOKENS and not limited
    size = layout.block_size
    first_key = max(0, num_cached + 1 - reach)
    first_block = first_key // size
    last_key = num_cached if merged else seq_len
    blocks = _block_index(layout.block_table[request, first_block : -(-last_key // size)])
    num_keys = last_key - first_block * size
    mask = None
    if not merged:
        key = torch.arange(first_block * size, last_key)
        query = torch.arange(num_cached, seq_len)[:, None]
        hidden = key > query
        if limited:
            hidden |= key <= query - reach
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    return Chunk(start, end, blocks, num_keys, mask)


def _block_index(blocks: np.ndarray) -> torch.Tensor | slice:
    """An index of the cache: a slice, which copies nothing, where the blocks are neighbours."""
    first = int(blocks[0])
    if np.array_equal(blocks, np.arange(first, first + len(blocks))):
        return slice(first, first + len(blocks))
    return _tensor(blocks)


def _tensor(indices: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64))
