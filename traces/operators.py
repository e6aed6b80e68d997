"""Operators of torch profiles, as slices of the run's Perfetto file.

Knows the Chrome traces that `instrumentation.profile.torch_profiler` leaves and how their clock
relates to ours. Does not know the run that they belong to, nor how a packet is written.

Our own steps and phases are in a profile too; they are left out here, because the worker's track
has them. What is left goes on tracks right below it, one for each thread of torch and each stream
of a device, and more where slices overlap in part.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from instrumentation.labels import is_step_label
from instrumentation.names import Phase
from instrumentation.profile.files import ITERATION_PREFIX, TRACE_SUFFIX, ProfileClock
from traces.lanes import Slice, nest
from traces.perfetto_writer import Annotations, SequenceWriter

_OWN_CATEGORY = "user_annotation"
_BOOKKEEPING = "Trace"
_PHASES = frozenset(phase.label for phase in Phase)
_SHOWN = ("Input Dims", "Input type", "stream", "grid", "block", "bytes")
"""Arguments of the profiler that say something by themselves."""

_Place = tuple[int | str, int | str]


class _Event(msgspec.Struct, gc=False):
    """What the profiler says of one event, as far as it is drawn."""

    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: dict[str, Any] = {}


class _Document(msgspec.Struct):
    base_ns: int = msgspec.field(name="baseTimeNanoseconds")
    events: list[_Event] = msgspec.field(name="traceEvents")
    clock: ProfileClock = msgspec.field(name="isinglass")


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile of one worker: slices on our clock, by the (process, thread) they ran in."""

    path: Path
    clock: ProfileClock
    places: dict[_Place, list[Slice]]


def find_profiles(folder: Path) -> list[Path]:
    """The finished profiles in a folder, in the order in which they were begun."""
    return sorted(folder.glob(f"*{TRACE_SUFFIX}"), key=lambda path: (path.stat().st_mtime, path))


def read_profile(path: Path) -> Profile:
    """Read a profile that an engine of ours has left.

    Raises:
        ValueError: it is none.
    """
    try:
        document = msgspec.json.decode(path.read_bytes(), type=_Document)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is not a torch profile of an engine: {error}") from error
    clock = document.clock
    origin_ns = document.base_ns + clock.monotonic_offset_ns
    places: dict[_Place, list[Slice]] = defaultdict(list)
    for event in document.events:
        if event.ph != "X" or event.cat == _BOOKKEEPING or _is_ours(event):
            continue
        begin_ns = origin_ns + round(event.ts * 1000)
        end_ns = begin_ns + round(event.dur * 1000)
        places[event.pid, event.tid].append(
            Slice(event.name, begin_ns, end_ns, _annotations(event, clock))
        )
    return Profile(path, clock, dict(places))


def draw_profiles(stream: BinaryIO, profiles: Sequence[Profile], *, parent: int, rank: int) -> None:
    """Append the operators' tracks of one process to a Perfetto file, below its track `parent`."""
    if not profiles:
        return
    places: dict[_Place, list[Slice]] = defaultdict(list)
    for profile in profiles:
        for place, slices in profile.places.items():
            places[place] += slices
    clock = profiles[0].clock
    writer = SequenceWriter(stream, f"profile {clock.host} {clock.pid}")
    for place, slices in sorted(places.items(), key=_place_rank):
        name = _track_name(place, {profile.clock.thread_id for profile in profiles}, clock.pid)
        for number, lane in enumerate(nest(slices), 1):
            lane_name = name if number == 1 else f"{name} ({number})"
            writer.slices(writer.named_track(parent, lane_name, rank=rank), lane)
    writer.flush()


def _track_name(place: _Place, step_threads: set[int], process_id: int) -> str:
    pid, tid = place
    if pid != process_id:
        return f"device {pid}, stream {tid}"
    return "operators" if tid in step_threads else f"operators of thread {tid}"


def _place_rank(item: tuple[_Place, list[Slice]]) -> tuple[bool, str, str]:
    (pid, tid), _ = item
    return not isinstance(pid, int), str(pid), str(tid)


def _is_ours(event: _Event) -> bool:
    if event.cat != _OWN_CATEGORY:
        return False
    name = event.name
    return name in _PHASES or is_step_label(name) or name.startswith(ITERATION_PREFIX)


def _annotations(event: _Event, clock: ProfileClock) -> Annotations:
    shown: Annotations = {"category": event.cat} if event.cat else {}
    shown["clock_error_ns"] = clock.clock_error_ns
    for name in _SHOWN:
        value = event.args.get(name)
        if value is not None:
            shown[name] = value if type(value) is int else str(value)
    return shown
