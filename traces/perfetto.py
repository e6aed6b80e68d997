"""A run as one Perfetto file: processes, threads, steps, phases, requests and counters.

Knows what is drawn where. Does not know protobuf details (`perfetto_writer`) nor the rule of tracks
(`lanes`).

A process's threads have their phases on their own tracks. The core loop's step slices hold its
phases, unless steps overlap, as under async scheduling: then steps have tracks of their own.
"""

import os
from collections import defaultdict
from enum import IntEnum
from itertools import groupby
from pathlib import Path

import msgspec

from instrumentation.labels import format_step_label
from instrumentation.names import Role, ThreadName
from instrumentation.record.process_header import read_clock_anchor
from instrumentation.record.records import EventRecord, StartupRecord
from instrumentation.record.request_records import RequestTimeline
from instrumentation.record.step_records import StepRecord, WorkerStepRecord
from traces.beginning import cut_at_beginning
from traces.flows import Flows
from traces.journal_reader import ProcessRecords, Run, ThreadRecords, read_run
from traces.lanes import Lane, Slice, grow_over, nest, side_by_side
from traces.operators import Profile, draw_profiles, find_profiles, read_profile
from traces.perfetto_writer import Annotations, SequenceWriter
from traces.request_slices import request_annotations, request_slices

FILE_NAME = "trace.pftrace"
_PROCESS_NAMES = {Role.CALLER: "Caller", Role.CORE: "EngineCore", Role.WORKER: "Worker"}
_ROLE_ORDER = [Role.CALLER, Role.CORE, Role.WORKER]
_TRACK_ORDER: list[str] = [
    *("start-up", ThreadName.CALLER, ThreadName.CORE_LOOP, "steps", ThreadName.WORKER),
    *(ThreadName.INPUT_IO, ThreadName.OUTPUT_IO, "requests", "counters"),
]
"""A process's tracks from the top down; a name that is not here comes before the requests."""
_NOT_SHOWN = frozenset({"phases", "io_phase_totals_ns", "time_ns"})


