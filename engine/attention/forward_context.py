"""The one ambient object: what attention layers need and models do not pass along.

Knows the step's attention metadata and the layers' caches. Set by the model runner around a
model's forward, read by `engine.attention.layer.Attention`, and by nothing else. Each thread has
its own, since two engines in one process run their models in threads of their own.
"""

import threading
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


class _Ambient(threading.local):
    current: ForwardContext | None = None


_AMBIENT = _Ambient()


@contextmanager
def forward_context(metadata: Any, kv_caches: list[torch.Tensor]) -> Iterator[None]:
    """Make the step's metadata and caches visible to the attention layers inside the block."""
    assert _AMBIENT.current is None, (
        "forward_context does not nest: a model runs one batch at a time"
    )
    _AMBIENT.current = ForwardContext(metadata, kv_caches)
    try:
        yield
    finally:
        _AMBIENT.current = None


def get_forward_context() -> ForwardContext:
    """The context of the forward that is running."""
    context = _AMBIENT.current
    assert context is not None, "attention ran outside of forward_context"
    return context
