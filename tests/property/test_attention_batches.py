"""Every attention backend gives each row of any batch what the reference gives it.

Guards against rows that read or answer for their neighbours: a backend that computes rows in an
order of its own and returns them in another is caught by nearly every batch of several lengths.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import AttentionShape
from engine.attention.registry import attention_backend_names
from tests.support.attention_batches import assert_equals_reference, make_layout
from tests.support.native_support import REASON

MAX_LENGTH = 600
MAX_CHUNK = 64


@dataclass(frozen=True)
class Batch:
    """What is drawn of a batch; the numbers in it are random besides."""

    query_lens: list[int]
    seq_lens: list[int]
    shape: AttentionShape
    block_size: int
    seed: int


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """1 to 32 requests: one new token each, or chunks, or a mix; contexts of 1 to 600 tokens."""
    longest = draw(st.sampled_from([8, 70, 250, MAX_LENGTH]))
    lengths = st.integers(1, longest)
    # Few lengths repeated are as usual as all different ones: many requests of one prompt.
    if draw(st.booleans()):
        lengths = st.sampled_from(draw(st.lists(lengths, min_size=1, max_size=3)))
    seq_lens = draw(st.lists(lengths, min_size=1, max_size=32))
    share_of_chunks = draw(st.sampled_from([0, 0, 1, 3]))  # of 3
    query_lens = [
        draw(st.integers(1, min(length, MAX_CHUNK)))
        if share_of_chunks and draw(st.integers(1, 3)) <= share_of_chunks
        else 1
        for length in seq_lens
    ]
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 7]))
    window = draw(st.none() | st.integers(1, MAX_LENGTH))
    return Batch(
        query_lens,
        seq_lens,
        AttentionShape(num_kv_heads * group, num_kv_heads, 32, 0.2, window),
        draw(st.sampled_from([16, 32])),
        draw(st.integers(0, 2**32 - 1)),
    )


def backends() -> list:
    """Every backend that can be had on a CPU, with each dtype that it takes."""
    params = []
    for name in attention_backend_names():
        if name == "torch_reference":
            continue
        dtypes = (torch.bfloat16,) if name == "native" else (torch.float32, torch.bfloat16)
        marks = [pytest.mark.skipif(bool(REASON), reason=REASON)] if name == "native" else []
        params += [
            pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}", marks=marks)
            for dtype in dtypes
        ]
    return params


@pytest.mark.parametrize(("name", "dtype"), backends())
@settings(max_examples=100, deadline=None)
@given(batch=batches())
def test_equals_the_reference(name: str, dtype: torch.dtype, batch: Batch) -> None:
    generator = np.random.default_rng(batch.seed)
    layout, num_blocks = make_layout(batch.query_lens, batch.seq_lens, batch.block_size, generator)
    assert_equals_reference(name, layout, num_blocks, batch.shape, dtype, seed=batch.seed)
