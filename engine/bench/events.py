"""Server-sent events out of bytes, wherever the borders between reads lie.

Knows the event stream format of the HTML standard (section 9.2). Does not know what events mean.
"""

from dataclasses import dataclass

_MAX_LINE_BYTES = 16 << 20


class EventFormatError(ValueError):
    """What arrives is no stream of events: a line without an end."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event: the name of its `event` field ("" without one) and its data lines, joined."""

    name: str
    data: bytes


class EventParser:
    """Feed it what a socket brings, in pieces of any size; it returns the events that are whole.

    Lines end with LF, CR LF or CR, each also cut in the middle. Comments and unknown fields are
    skipped, several `data` lines of an event are joined by LF, events without data are none.
    """

    __slots__ = ("_data", "_drop_line_feed", "_name", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._name = ""
        self._drop_line_feed = False

    @property
    def pending(self) -> bool:
        """Whether an event has begun and not ended: what a broken connection leaves behind."""
        return bool(self._rest or self._data)

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """The events that end within this chunk.

        Raises:
            EventFormatError: a line is longer than 16 MiB.
        """
        if not chunk:
            return []
        if self._drop_line_feed and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the other half of a CR LF whose CR has ended a line already
        self._drop_line_feed = chunk.endswith(b"\r")
        text = self._rest + chunk
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = text.split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            raise EventFormatError(f"a line of the event stream exceeds {_MAX_LINE_BYTES} bytes")
        events = []
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                events.append(ServerEvent(self._name, b"\n".join(self._data)))
                self._data = []
                self._name = ""
            else:
                self._name = ""
        return events

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
        elif field == b"event":
            self._name = value.removeprefix(b" ").decode(errors="replace")
