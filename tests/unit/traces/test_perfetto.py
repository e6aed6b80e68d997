"""The Perfetto file, parsed back: every rule of the format, and every count of the journals.

The reader below does with the packets what the trace processor does: it sorts by time, closes
slices in stack order, and drops what it cannot resolve. Where that one would lose or bend something
without an error, this one asserts.
"""

import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from instrumentation import Phase, RequestTimeline, StepRecord, WorkerStepRecord, parse_step_label
from instrumentation.labels import format_step_label
from instrumentation.record.journal import SUFFIX, JournalWriter
from instrumentation.record.records import ProcessHeader, Spans, ThreadStarted
from tests.support.perfetto_files import Drawn, Loaded, load, step_slices
from tests.support.synthetic_run import SyntheticRun, write_synthetic_run
from traces.journal_reader import read_run
from traces.lanes import Slice, edges, grow_over, nest, side_by_side
from traces.perfetto import write_perfetto
from traces.request_slices import request_slices
from traces.requests import CUT_OFF, request_timelines


def phases_of(folder: Path) -> Counter[tuple[str, int, int]]:
    return Counter(
        (span.phase.label, span.begin_ns, span.end_ns)
        for _, thread in read_run(folder).threads()
        for span in thread.phase_spans()
    )


MODES = [(False, False), (True, False), (False, True), (True, True)]


