"""GGUF files: metadata and tensor table, parsed straight from a memory map.

Knows the byte layout of GGUF versions 2 and 3 (little endian) and the block sizes of the ggml
number types. Does not know what a metadata key or a tensor means, nor how to dequantise.

The `gguf` package's GGUFReader takes about 4 s for a vocabulary of 49k entries because it makes
numpy views of every string; this reader makes plain Python values in well under 0.1 s.

Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import CheckpointError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT_BYTES = 32
MAX_ARRAY_DEPTH = 4


class GGMLType(NamedTuple):
    """A ggml number type: a block of `block_size` elements takes `block_bytes`."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
}

_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies in the file and how it is encoded."""

    name: str
    shape: tuple[int, ...]
    """Row-major, as PyTorch counts: the reverse of the order in the file."""
    type: GGMLType
    type_id: int
    offset_bytes: int
    """From the beginning of the file."""
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


class GGUFFile:
    """A parsed GGUF file.

    Attributes:
        path: the file.
        version: 2 or 3.
        metadata: key to bool, int, float, str, or a list of one of them.
        tensors: tensor name to `GGUFTensor`, in file order.

    Raises:
        CheckpointError: the file is missing, is not GGUF, is of an unknown version or type, or
            ends before the last tensor.
    """

    __slots__ = ("_map", "metadata", "path", "tensors", "version")

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
            raise CheckpointError(f"cannot read GGUF file {self.path}: {error}") from error
        cursor = _Cursor(self._map, self.path)
        magic = cursor.take(4)
        if magic != MAGIC:
            raise CheckpointError(
                f"{self.path} is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}"
            )
        self.version = cursor.scalar(_U32)
        if self.version not in SUPPORTED_VERSIONS:
            raise CheckpointError(
                f"{self.path} is GGUF version {self.version}; versions 2 and 3, little endian, "
                "can be read. Convert the file again with a current llama.cpp."
            )
        num_tensors, num_pairs = cursor.scalar(_U64), cursor.scalar(_U64)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar(_U32), 0)
        self.tensors = self._read_tensors(cursor, num_tensors)

    def _read_tensors(self, cursor: "_Cursor", num_tensors: int) -> dict[str, GGUFTensor]:
        entries = []
        for _ in range(num_tensors):
            name = cursor.string()
            num_dims = cursor.scalar(_U32)
            shape = tuple(reversed([cursor.scalar(_U64) for _ in range(num_dims)]))
            entries.append((name, shape, cursor.scalar(_U32), cursor.scalar(_U64)))
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
        if not isinstance(alignment, int) or alignment <= 0:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}")
        data_start = -(-cursor.position // alignment) * alignment
        tensors = {}
        for name, shape, type_id, offset in entries:
            tensors[name] = self._locate(name, shape, type_id, data_start + offset)
        return tensors

    def _locate(
        self, name: str, shape: tuple[int, ...], type_id: int, offset_bytes: int
    ) -> GGUFTensor:
        kind = GGML_TYPES.get(type_id)
        if kind is None:
            known = ", ".join(known.name for known in GGML_TYPES.values())
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has the unknown ggml type {type_id}; known: {known}"
            )
        row = shape[-1] if shape else 1
        if row % kind.block_size:
            raise CheckpointError(
                f"{self.path}: rows of tensor {name!r} have {row} elements, not a multiple of "
                f"the {kind.block_size} in a {kind.name} block"
            )
        num_bytes = math.prod(shape) // kind.block_size * kind.block_bytes
        if offset_bytes + num_bytes > len(self._map):
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name!r} ends at byte "
                f"{offset_bytes + num_bytes}, the file at {len(self._map)}. Download it again."
            )
        return GGUFTensor(name, shape, kind, type_id, offset_bytes, num_bytes)

    def data(self, name: str) -> memoryview:
        """The encoded bytes of one tensor: a read-only view of the file, no copy."""
        tensor = self.tensors[name]
        return memoryview(self._map)[tensor.offset_bytes :][: tensor.num_bytes]


class _Cursor:
    """Reads values one after the other from the map and knows where it is."""

    __slots__ = ("_map", "_path", "_size", "position")

    def __init__(self, source: mmap.mmap, path: Path) -> None:
        self._map = source
        self._path = path
        self._size = len(source)
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > self._size:
            raise self._truncated()
        piece = self._map[self.position : end]
        self.position = end
        return piece

    def scalar(self, layout: struct.Struct) -> Any:
        return layout.unpack(self.take(layout.size))[0]

    def string(self) -> str:
        return self.take(self.scalar(_U64)).decode("utf-8", "replace")

    def value(self, type_id: int, depth: int) -> Any:
        layout = _SCALARS.get(type_id)
        if layout is not None:
            return self.scalar(layout)
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY and depth < MAX_ARRAY_DEPTH:
            return self._array(depth)
        raise CheckpointError(f"{self._path}: unknown GGUF metadata type {type_id}")

    def _array(self, depth: int) -> list[Any]:
        type_id, length = self.scalar(_U32), self.scalar(_U64)
        layout = _SCALARS.get(type_id)
        if layout is not None:
            piece = self.take(length * layout.size)
            return list(struct.unpack(f"<{length}{layout.format[1:]}", piece))
        if type_id == _STRING:
            return self._strings(length)
        return [self.value(type_id, depth + 1) for _ in range(length)]

    def _strings(self, length: int) -> list[str]:
        # The hot loop of the whole file: a vocabulary and its merges are 100k strings, so the
        # names are local and a string costs two slices and no method of our own.
        source, position, size = self._map, self.position, self._size
        read_length: Callable[..., tuple[int]] = _U64.unpack_from
        result: list[str] = []
        append = result.append
        try:
            for _ in range(length):
                start = position + 8
                position = start + read_length(source, position)[0]
                if position > size:
                    raise self._truncated()
                append(source[start:position].decode("utf-8", "replace"))
        except struct.error:
            raise self._truncated() from None
        self.position = position
        return result

    def _truncated(self) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is truncated: its header does not end within the file's "
            f"{self._size} bytes. Download it again."
        )
