"""What to compute on and in: settings to a device and a number type of PyTorch.

Knows which of both this machine has. Does not know the model.
"""

import torch

from engine.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """The device that a setting names.

    Raises:
        ConfigError: an unknown name, or a device that this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N; got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N; got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} is not here ({torch.cuda.device_count()} CUDA devices). "
            "Use device='cpu' or 'auto'."
        )
    return device


def resolve_dtype(setting: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """The number type to compute in: the setting, or the checkpoint's own where that is fast."""
    name = checkpoint_dtype if setting == "auto" else setting
    names = {"half": "float16", "float": "float32"}
    dtype = getattr(torch, names.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype {name!r} is not known; use float32, bfloat16 or float16")
    if setting == "auto" and device.type == "cpu" and dtype is torch.float16:
        return torch.bfloat16
    return dtype
