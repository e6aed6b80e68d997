"""Loads the kernels and describes their C interface.

Knows ctypes and which processors will do; tensors are addresses here. The structures mirror those
of src/step.h, field for field.

The library shares PyTorch's OpenMP runtime and with it one pool of threads.
"""

import ctypes
import functools
import platform
import re
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from pathlib import Path

from engine.errors import ConfigError
from engine.log import get_logger
from engine.native.build import CPU_FEATURES, build_library, find_library

logger = get_logger(__name__)

ROW_BLOCK = 32
"""Activations have their rows padded to a multiple of this."""
PANEL_COLUMNS = 32
"""Packed weights have their columns padded to a multiple of this."""
GROUP_TOKENS = 16
"""Blocks of the cache hold a multiple of this many tokens."""
MAX_HEAD_DIM = 256
MAX_GROUP_SIZE = 192
"""Most query heads that share one KV head."""


class Shape(Structure):
    """The constants of attention."""

    _fields_ = (
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("scale", c_float),
    )


class Layer(Structure):
    """One layer's weights."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", c_void_p),
        ("output", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("qkv_bias", c_void_p),
        ("output_bias", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("window", c_int64),
    )


class Model(Structure):
    """A decoder."""

    _fields_ = (
        ("shape", Shape),
        ("eps", c_float),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("vocab", c_int64),
        ("layers", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("embedding", c_void_p),
        ("head", c_void_p),
    )


class Batch(Structure):
    """A step's requests."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_reqs", c_int64),
        ("block_size", c_int64),
        ("table_stride", c_int64),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("slots", c_void_p),
    )


class Workspace(Structure):
    """A step's memory."""

    _fields_ = (
        ("hidden", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("attended", c_void_p),
        ("gated", c_void_p),
    )


class Step(Structure):
    """All of a step but the model."""

    _fields_ = (
        ("batch", Batch),
        ("memory", Workspace),
        ("token_ids", c_void_p),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("caches", POINTER(c_void_p)),
        ("output", c_void_p),
    )


_SIGNATURES = {
    "isinglass_enable_tiles": (c_int, ()),
    "isinglass_pack": (None, (c_void_p, c_int64, c_int64, c_void_p)),
    "isinglass_forward": (None, (POINTER(Model), POINTER(Step), c_int)),
    "isinglass_multiply": (
        None,
        (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int),
    ),
    "isinglass_attend": (
        None,
        (POINTER(Shape), POINTER(Batch), c_int64, c_void_p, c_void_p, c_void_p, c_int),
    ),
}


@functools.cache
def missing_feature() -> str | None:
    """What this machine lacks to run the kernels, in words, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"they are written for Linux on x86-64, not {platform.platform()}"
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    lacking = CPU_FEATURES.keys() - (flags.group(1).split() if flags else ())
    return f"the processor lacks {', '.join(sorted(lacking))}" if lacking else None


@functools.cache
def load_library() -> ctypes.CDLL:
    """The kernels, ready to be called; built now if they are not yet and a compiler is at hand.

    PyTorch must have been imported.

    Raises:
        ConfigError: the processor will not do, or there is neither a library nor a compiler.
    """
    reason = missing_feature()
    if reason is not None:
        raise ConfigError(reason)
    path = find_library() or build_library()
    try:
        ctypes.CDLL(_openmp_path(), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be loaded: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.isinglass_enable_tiles() != 0:
        raise ConfigError("the kernel of this system does not grant the matrix unit's registers")
    return library


def _openmp_path() -> str:
    """The OpenMP runtime that this process has loaded: PyTorch's.

    Other packages bring runtimes of their own; PyTorch's is the one in its folders.
    """
    # Columns of proc_pid_maps(5); the path is the sixth and may hold spaces.
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    paths = {path for path in mapped if re.match(r"lib(g|i)?omp\S*\.so", Path(path).name)}
    ours = sorted(path for path in paths if "/torch" in path) or sorted(paths)
    if not ours:
        raise ConfigError("PyTorch has brought no OpenMP runtime that threads could come from")
    return ours[0]