def write_perfetto(
    run_dir: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    profiles_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """Convert a run's journals to one Perfetto file, RUN_DIR/trace.pftrace unless told otherwise.

    A flight record's file, given instead of the folder, becomes FILE.pftrace. Torch profiles in the
    run's folder, and in `profiles_dir`, are drawn below their workers.

    Raises:
        ValueError: the folder holds no readable journal, or a profile is not one.
    """
    run, _ = cut_at_beginning(read_run(run_dir))
    path = Path(out) if out is not None else _default_output(Path(run_dir))
    # By its real path, because the two folders may be one.
    folders = [Path(folder).resolve() for folder in (run_dir, profiles_dir) if folder is not None]
    files = [file for folder in dict.fromkeys(folders) for file in find_profiles(folder)]
    profiles = [read_profile(file) for file in files]
    flows = Flows(run, _writer_key(run.processes))
    owners = _owners_of_requests(run, flows.timelines)
    # A reader never finds half a file under the final name.
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("wb") as stream:
        is_first = True
        for processes in _operating_system_processes(run):
            drawing = _ProcessDrawing(SequenceWriter(stream, _writer_key(processes)), processes)
            if is_first:
                anchors = [anchor for process in run.processes for anchor in process.anchors]
                drawing.writer.clock_snapshot(anchors[0] if anchors else read_clock_anchor())
                is_first = False
            paths = {process.path for process in processes}
            drawing.draw(flows, requests=[one for one, owner in owners if owner in paths])
            drawing.writer.flush()
            draw_profiles(
                stream,
                [profile for profile in profiles if _is_of(profile, processes[0])],
                parent=drawing.track,
                rank=_track_rank(ThreadName.WORKER) + 1,
            )
    unfinished.replace(path)
    return path


def _default_output(run_dir: Path) -> Path:
    return run_dir.with_suffix(".pftrace") if run_dir.is_file() else run_dir / FILE_NAME


def _is_of(profile: Profile, process: ProcessRecords) -> bool:
    return (profile.clock.host, profile.clock.pid) == _process_key(process)


def _process_key(process: ProcessRecords) -> tuple[str, int]:
    return process.header.host, process.header.pid


def _operating_system_processes(run: Run) -> list[list[ProcessRecords]]:
    """The journals of each process of the operating system, in the order to be shown."""
    grouped = [
        sorted(group, key=_process_rank)
        for _, group in groupby(sorted(run.processes, key=_process_key), key=_process_key)
    ]
    return sorted(grouped, key=lambda group: _process_rank(group[0]))


def _process_rank(process: ProcessRecords) -> int:
    """Where a process is shown: caller, core, workers by their rank."""
    return _ROLE_ORDER.index(Role(process.header.role)) * 10_000 + process.header.rank


def _track_rank(name: str) -> int:
    return 2 * _TRACK_ORDER.index(name if name in _TRACK_ORDER else "requests") - (
        name not in _TRACK_ORDER
    )


def _writer_key(processes: list[ProcessRecords]) -> str:
    header = processes[0].header
    return f"{header.host} {header.pid} {header.role} {header.rank} {header.started_ns}"


def _owners_of_requests(
    run: Run, timelines: list[RequestTimeline]
) -> list[tuple[RequestTimeline, Path]]:
    """The journal of the process under which each request is drawn: of the frontend that had it;
    where none tells of its end, of the first caller, else of the core."""
    first = min(run.processes, key=_process_rank).path
    tellers = {
        timeline.request_num: process.path
        for process in run.processes
        for timeline in process.of_type(RequestTimeline)
    }
    return [(timeline, tellers.get(timeline.request_num, first)) for timeline in timelines]


class _ProcessDrawing:
    """Draws one operating-system process, which may hold several of the engine's."""

    def __init__(self, writer: SequenceWriter, processes: list[ProcessRecords]) -> None:
        self.writer = writer
        self._processes = processes
        self._pid = processes[0].header.pid
        self._tids: set[int] = set()

    @property
    def track(self) -> int:
        """The process's own track, once it is drawn."""
        return self._track

    def draw(self, flows: Flows, *, requests: list[RequestTimeline]) -> None:
        """Draw everything of the process, and requests where it owns them."""
        # The snapshot must come first, so nothing is written before this call.
        name = " + ".join(_process_name(process) for process in self._processes)
        first = self._processes[0]
        self._track = self.writer.process_track(
            self._pid, name, first.header.argv, rank=_process_rank(first)
        )
        for process in self._processes:
            self._draw_startup(process)
            for thread in process.threads:
                self._draw_thread(thread, flows)
            self._draw_counters(process)
        if requests:
            self._requests_track = self._named_track("requests")
        for number, timeline in enumerate(requests):
            self._draw_request(timeline, flows, rank=number)

    def _named_track(self, name: str) -> int:
        return self.writer.named_track(self._track, name, rank=_track_rank(name))

    def _draw_startup(self, process: ProcessRecords) -> None:
        pieces = [
            Slice(startup.phase.label, startup.begin_ns, startup.end_ns)
            for startup in process.of_type(StartupRecord)
        ]
        self._draw_lanes("start-up", nest(pieces), parent=self._track, rank=_track_rank("start-up"))

    def _draw_thread(self, thread: ThreadRecords, flows: Flows) -> None:
        steps = [_step_slice(step) for step in thread.of_type(StepRecord)]
        for piece, step in zip(steps, thread.of_type(StepRecord), strict=True):
            flows.add_to_step(piece, step)
        worker_steps = [_step_slice(step) for step in thread.of_type(WorkerStepRecord)]
        for piece, worker_step in zip(worker_steps, thread.of_type(WorkerStepRecord), strict=True):
            flows.add_to_worker_step(piece, worker_step)
        phases = [
            Slice(span.phase.label, span.begin_ns, span.end_ns) for span in thread.phase_spans()
        ]
        lanes, step_lanes = _lay_out(steps + worker_steps, phases)
        track = self._thread_track(thread)
        for piece_lane in lanes[:1]:
            self.writer.slices(track, piece_lane)
        rank = _track_rank(thread.name)
        self._draw_lanes(thread.name, lanes[1:], parent=self._track, rank=rank, first_number=2)
        self._draw_lanes("steps", step_lanes, parent=self._track, rank=_track_rank("steps"))
        for event in thread.of_type(EventRecord):
            self.writer.instant(track, event.time_ns, event.kind.label, _annotations(event))

    def _thread_track(self, thread: ThreadRecords) -> int:
        """A thread's track; where two share an operating-system thread, the second is no thread."""
        if thread.native_id in self._tids:
            return self._named_track(thread.name)
        self._tids.add(thread.native_id)
        return self.writer.thread_track(
            self._track,
            pid=self._pid,
            tid=thread.native_id,
            name=thread.name,
            rank=_track_rank(thread.name),
        )

    def _draw_lanes(
        self, name: str, lanes: list[Lane], *, parent: int, rank: int, first_number: int = 1
    ) -> None:
        for number, lane in enumerate(lanes, first_number):
            lane_name = name if number == 1 else f"{name} ({number})"
            self.writer.slices(self.writer.named_track(parent, lane_name, rank=rank), lane)

    def _draw_counters(self, process: ProcessRecords) -> None:
        steps = sorted(process.of_type(StepRecord), key=lambda step: step.begin_ns)
        if not steps:
            return
        tracks: dict[str, int] = defaultdict(int)
        for step in steps:
            for name, value in _counter_values(step).items():
                if name not in tracks:
                    rank = _track_rank("counters") + len(tracks)
                    tracks[name] = self.writer.counter_track(self._track, name, rank=rank)
                self.writer.counter(tracks[name], step.begin_ns, value)
        last = max(steps, key=lambda step: step.end_ns)
        for name, value in _counter_values_at_end(last).items():
            self.writer.counter(tracks[name], last.end_ns, value)

    def _draw_request(self, timeline: RequestTimeline, flows: Flows, *, rank: int) -> None:
        pieces = request_slices(timeline)
        pieces[0].flow_ids.extend(flows.of_request(timeline))
        name = f"request {timeline.request_id}"
        track = self.writer.named_track(self._requests_track, name, rank=rank)
        outer = Slice(
            name,
            timeline.arrival_ns,
            max(timeline.end_ns, timeline.delivered_ns),
            request_annotations(timeline),
        )
        lanes = nest([outer, *pieces])
        self.writer.slices(track, lanes[0])
        self._draw_lanes(name, lanes[1:], parent=self._requests_track, rank=rank, first_number=2)


def _process_name(process: ProcessRecords) -> str:
    header = process.header
    if header.title:
        return header.title
    name = _PROCESS_NAMES.get(Role(header.role), header.role)
    return f"{name} {header.rank}" if header.role == Role.WORKER else name


def _lay_out(steps: list[Slice], phases: list[Slice]) -> tuple[list[Lane], list[Lane]]:
    """Lay steps and phases out: (the thread's lanes, lanes of steps only).

    Steps hold their phases on the thread's own track if nothing there overlaps in part and no step
    another; otherwise they get lanes of their own.
    """
    if len(nest(phases)) == 1:
        grow_over(steps, nest(phases)[0])
    step_lanes = side_by_side(steps)
    together = nest(steps + phases)
    if len(step_lanes) <= 1 and len(together) <= 1:
        return together, []
    return nest(phases), step_lanes


def _step_slice(step: StepRecord | WorkerStepRecord) -> Slice:
    return Slice(format_step_label(step.label), step.begin_ns, step.end_ns, _annotations(step))


def _annotations(record: msgspec.Struct) -> Annotations:
    """A record's fields as annotations; phases are slices, not annotations."""
    return {
        name: _annotation(getattr(record, name))
        for name in record.__struct_fields__
        if name not in _NOT_SHOWN
    }


def _annotation(value: object) -> int | str:
    if isinstance(value, IntEnum):
        return str(getattr(value, "label", value.name.lower()))
    if isinstance(value, int):
        return value
    if isinstance(value, tuple | list):
        return ", ".join(str(_annotation(entry)) for entry in value)
    return str(value)


def _counter_values(step: StepRecord) -> dict[str, int]:
    return {
        "running requests": step.num_running,
        "waiting requests": step.num_waiting,
        "KV blocks used": step.num_blocks_used,
        "KV blocks cached free": step.num_blocks_cached_free,
        "KV blocks free": step.num_blocks_free,
        "scheduled tokens": step.num_scheduled_tokens,
        "prefix hit tokens": step.prefix_hit_tokens + step.preempted_prefix_hit_tokens,
    }


def _counter_values_at_end(last: StepRecord) -> dict[str, int]:
    """What the counters fall to when the last step is over."""
    used, cached_free, free = last.blocks_at_end
    return {
        "running requests": last.num_running_at_end,
        "KV blocks used": used,
        "KV blocks cached free": cached_free,
        "KV blocks free": free,
        "scheduled tokens": 0,
    }