@pytest.fixture(params=MODES, ids=["sync", "async", "sync-killed", "async-killed"])
def traced(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[SyntheticRun, Loaded]:
    is_async, is_killed = request.param
    run = write_synthetic_run(
        tmp_path / "run", seed=9, num_requests=14, is_async=is_async, is_killed=is_killed
    )
    return run, load(write_perfetto(run.folder).read_bytes())


Traced = tuple[SyntheticRun, Loaded]


def test_processes_and_threads(traced: Traced) -> None:
    _, loaded = traced
    assert len(loaded.sequences) == 2
    processes = {
        one.process.process_name for one in loaded.tracks.values() if one.HasField("process")
    }
    threads = {one.thread.thread_name for one in loaded.tracks.values() if one.HasField("thread")}
    assert processes == {"Caller", "EngineCore"}
    assert threads == {"caller", "core loop", "worker"}


def test_tracks_are_in_reading_order(traced: Traced) -> None:
    run, loaded = traced

    def names_under(parent: int) -> list[str]:
        children = [one for one in loaded.tracks.values() if one.parent_uuid == parent]
        assert not parent or loaded.tracks[parent].child_ordering == proto.TrackDescriptor.EXPLICIT
        children.sort(key=lambda one: one.sibling_order_rank)
        return [loaded.track_name(one.uuid) for one in children]

    assert names_under(0) == ["Caller", "EngineCore"]
    uuids = {loaded.track_name(uuid): uuid for uuid in loaded.tracks}
    assert names_under(uuids["Caller"]) == ["start-up", "caller", "requests"]
    core = [name.removesuffix(" (2)") for name in names_under(uuids["EngineCore"])]
    threads = [name for name in dict.fromkeys(core) if name != "steps"]
    assert threads[:3] == ["start-up", "core loop", "worker"]
    assert threads[3] == "running requests"
    assert set(threads[3:]) == set(loaded.counters)
    assert names_under(uuids["requests"]) == [
        f"request {timeline.request_id}" for timeline in run.timelines
    ]


def test_one_slice_a_step_with_its_label_and_fields(traced: Traced) -> None:
    run, loaded = traced
    records: dict[str, list[Any]] = {"core": run.steps, "worker": run.worker_steps}
    for thread, steps in records.items():
        slices = step_slices(loaded, thread)
        assert set(slices) == {step.step for step in steps}
        for step in steps:
            piece = slices[step.step]
            assert parse_step_label(piece.name) == step.label
            assert piece.begin_ns <= step.begin_ns < step.end_ns <= piece.end_ns
            assert piece.arguments["begin_ns"] == step.begin_ns
            assert piece.arguments["num_context_tokens"] == step.num_context_tokens
    for step in run.steps:
        arguments = step_slices(loaded, "core")[step.step].arguments
        assert arguments["admission_stop"] == step.admission_stop.label
        assert arguments["scheduled"] == ", ".join(map(str, step.scheduled))
        assert arguments["num_blocks_used"] == step.num_blocks_used
        assert "phases" not in arguments


def test_every_phase_has_its_true_times(traced: Traced) -> None:
    """Slices that overlap in part would come back with other ends than they went in with."""
    run, loaded = traced
    labels = {phase.label for phase in Phase}
    drawn = Counter(
        (piece.name, piece.begin_ns, piece.end_ns)
        for piece in loaded.slices
        if piece.name in labels and not loaded.track_name(piece.track).startswith("request ")
    )
    assert drawn == phases_of(run.folder)
    assert drawn.total() > 50


def test_phases_nest_in_their_steps(traced: Traced) -> None:
    run, loaded = traced
    is_async = any(
        later.begin_ns < step.end_ns for step, later in zip(run.steps, run.steps[1:], strict=False)
    )
    worker_phases = loaded.named("prepare", "forward", "logits", "sample", "readback")
    assert worker_phases
    assert all(piece.depth == 1 for piece in worker_phases)
    core_steps = step_slices(loaded, "core").values()
    tracks = {loaded.track_name(piece.track) for piece in core_steps}
    assert tracks == ({"steps", "steps (2)"} if is_async else {"core loop"})
    depth = 0 if is_async else 1
    for piece in loaded.named("schedule", "execute", "wait", "update"):
        assert loaded.track_name(piece.track) == "core loop"
        if piece.name != "execute" or not is_async:
            assert piece.depth == depth
    assert all(piece.depth == 0 for piece in loaded.named("publish"))


def test_counters_are_the_records(traced: Traced) -> None:
    run, loaded = traced
    expected = {
        "running requests": "num_running",
        "waiting requests": "num_waiting",
        "KV blocks used": "num_blocks_used",
        "KV blocks cached free": "num_blocks_cached_free",
        "KV blocks free": "num_blocks_free",
        "scheduled tokens": "num_scheduled_tokens",
    }
    assert set(loaded.counters) == {*expected, "prefix hit tokens"}
    for name, attribute in expected.items():
        values = loaded.counters[name]
        # The last value of some is the one after the last step.
        assert values[: len(run.steps)] == [
            (step.begin_ns, getattr(step, attribute)) for step in run.steps
        ]
    assert loaded.counters["scheduled tokens"][-1][1] == 0
    hits = sum(value for _, value in loaded.counters["prefix hit tokens"])
    assert hits == sum(
        step.prefix_hit_tokens + step.preempted_prefix_hit_tokens for step in run.steps
    )


def test_events_and_startup(traced: Traced) -> None:
    run, loaded = traced
    assert len(loaded.instants) == run.num_events > 0
    for name, time_ns, arguments in loaded.instants:
        assert name == "preempt"
        assert time_ns > 0
        assert arguments["request_id"].startswith("request-")
        assert arguments["value"] > 0
    startups = [piece for piece in loaded.slices if loaded.track_name(piece.track) == "start-up"]
    assert len(startups) == run.num_startups


def test_requests_show_their_intervals(traced: Traced) -> None:
    run, loaded = traced
    timelines = request_timelines(read_run(run.folder))
    assert len(timelines) == len(run.timelines)
    by_track: dict[str, list[Drawn]] = defaultdict(list)
    for piece in loaded.slices:
        by_track[loaded.track_name(piece.track)].append(piece)
    for timeline in timelines:
        outer, *pieces = by_track[f"request {timeline.request_id}"]
        assert outer.begin_ns == timeline.arrival_ns
        totals = Counter()
        for piece in pieces:
            assert piece.depth == 1
            totals[piece.name] += piece.end_ns - piece.begin_ns
        assert totals["queued"] == timeline.queue_ns
        assert totals["prefill"] == timeline.prefill_ns
        assert totals["decode"] == timeline.decode_ns
        assert totals["preempted"] == timeline.preempted_ns
        assert outer.arguments["e2e_ns"] == timeline.e2e_ns
        assert outer.arguments["request_id"] == timeline.request_id


def test_flows_lead_from_requests_through_their_steps(traced: Traced) -> None:
    run, loaded = traced
    served: dict[int, list[int]] = defaultdict(list)
    for step in run.steps:
        for request_num in step.scheduled[::2]:
            served[request_num].append(step.step)
    core_slices = step_slices(loaded, "core")
    starts = [piece for piece in loaded.named("queued") if piece.flows]
    assert len(starts) == len(served)
    names = {timeline.request_id: timeline.request_num for timeline in run.timelines}
    for start in starts:
        [flow] = start.flows
        request_num = names[loaded.track_name(start.track).removeprefix("request ")]
        on_steps = [
            step
            for step, piece in core_slices.items()
            if flow in piece.flows or flow in piece.ending_flows
        ]
        assert sorted(on_steps) == served[request_num]
        ends = [step for step, piece in core_slices.items() if flow in piece.ending_flows]
        assert ends == [served[request_num][-1]]
        assert start.begin_ns < core_slices[on_steps[0]].begin_ns


def test_flows_lead_from_steps_to_the_worker(traced: Traced) -> None:
    _, loaded = traced
    core_slices = step_slices(loaded, "core")
    worker_slices = step_slices(loaded, "worker")
    for step, piece in worker_slices.items():
        assert not piece.flows
        [flow] = piece.ending_flows
        assert flow in core_slices[step].flows
        assert core_slices[step].begin_ns <= piece.begin_ns
    all_flows = Counter(flow for piece in loaded.slices for flow in piece.flows)
    ended = Counter(flow for piece in loaded.slices for flow in piece.ending_flows)
    assert set(all_flows) == set(ended)
    assert max(ended.values()) == 1


def test_killed_runs_rebuild_what_was_in_flight(tmp_path: Path) -> None:
    whole = write_synthetic_run(tmp_path / "whole", seed=9, num_requests=14)
    killed = write_synthetic_run(tmp_path / "killed", seed=9, num_requests=14, is_killed=True)
    rebuilt = {one.request_num: one for one in request_timelines(read_run(killed.folder))}
    recorded = {one.request_num: one for one in request_timelines(read_run(whole.folder))}
    last_ns = killed.steps[-1].end_ns
    num_cut_off = 0
    for number, timeline in rebuilt.items():
        truth = recorded[number]
        assert timeline.request_id == truth.request_id
        assert timeline.num_prompt_tokens == truth.num_prompt_tokens
        if timeline.error != CUT_OFF:
            assert timeline == truth
            continue
        num_cut_off += 1
        assert timeline.end_ns == last_ns
        for name in ("first_scheduled_ns", "first_token_ns"):
            stamp = getattr(truth, name)
            assert getattr(timeline, name) == (stamp if stamp <= last_ns else 0)
        before = [
            (begin, end if end <= last_ns else 0)
            for begin, end in truth.preemptions
            if begin <= last_ns
        ]
        assert timeline.preemptions == before
    assert 0 < num_cut_off < len(rebuilt)


def test_a_lost_frontend_leaves_finished_requests_finished(tmp_path: Path) -> None:
    run = write_synthetic_run(tmp_path / "run", seed=2)
    next(run.folder.glob("caller.*")).unlink()
    timelines = request_timelines(read_run(run.folder))
    assert len(timelines) == len(run.timelines)
    for timeline, truth in zip(timelines, run.timelines, strict=True):
        assert timeline.is_complete
        assert timeline.error is None
        assert timeline.e2e_ns == truth.e2e_ns
        assert timeline.prefill_ns == truth.prefill_ns
    loaded = load(write_perfetto(run.folder).read_bytes())
    assert len(loaded.named("queued")) == len(run.timelines)


def test_files_of_two_runs_can_be_joined(tmp_path: Path) -> None:
    data = []
    for seed in (1, 2):
        run = write_synthetic_run(tmp_path / str(seed), seed=seed, start_ns=seed * 10**15)
        data.append(write_perfetto(run.folder).read_bytes())
    traces = [proto.Trace.FromString(one) for one in data]
    for get in (
        lambda packet: packet.trusted_packet_sequence_id,
        lambda packet: packet.track_descriptor.uuid,
    ):
        first, second = ({get(packet) for packet in trace.packet} - {0} for trace in traces)
        assert first
        assert second
        assert not first & second
    joined = proto.Trace.FromString(data[0] + data[1])
    assert len(joined.packet) == sum(len(trace.packet) for trace in traces)


def test_a_file_cut_off_anywhere_is_a_trace_up_to_there(tmp_path: Path) -> None:
    """Packets are written one behind the other, so whole packets before a cut can be read."""
    run = write_synthetic_run(tmp_path / "run", num_requests=2)
    data = write_perfetto(run.folder, tmp_path / "x.pftrace").read_bytes()
    packets = proto.Trace.FromString(data).packet
    offset = 0
    for packet in packets:
        piece = proto.Trace(packet=[packet]).SerializeToString()
        assert data[offset : offset + len(piece)] == piece
        offset += len(piece)
    assert offset == len(data)


def test_two_roles_in_one_process_share_its_track(tmp_path: Path) -> None:
    """In-process engines: one pid, and one thread that is caller, core loop and worker at once."""
    for role, thread_names in (("caller", ["caller"]), ("core", ["core loop", "worker"])):
        writer = JournalWriter(tmp_path / f"{role}.77{SUFFIX}")
        writer.write(
            ProcessHeader(
                role=role,
                rank=0,
                pid=77,
                host="h",
                version="1",
                python_version="3",
                argv=(),
                started_ns=5,
            )
        )
        for number, name in enumerate(thread_names):
            writer.write(ThreadStarted(name, 77), thread=number)
            writer.write(Spans((Phase.FORWARD, 100 + number, 300)), thread=number)
        writer.close()
    loaded = load(write_perfetto(tmp_path).read_bytes())
    assert len(loaded.sequences) == 1
    assert [loaded.track_name(piece.track) for piece in loaded.slices] == [
        *("caller", "core loop", "worker")
    ]


def test_frontends_are_told_apart_and_each_has_its_own_requests(tmp_path: Path) -> None:
    """As vLLM calls its processes; a replacement has the number of the one whose place it took."""
    frontends = {90: "ApiServer_1", 89: "ApiServer_2", 88: "ApiServer_2 (life 2)", 87: ""}
    for pid, title in frontends.items():
        writer = JournalWriter(tmp_path / f"caller.{pid}{SUFFIX}")
        writer.write(
            ProcessHeader(
                role="caller",
                rank=int(title[10]) if title else 0,
                pid=pid,
                host="h",
                version="1",
                python_version="3",
                argv=(),
                started_ns=5,
                title=title,
            )
        )
        writer.write(ThreadStarted("caller", pid))
        timeline = RequestTimeline(request_id=f"of {pid}", request_num=pid, arrival_ns=5)
        timeline.delivered_ns = 9
        writer.write(timeline)
        writer.close()
    loaded = load(write_perfetto(tmp_path).read_bytes())
    processes = {
        one.process.pid: one.process.process_name
        for one in loaded.tracks.values()
        if one.HasField("process")
    }
    assert processes == frontends | {87: "Caller"}
    for track in loaded.tracks.values():
        if track.name.startswith("request of"):
            process = loaded.tracks[loaded.tracks[track.parent_uuid].parent_uuid].process
            assert track.name == f"request of {process.pid}"
    tops = [one for one in loaded.tracks.values() if not one.parent_uuid]
    tops.sort(key=lambda one: one.sibling_order_rank)
    assert [loaded.track_name(one.uuid) for one in tops[:2]] == ["Caller", "ApiServer_1"]


def test_overlapping_phases_move_to_another_track(tmp_path: Path) -> None:
    """Coroutines share a thread's spans; their phases may overlap and must not bend each other."""
    writer = JournalWriter(tmp_path / f"caller.5{SUFFIX}")
    writer.write(
        ProcessHeader(
            role="caller",
            rank=0,
            pid=5,
            host="h",
            version="1",
            python_version="3",
            argv=(),
            started_ns=5,
        )
    )
    writer.write(ThreadStarted("caller", 5))
    spans = [(Phase.SEND, 10, 30), (Phase.RECEIVE, 20, 40), (Phase.SEND, 30, 30)]
    writer.write(Spans(tuple(number for span in spans for number in span)))
    writer.close()
    loaded = load(write_perfetto(tmp_path).read_bytes())
    assert {
        (loaded.track_name(piece.track), piece.name, piece.begin_ns, piece.end_ns)
        for piece in loaded.slices
    } == {("caller", "send", 10, 30), ("caller (2)", "receive", 20, 40), ("caller", "send", 30, 30)}


# Lanes.


def test_lanes_hold_everything_and_bend_nothing() -> None:
    chance = random.Random(3)
    for _ in range(200):
        slices = []
        for number in range(chance.randint(1, 30)):
            begin = chance.randint(1, 40)
            slices.append(Slice(str(number), begin, begin + chance.randint(0, 12)))
        for lay_out in (nest, side_by_side):
            lanes = lay_out(slices)
            assert sorted(piece.name for lane in lanes for piece in lane) == sorted(
                piece.name for piece in slices
            )
            for lane in lanes:
                stack: list[Slice] = []
                previous = 0
                for time_ns, piece in edges(lane):
                    assert time_ns >= previous
                    previous = time_ns
                    if piece is None:
                        assert stack.pop().end_ns == time_ns
                    else:
                        assert lay_out is nest or not stack
                        stack.append(piece)
                assert not stack


def test_steps_grow_over_the_phases_at_their_edges() -> None:
    phases = [Slice("a", 0, 10), Slice("b", 10, 20), Slice("c", 25, 40), Slice("d", 50, 60)]
    step, exact = Slice("step", 5, 30), Slice("exact", 10, 20)
    grow_over([step, exact], phases)
    assert (step.begin_ns, step.end_ns) == (0, 40)
    assert (exact.begin_ns, exact.end_ns) == (10, 20)


def test_request_slices_of_lives_that_stop_early() -> None:
    never = RequestTimeline(
        request_id="a", arrival_ns=10, delivered_ns=30, finish_reason="abort", preemptions=[]
    )
    assert [(s.name, s.begin_ns, s.end_ns) for s in request_slices(never)] == [("queued", 10, 30)]
    thrown_out = RequestTimeline(
        request_id="a",
        arrival_ns=10,
        first_scheduled_ns=20,
        first_token_ns=30,
        last_token_ns=40,
        delivered_ns=90,
        finish_reason="abort",
        preemptions=[(50, 0)],
    )
    assert [(s.name, s.begin_ns, s.end_ns) for s in request_slices(thrown_out)] == [
        ("queued", 10, 20),
        ("prefill", 20, 30),
        ("decode", 30, 50),
        ("preempted", 50, 90),
    ]


def test_step_records_are_named_as_the_rest_of_the_system_names_them() -> None:
    for record in (
        StepRecord(step=1, begin_ns=1, end_ns=2, num_context_requests=1, num_context_tokens=4),
        WorkerStepRecord(step=1, begin_ns=1, end_ns=2, num_generation_requests=2),
    ):
        assert parse_step_label(format_step_label(record.label)) == record.label


def test_no_journal_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no readable journal"):
        write_perfetto(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        write_perfetto(tmp_path / "nowhere")
