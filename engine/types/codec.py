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


class MessageEncoder:
    """Encodes structs whose fields may be NumPy arrays or torch CPU tensors."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._extract)
        self._frames: list[Frame] = []

    def encode(self, message: Any) -> list[Frame]:
        """The message's frames: the structure first, then one per array."""
        self._frames = frames = [b""]
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
