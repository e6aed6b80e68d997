"""Activations of gated MLPs."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from engine.errors import UnsupportedModelError

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The elementwise function of that Transformers name.

    Raises:
        UnsupportedModelError: an unknown name, with the known ones.
    """
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]
