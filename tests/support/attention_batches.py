"""Random batches over a paged cache, and a backend's answer to them against the reference's.

Knows layouts and the attention interface. Does not know requests or models.
"""

import numpy as np
import torch

from engine.attention.base import AttentionBackend, AttentionShape, BatchLayout
from engine.attention.registry import select_backend

CPU = torch.device("cpu")
NUM_SPARE_BLOCKS = 5
GARBAGE = 77.0
"""What a request's own blocks hold before it writes them: an earlier owner's numbers, say."""


def make_layout(
    query_lens: list[int], seq_lens: list[int], block_size: int, generator: np.random.Generator
) -> tuple[BatchLayout, int]:
    """A batch whose requests own shuffled blocks; unused table entries point nowhere."""
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(counts) + NUM_SPARE_BLOCKS
    free = generator.permutation(num_blocks).tolist()
    table = np.full((len(seq_lens), max(counts) + 1), 10**6, np.int32)
    for row, count in enumerate(counts):
        table[row, :count] = [free.pop() for _ in range(count)]
    lengths, ends = np.array(query_lens), np.array(seq_lens)
    whole = BatchLayout(np.zeros(1), ends, table, np.zeros(0), block_size)
    layout = part_of(whole, lengths, starts=ends - lengths)
    assert layout is not None
    return layout, num_blocks


def part_of(layout: BatchLayout, lengths: np.ndarray, *, starts: np.ndarray) -> BatchLayout | None:
    """A step of the same requests that computes `lengths` tokens each from `starts` on."""
    rows = np.flatnonzero(lengths)
    if len(rows) == 0:
        return None
    size, slots = layout.block_size, []
    for row in rows:
        tokens = np.arange(starts[row], starts[row] + lengths[row])
        slots.append(layout.block_table[row][tokens // size].astype(np.int64) * size)
        slots[-1] += tokens % size
    return BatchLayout(
        query_start_loc=np.cumsum([0, *lengths[rows]]).astype(np.int32),
        seq_lens=(starts + lengths)[rows].astype(np.int32),
        block_table=layout.block_table[rows],
        slot_mapping=np.concatenate(slots),
        block_size=size,
    )


def assert_equals_reference(
    name: str,
    layout: BatchLayout,
    num_blocks: int,
    shape: AttentionShape,
    dtype: torch.dtype,
    *,
    seed: int,
    spread: float = 1.0,
) -> None:
    """Two steps, the context and then the batch: same outputs, same cache afterwards.

    Blocks that no request owns hold NaN: they must not be read, not even under a mask.

    Args:
        name: the backend's.
        spread: factor of the queries, and so of the scores.
    """
    generator = torch.Generator().manual_seed(seed)
    backends = [select_backend(each, CPU) for each in (name, "torch_reference")]
    caches = [_poisoned_cache(backend, layout, num_blocks, shape, dtype) for backend in backends]
    num_cached = layout.seq_lens - np.diff(layout.query_start_loc)
    for step in (part_of(layout, num_cached, starts=np.zeros_like(num_cached)), layout):
        if step is None:
            continue
        num_tokens = len(step.slot_mapping)
        qkv = torch.randn(num_tokens, shape.query_size + 2 * shape.kv_size, generator=generator)
        qkv[:, : shape.query_size] *= spread
        qkv = qkv.to(dtype)
        given = qkv.clone()
        result, expected = (
            backend.forward(qkv, cache, backend.build_metadata(step, CPU), shape)
            for backend, cache in zip(backends, caches, strict=True)
        )
        assert torch.equal(qkv, given), "the backend must leave its input as it is"
        assert result.shape == expected.shape == (num_tokens, shape.query_size)
        assert result.is_contiguous()
        assert result.dtype == dtype
        # bfloat16 keeps 8 bits: outputs of size 1 to 3 differ by up to a unit or two in the last.
        tolerance = 2e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    if name != "native":  # whose cache has an order of its own
        ours, theirs = (cache.flatten() for cache in caches)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def _poisoned_cache(
    backend: AttentionBackend,
    layout: BatchLayout,
    num_blocks: int,
    shape: AttentionShape,
    dtype: torch.dtype,
) -> torch.Tensor:
    size = backend.kv_cache_shape(num_blocks, layout.block_size, shape.num_kv_heads, shape.head_dim)
    cache = torch.full(size, float("nan"), dtype=dtype)
    if backend.name != "native":  # others read the unused end of a block, and mask it
        for row, length in enumerate(layout.seq_lens):
            cache[layout.block_table[row, : -(-length // layout.block_size)].tolist()] = GARBAGE
    return cache
