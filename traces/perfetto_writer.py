"""Writing Perfetto protobuf packets: tracks, slices, instants, counters, flows.

Knows the trace format (https://perfetto.dev/docs/reference/trace-packet-proto). Does not know what
is drawn. What the format needs and does not check: a clock snapshot before any time on the
monotonic clock, a sequence id and track ids of its own for each writer, and a cleared state before
the first interned name.
"""

import hashlib
from typing import BinaryIO

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from instrumentation.record.records import ClockAnchor
from traces.lanes import Lane, edges

_PACKETS_AT_A_TIME = 1000
_REALTIME = 1
_MONOTONIC = 3
_BOOTTIME = 6

Annotations = dict[str, int | str]


def stable_id(*parts: object, num_bytes: int = 8) -> int:
    """Derive a number, never 0, from what it stands for; equal parts give equal numbers."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=num_bytes).digest(), "little") or 1


class SequenceWriter:
    """One writer's sequence of packets, appended to a stream.

    The key names the writer; its sequence id and its tracks' ids derive from it, so that files of
    different writers may be written one behind the other.
    """

    def __init__(self, stream: BinaryIO, key: str) -> None:
        self._stream = stream
        self._key = key
        self._sequence_id = stable_id(key, num_bytes=4)
        self._trace = proto.Trace()
        self._name_ids: dict[str, int] = {}
        self._num_tracks = 0
        self._has_cleared_state = False

    def _packet(self) -> proto.TracePacket:
        if len(self._trace.packet) >= _PACKETS_AT_A_TIME:
            self.flush()
        packet = self._trace.packet.add()
        packet.trusted_packet_sequence_id = self._sequence_id
        packet.sequence_flags = (
            proto.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
            if self._has_cleared_state
            else proto.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        )
        self._has_cleared_state = True
        return packet

    def flush(self) -> None:
        """Append what has come together to the stream."""
        self._stream.write(self._trace.SerializeToString())
        self._trace.Clear()

    def clock_snapshot(self, anchor: ClockAnchor) -> None:
        """Tie the clocks together; the first packet of a file."""
        snapshot = self._packet().clock_snapshot
        snapshot.primary_trace_clock = _MONOTONIC
        for clock_id, time_ns in (
            (_MONOTONIC, anchor.monotonic_ns),
            (_BOOTTIME, anchor.boottime_ns),
            (_REALTIME, anchor.wall_ns),
        ):
            snapshot.clocks.add(clock_id=clock_id, timestamp=time_ns)

    def _track(self, parent: int, *, rank: int = 0) -> tuple[int, proto.TrackDescriptor]:
        descriptor = self._packet().track_descriptor
        self._num_tracks += 1
        descriptor.uuid = stable_id(self._key, self._num_tracks)
        if parent:
            descriptor.parent_uuid = parent
        # Ranks count only where the parent says so, hence every track says so for its children.
        descriptor.child_ordering = proto.TrackDescriptor.EXPLICIT
        descriptor.sibling_order_rank = rank
        return descriptor.uuid, descriptor

    def process_track(
        self, pid: int, name: str, argv: tuple[str, ...] = (), *, rank: int = 0
    ) -> int:
        """Describe the process; returns the track's id, as the other methods do.

        Tracks with the same parent are shown by ascending rank; so are processes.
        """
        track, descriptor = self._track(0, rank=rank)
        descriptor.process_ordering = proto.TrackDescriptor.PROCESS_ORDERING_EXPLICIT
        descriptor.thread_ordering = proto.TrackDescriptor.THREAD_ORDERING_EXPLICIT
        descriptor.process.pid = pid
        descriptor.process.process_name = name
        descriptor.process.cmdline.extend(argv)
        return track

    def thread_track(self, parent: int, *, pid: int, tid: int, name: str, rank: int = 0) -> int:
        """Describe a thread; only once for each tid."""
        track, descriptor = self._track(parent, rank=rank)
        descriptor.thread.pid = pid
        descriptor.thread.tid = tid
        descriptor.thread.thread_name = name
        return track

    def named_track(self, parent: int, name: str, *, rank: int = 0) -> int:
        """Describe a track that is no thread."""
        track, descriptor = self._track(parent, rank=rank)
        descriptor.name = name
        return track

    def counter_track(self, parent: int, name: str, *, rank: int = 0) -> int:
        """Describe a counter; its values are counts."""
        track, descriptor = self._track(parent, rank=rank)
        descriptor.name = name
        descriptor.counter.unit = proto.CounterDescriptor.UNIT_COUNT
        return track

    def _event(self, track: int, time_ns: int, kind: int) -> tuple[proto.TracePacket, ...]:
        packet = self._packet()
        packet.timestamp = time_ns
        packet.timestamp_clock_id = _MONOTONIC
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet, packet.track_event

    def _name(self, packet: proto.TracePacket, name: str) -> None:
        name_id = self._name_ids.get(name)
        if name_id is None:
            name_id = self._name_ids[name] = len(self._name_ids) + 1
            packet.interned_data.event_names.add(iid=name_id, name=name)
        packet.track_event.name_iid = name_id

    def slices(self, track: int, lane: Lane) -> None:
        """Draw a properly nested lane on a track."""
        for time_ns, piece in edges(lane):
            if piece is None:
                self._event(track, time_ns, proto.TrackEvent.TYPE_SLICE_END)
                continue
            packet, event = self._event(track, time_ns, proto.TrackEvent.TYPE_SLICE_BEGIN)
            self._name(packet, piece.name)
            event.flow_ids.extend(piece.flow_ids)
            event.terminating_flow_ids.extend(piece.terminating_flow_ids)
            _annotate(event, piece.annotations)

    def instant(self, track: int, time_ns: int, name: str, annotations: Annotations) -> None:
        """Draw an instant."""
        packet, event = self._event(track, time_ns, proto.TrackEvent.TYPE_INSTANT)
        self._name(packet, name)
        _annotate(event, annotations)

    def counter(self, track: int, time_ns: int, value: int) -> None:
        """Set a counter from this instant on."""
        _, event = self._event(track, time_ns, proto.TrackEvent.TYPE_COUNTER)
        event.counter_value = int(value)


def _annotate(event: proto.TrackEvent, annotations: Annotations) -> None:
    for name, value in annotations.items():
        annotation = event.debug_annotations.add(name=name)
        if isinstance(value, str):
            annotation.string_value = value
        else:
            annotation.int_value = int(value)
