"""A Perfetto file, parsed back as the trace processor does; every rule of the format asserted."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

BEGIN, END, INSTANT, COUNTER = (
    proto.TrackEvent.TYPE_SLICE_BEGIN,
    proto.TrackEvent.TYPE_SLICE_END,
    proto.TrackEvent.TYPE_INSTANT,
    proto.TrackEvent.TYPE_COUNTER,
)


@dataclass
class Drawn:
    """A slice as the trace processor would show it."""

    track: int
    name: str
    begin_ns: int
    depth: int
    arguments: dict[str, Any]
    flows: list[int]
    ending_flows: list[int]
    end_ns: int = -1


@dataclass
class Loaded:
    """A trace file, resolved."""

    tracks: dict[int, Any] = field(default_factory=dict)
    slices: list[Drawn] = field(default_factory=list)
    instants: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    counters: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    sequences: set[int] = field(default_factory=set)

    def track_name(self, uuid: int) -> str:
        descriptor = self.tracks[uuid]
        return descriptor.name or descriptor.thread.thread_name or descriptor.process.process_name

    def named(self, *names: str) -> list[Drawn]:
        return [piece for piece in self.slices if piece.name in names]


def arguments_of(event: Any) -> dict[str, Any]:
    return {one.name: getattr(one, one.WhichOneof("value")) for one in event.debug_annotations}


def load(data: bytes) -> Loaded:
    """Read a trace as the trace processor does, asserting each rule."""
    trace = proto.Trace()
    trace.ParseFromString(data)
    snapshot = trace.packet[0].clock_snapshot
    assert snapshot.primary_trace_clock == 3
    assert {clock.clock_id for clock in snapshot.clocks} == {1, 3, 6}
    assert all(clock.timestamp > 0 for clock in snapshot.clocks)

    loaded = Loaded()
    names: dict[int, dict[int, str]] = {}
    events = []
    for packet in trace.packet:
        sequence = packet.trusted_packet_sequence_id
        assert sequence > 0
        if sequence not in names:
            assert packet.sequence_flags == 1, "the first packet of a sequence clears its state"
            names[sequence] = {}
        else:
            assert packet.sequence_flags == 2, "later packets need the state"
        for entry in packet.interned_data.event_names:
            assert entry.iid not in names[sequence]
            assert entry.iid > 0
            assert entry.name not in names[sequence].values(), "interned once"
            names[sequence][entry.iid] = entry.name
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            assert descriptor.uuid
            assert descriptor.uuid not in loaded.tracks
            assert not descriptor.parent_uuid or descriptor.parent_uuid in loaded.tracks
            loaded.tracks[descriptor.uuid] = descriptor
        if packet.HasField("track_event"):
            assert packet.timestamp_clock_id == 3
            assert packet.timestamp > 0
            event = packet.track_event
            assert event.track_uuid in loaded.tracks, "described before it is used"
            has_name = event.type in (BEGIN, INSTANT)
            assert bool(event.name_iid) == has_name
            assert not event.name
            name = names[sequence][event.name_iid] if has_name else ""
            events.append((packet.timestamp, name, event))
    loaded.sequences = set(names)
    check_tracks(loaded)
    replay(loaded, events)
    return loaded


def check_tracks(loaded: Loaded) -> None:
    descriptors = loaded.tracks.values()
    pids = [one.process.pid for one in descriptors if one.HasField("process")]
    tids = [(one.thread.pid, one.thread.tid) for one in descriptors if one.HasField("thread")]
    assert len(set(pids)) == len(pids)
    assert len(set(tids)) == len(tids)
    assert {pid for pid, _ in tids} <= set(pids)
    for one in descriptors:
        assert bool(one.parent_uuid) != one.HasField("process"), "all but processes have a parent"
        if one.HasField("counter"):
            assert one.counter.unit == proto.CounterDescriptor.UNIT_COUNT
            assert one.name


def replay(loaded: Loaded, events: list[tuple[int, str, Any]]) -> None:
    stacks: dict[int, list[Drawn]] = defaultdict(list)
    for time_ns, name, event in sorted(events, key=lambda entry: entry[0]):
        track = event.track_uuid
        is_counter = loaded.tracks[track].HasField("counter")
        assert is_counter == (event.type == COUNTER)
        if event.type == COUNTER:
            loaded.counters[loaded.track_name(track)].append((time_ns, event.counter_value))
        elif event.type == INSTANT:
            loaded.instants.append((name, time_ns, arguments_of(event)))
        elif event.type == BEGIN:
            piece = Drawn(
                track,
                name,
                time_ns,
                len(stacks[track]),
                arguments_of(event),
                list(event.flow_ids),
                list(event.terminating_flow_ids),
            )
            stacks[track].append(piece)
            loaded.slices.append(piece)
        else:
            assert stacks[track], "an end without a begin"
            stacks[track].pop().end_ns = time_ns
    assert not any(stacks.values()), "a begin without an end"


def step_slices(loaded: Loaded, thread: str) -> dict[int, Drawn]:
    found = {}
    for piece in loaded.slices:
        if piece.name.startswith("execute_context_"):
            is_worker = loaded.track_name(piece.track) == "worker"
            if is_worker == (thread == "worker"):
                assert piece.arguments["step"] not in found
                found[piece.arguments["step"]] = piece
    return found
