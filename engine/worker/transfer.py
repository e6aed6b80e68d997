"""From NumPy arrays on the host to tensors on the device."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor of the same shape and type; on a CPU it shares a contiguous array."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
