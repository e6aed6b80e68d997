"""Attention backends by name, imported only when chosen."""

import importlib

import torch

from engine.attention.base import AttentionBackend
from engine.errors import ConfigError

_BACKENDS = {
    "cpu": ("engine.attention.cpu", "CPUAttentionBackend"),
    "native": ("engine.attention.native", "NativeAttentionBackend"),
    "torch_reference": ("engine.attention.torch_reference", "TorchReferenceBackend"),
}
# What "auto" means on a device; a device that is not named here gets the reference.
_AUTO = {"cpu": "cpu"}


def attention_backend_names() -> tuple[str, ...]:
    """The names that `select_backend` knows, besides "auto"."""
    return tuple(_BACKENDS)


def select_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """Make the backend of that name; "auto" picks the fastest for the device.

    Raises:
        ConfigError: an unknown name, or a backend that does not run on the device.
    """
    device_type = torch.device(device).type
    if name == "auto":
        name = _AUTO.get(device_type, "torch_reference")
    if name not in _BACKENDS:
        raise ConfigError(
            f"attention_backend must be one of auto, {', '.join(_BACKENDS)}; got {name!r}"
        )
    if name in ("cpu", "native") and device_type != "cpu":
        raise ConfigError(
            f"attention_backend {name!r} does not run on {device_type}. Use 'auto', or "
            "device='cpu'."
        )
    module, class_name = _BACKENDS[name]
    return getattr(importlib.import_module(module), class_name)()
