"""Messages to frames and back: msgspec for the structure, raw frames for arrays and tensors.

An array or tensor inside a message becomes (kind, dtype, shape, frame number); its bytes travel
as a frame of their own and are never copied by the encoder. Nothing is ever pickled.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

Frame = bytes | bytearray | memoryview

_HEAD_BYTES = 1 << 16
"""As much of a broken message is looked at to find out what it is about."""


class MessageEncoder:
    """Encodes structs whose fields may be NumPy arrays or torch CPU tensors."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._extract)
        self._frames: list[Frame] = []

    def encode(self, message: Any) -> list[Frame]:
        """The message's frames: the structure first, then one per array."""
        frames: list[Frame] = [b""]
        self._frames = frames
        frames[0] = self._encoder.encode(message)
        self._frames = []
        return frames

    def _extract(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._put("numpy", value)
        if isinstance(value, np.integer | np.floating):
            return value.item()
        # Only a process that has torch can hold a tensor, so it is not imported for the check.
        if type(value).__module__ == "torch" and hasattr(value, "numpy"):
            return self._put_tensor(value)
        raise TypeError(f"{type(value).__name__} cannot cross the process boundary")

    def _put(self, kind: str, array: np.ndarray, dtype: str | None = None) -> list[Any]:
        shape = list(array.shape)  # ascontiguousarray would give a scalar one dimension
        array = np.ascontiguousarray(array)
        self._frames.append(array.reshape(-1).view(np.uint8).data if array.size else b"")
        return [kind, dtype or array.dtype.str, shape, len(self._frames) - 1]

    def _put_tensor(self, tensor: Any) -> list[Any]:
        import torch

        name = str(tensor.dtype).removeprefix("torch.")
        tensor = tensor.detach().cpu().contiguous()
        encoded = self._put("torch", tensor.reshape(-1).view(torch.uint8).numpy(), name)
        encoded[2] = list(tensor.shape)
        return encoded


def leading_item(frame: Frame) -> str | int | None:
    """The first item of an encoded array, even if what follows cannot be decoded.

    That is who a message is from or about. None unless it is text or a natural number (MessagePack
    specification, "Formats").
    """
    data = bytes(memoryview(frame)[:_HEAD_BYTES])
    first = data[:1]
    offset = {b"\xdc": 3, b"\xdd": 5}.get(first, 1)  # array of 16 or 32 bits of length
    if offset == 1 and not b"\x90" <= first <= b"\x9f":
        return None
    item = data[offset:]
    head = item[:1]
    if head and head <= b"\x7f":
        return item[0]
    widths = {b"\xcc": 1, b"\xcd": 2, b"\xce": 4, b"\xcf": 8, b"\xd9": 1, b"\xda": 2, b"\xdb": 4}
    width = widths.get(head, 0)
    number = int.from_bytes(item[1 : 1 + width], "big")
    if b"\xa0" <= head <= b"\xbf":
        number = item[0] & 0x1F
    elif not width or len(item) <= width:
        return None
    elif head < b"\xd9":
        return number
    text = item[1 + width : 1 + width + number]
    try:
        return text.decode() if len(text) == number else None
    except UnicodeDecodeError:
        return None


class MessageDecoder(Generic[T]):
    """Decodes frames into one type; arrays are views of the received frames (read-only)."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=self._insert)
        self._frames: Sequence[Frame] = ()

    def decode(self, frames: Sequence[Frame]) -> T:
        """Rebuild the message.

        Raises:
            msgspec.DecodeError: the frames are not such a message.
        """
        if not frames:
            raise msgspec.DecodeError("a message without frames")
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        finally:
            self._frames = ()

    def _insert(self, kind: type, value: Any) -> Any:
        try:
            tag, dtype, shape, number = value
            if number < 1:
                raise IndexError(f"frame {number} holds no array")
            data = self._frames[number]
            if tag == "numpy":
                return np.frombuffer(data, dtype=dtype).reshape(shape)
            if tag == "torch":
                return _tensor(data, dtype, shape)
        except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            raise msgspec.ValidationError(f"{value!r} stands for no array: {error}") from error
        raise msgspec.ValidationError(f"unknown array kind {tag!r} for {kind.__name__}")


def _tensor(data: Frame, dtype: str, shape: list[int]) -> Any:
    import torch

    element = getattr(torch, dtype)
    if not len(data):
        return torch.empty(0, dtype=element).reshape(shape)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(element).reshape(shape)
