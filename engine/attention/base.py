"""The attention interface: one flat batch in, one flat batch out, keys and values in pages.

Knows the batch's layout and what a backend must offer. Does not know schedulers, requests or
models. Every backend is tested against `engine.attention.torch_reference`.

A flat batch of three requests (a prompt's chunk, two rows in generation):

    tokens           | r0 r0 r0 r0 r0 | r1 | r2 |
    query_start_loc    0                5    6    7
    seq_lens           [5 + cached,     n1,  n2]      context, these tokens included
    slot_mapping       token -> block * block_size + offset, where its key and value are written
    block_table        request -> its blocks, in the order of its tokens

Paged attention: https://arxiv.org/abs/2309.06180
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch


@dataclass(slots=True)
class BatchLayout:
    """Where each request's tokens lie in the flat batch and in the cache; numpy, on the host."""

    query_start_loc: np.ndarray  # [num_reqs + 1] int32
    seq_lens: np.ndarray  # [num_reqs] int32
    block_table: np.ndarray  # [num_reqs, max_blocks] int32
    slot_mapping: np.ndarray  # [num_tokens] int64
    block_size: int

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.seq_lens)


class AttentionShape(NamedTuple):
    """The constants of one layer's attention.

    `window` is the number of tokens that a token sees, itself included; None: all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None

    @property
    def query_size(self) -> int:
        """Elements of one token's query."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's key (or value)."""
        return self.num_kv_heads * self.head_dim


class AttentionBackend(ABC):
    """Writes keys and values into the paged cache and attends over it.

    A backend keeps nothing of a step: what the step needs is in the metadata, which is built once
    and serves all layers.
    """

    name: str

    @abstractmethod
    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Shape of one layer's cache tensor; its first dimension counts blocks.

        A new cache must be zeroed, unless the backend says otherwise: the unused end of a block is
        read and then masked, which NaN would survive.
        """

    @abstractmethod
    def build_metadata(self, layout: BatchLayout, device: torch.device) -> Any:
        """Turn a step's layout into what `forward` needs, on the device."""

    @abstractmethod
    def forward(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, shape: AttentionShape
    ) -> torch.Tensor:
        """Write the step's keys and values, then attend causally over each request's context.

        Args:
            qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, the query, key and
                value of a token side by side; contiguous, rotary positions already applied.
            kv_cache: this layer's cache, of `kv_cache_shape`, in qkv's dtype.
            metadata: from `build_metadata` of the same backend.
            shape: the layer's constants.

        Returns:
            `[num_tokens, num_heads * head_dim]`, contiguous.
        """
