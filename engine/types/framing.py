"""Messages as they go through a pipe or a local socket: MessagePack behind its length.

    [length, 4 bytes, little-endian][message]

Knows no message and no transport.
"""

import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec

MAX_MESSAGE_BYTES: Final = 64 << 20
"""No message is that long; a length that is belongs to none."""
_LENGTH: Final = struct.Struct("<I")
HEAD_BYTES: Final = _LENGTH.size


def framed(message: Any) -> bytes:
    """A message behind its length.

    Raises:
        TypeError: it cannot be encoded.
        ValueError: it is longer than may be.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES} may be sent")
    return _LENGTH.pack(len(body)) + body


def body_length(head: bytes | bytearray) -> int:
    """Length of the message behind these first bytes.

    Raises:
        EOFError: no message is that long, so nothing behind it can be read.
    """
    (length,) = _LENGTH.unpack_from(head)
    if length > MAX_MESSAGE_BYTES:
        raise EOFError(f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} may come")
    return int(length)


class Frames:
    """Cuts what comes out of a pipe into the messages that `framed` has made."""

    __slots__ = ("_received",)

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take in what has come; yields messages that are whole now, still encoded.

        Raises:
            EOFError: see `body_length`.
        """
        self._received += data
        while len(self._received) >= HEAD_BYTES:
            end = HEAD_BYTES + body_length(self._received)
            if len(self._received) < end:
                return
            body = bytes(self._received[HEAD_BYTES:end])
            del self._received[:end]
            yield body
