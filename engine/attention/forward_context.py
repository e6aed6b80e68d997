"""The one ambient object: what attention layers need and models do not pass along.

Knows the step's attention metadata and the layers' caches. Set by the model runner around a
model's forward, read by `engine.attention.layer.Attention`, and by nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Metadata of the step, and one cache tensor per attention layer in layer order."""

    metadata: Any
    kv_caches: list[torch.Tensor]


_current: ForwardContext | None = None


@contextmanager
def forward_context(metadata: Any, kv_caches: list[torch.Tensor]) -> Iterator[None]:
    """Make the step's metadata and caches visible to the attention layers inside the block."""
    global _current
    assert _current is None, "forward_context does not nest: a model runs one batch at a time"
    _current = ForwardContext(metadata, kv_caches)
    try:
        yield
    finally:
        _current = None


def get_forward_context() -> ForwardContext:
    """The context of the forward that is running."""
    assert _current is not None, "attention ran outside of forward_context"
    return _current
