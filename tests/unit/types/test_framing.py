"""Messages behind their length: whatever way they come in, they come out whole."""

import msgspec
import pytest

from engine.types.framing import MAX_MESSAGE_BYTES, Frames, framed


def test_messages_come_whole_however_they_are_cut() -> None:
    messages = [{"a": "x" * 300}, [1, 2, 3], "end"]
    data = b"".join(map(framed, messages))
    for size in (1, 2, 3, 7, len(data)):
        frames = Frames()
        found = [
            msgspec.msgpack.decode(body)
            for begin in range(0, len(data), size)
            for body in frames.feed(data[begin : begin + size])
        ]
        assert found == messages
    with pytest.raises(EOFError, match="at most"):
        list(Frames().feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little")))
