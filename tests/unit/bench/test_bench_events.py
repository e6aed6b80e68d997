"""Event streams: the same events come out wherever the bytes are cut."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.bench import events
from engine.bench.events import EventFormatError, EventParser, ServerEvent

STREAM = (
    ": a comment\n"
    'data: {"text":"héé\\n"}\n'
    "\n"
    "event: error\n"
    "data:no space\n"
    "data:  two spaces\n"
    "id: 7\n"
    "\n"
    "\n"
    "event: without data\n"
    "\n"
    "data\n"
    "\n"
    "data: [DONE]\n"
    "\n"
)
EVENTS = [
    ServerEvent("", '{"text":"héé\\n"}'.encode()),
    ServerEvent("error", b"no space\n two spaces"),
    ServerEvent("", b""),
    ServerEvent("", b"[DONE]"),
]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_the_same_events_come_out_wherever_the_stream_is_cut(
    line_end: str, cuts: list[int]
) -> None:
    data = STREAM.replace("\n", line_end).encode()
    borders = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    parser = EventParser()
    found = [
        event
        for begin, end in itertools.pairwise(borders)
        for event in parser.feed(data[begin:end])
    ]
    assert found == EVENTS
    assert not parser.pending


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_one_byte_at_a_time_changes_nothing(line_end: str) -> None:
    data = STREAM.replace("\n", line_end).encode()
    parser = EventParser()
    found = [event for byte in data for event in parser.feed(bytes([byte]))]
    assert found == EVENTS


def test_mixed_line_ends_are_told_apart() -> None:
    parser = EventParser()
    assert parser.feed(b"data: 1\r") == []
    assert parser.feed(b"\ndata: 2\r\n\r") == [ServerEvent("", b"1\n2")]
    # The LF belongs to the CR before it and ends no event of its own.
    assert parser.feed(b"\n") == []
    assert parser.feed(b"data: 3\n\rdata: 4\r\r") == [
        ServerEvent("", b"3"),
        ServerEvent("", b"4"),
    ]


def test_an_event_without_its_empty_line_is_pending_and_not_given_out() -> None:
    parser = EventParser()
    assert parser.feed(b"data: half") == []
    assert parser.pending
    assert parser.feed(b"\n") == []
    assert parser.pending
    assert parser.feed(b"\n") == [ServerEvent("", b"half")]
    assert not parser.pending


def test_a_line_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MAX_LINE_BYTES", 1000)
    parser = EventParser()
    parser.feed(b"data: " + b"x" * 900)
    with pytest.raises(EventFormatError, match="exceeds 1000 bytes"):
        parser.feed(b"x" * 200)


@pytest.mark.parametrize("seed", range(5))
def test_random_data_survives_the_way(seed: int) -> None:
    generator = random.Random(seed)
    payloads = [
        generator.randbytes(generator.randrange(1, 300)).replace(b"\n", b"").replace(b"\r", b"")
        or b"x"
        for _ in range(50)
    ]
    data = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
    parser = EventParser()
    found = []
    while data:
        size = generator.randrange(1, 400)
        found += parser.feed(data[:size])
        data = data[size:]
    assert [event.data for event in found] == payloads
