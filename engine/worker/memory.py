"""How much memory the device has, and how much of it a forward pass takes.

On a CPU "available" is what the kernel would give without swapping, within the control group's
limit; the peak of a forward pass is read off the process's resident-set high-water mark.
Knows processes, devices and tensors; knows no KV cache and no batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from engine.errors import ConfigError
from engine.log import get_logger

logger = get_logger(__name__)

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _meminfo("MemAvailable")
    limit, used = _read_int(_CGROUP / "memory.max"), _read_int(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def total_bytes(device: torch.device) -> int:
    """All memory of the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return _meminfo("MemTotal")


def used_bytes(device: torch.device) -> int:
    """Memory in use: resident in this process on a CPU, by anybody on a GPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return _status("VmRSS")


def model_bytes(model: nn.Module) -> int:
    """Memory that a model's tensors take: parameters, buffers and attributes, each once.

    Tensors that share memory (tied or fused weights) count as the memory that they share; packed
    ones, which have no storage that PyTorch could see, by what oneDNN says of them.
    """
    sizes: dict[int, int] = {}
    for tensor in _tensors(model):
        if tensor.is_mkldnn:
            # The opaque handle is the memory's only owner, so it stands for it.
            sizes[id(tensor)] = torch.ops.mkldnn._nbytes(tensor)
        else:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@contextmanager
def allocating(*settings: str) -> Iterator[None]:
    """Let what does not fit into memory be an error that names the settings to lower.

    Args:
        settings: each as "name=value".

    Raises:
        ConfigError: an allocation in the block fails.
    """
    try:
        yield
    except (MemoryError, RuntimeError, ValueError, OverflowError) as error:
        # PyTorch has no class of its own for it on a CPU; NumPy's for sizes beyond any machine is
        # ValueError.
        text = str(error)
        out_of_memory = isinstance(error, MemoryError | OverflowError | torch.OutOfMemoryError)
        if not (out_of_memory or "allocate memory" in text or "dimension" in text):
            raise
        raise ConfigError(
            f"there is not enough memory for {' and '.join(settings)}: {text}. Lower "
            f"{'it' if len(settings) == 1 else 'one of them'}."
        ) from error


class PeakMemory:
    """Measures the most memory held between `with` entry and exit, above what was held before.

    `used_before_bytes` (see `used_bytes`) is valid from entry on, `peak_bytes` after the block.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        self.used_before_bytes = 0
        self._before = 0

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
            except OSError as error:
                # Some sandboxes forbid it. The mark then is the highest since the process began,
                # loading the weights included: the peak comes out too high rather than too low.
                logger.debug("the memory high-water mark cannot be reset: %s", error)
            self._before = _status("VmRSS")
        self.used_before_bytes = used_bytes(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = _status("VmHWM")
        self.peak_bytes = max(0, peak - self._before)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        yield from (v for v in vars(module).values() if isinstance(v, torch.Tensor))


def _meminfo(key: str) -> int:
    return _kilobytes(Path("/proc/meminfo"), key)


def _status(key: str) -> int:
    return _kilobytes(Path("/proc/self/status"), key)


def _kilobytes(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{path} has no {key}")


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
