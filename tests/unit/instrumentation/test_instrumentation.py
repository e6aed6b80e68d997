"""The instrument: null, live and recording; spans, groups, threads, failure and price."""

import errno
import inspect
import logging
import os
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

import instrumentation
from instrumentation import (
    NULL,
    Event,
    Instrument,
    ObservabilityConfig,
    Phase,
    RequestTimeline,
    Role,
    SinkName,
    StartupPhase,
    StepRecord,
    ThreadName,
    WorkerStepRecord,
)
from instrumentation.names import EVENTS, PHASES, STARTUP_PHASES
from instrumentation.record.drain import Drain
from instrumentation.record.flight import FlightRecorder
from instrumentation.record.instrument import Span
from instrumentation.record.journal import read_journal
from instrumentation.record.live import LiveInstrument
from instrumentation.record.records import Drops, EventRecord, Record, Spans, ThreadStarted
from instrumentation.record.ring import Ring
from instrumentation.record.sinks import Sink
from instrumentation.record.throttle import Throttle
from instrumentation.setup import setup
from instrumentation.testing import FakeClock, Recorder
from tests.waiting import PATIENCE_S, wait_until


class MemorySink:
    """Keeps what it is given; fails when told to."""

    name = SinkName.OPENTELEMETRY

    def __init__(self) -> None:
        self.threads: dict[int, str] = {}
        self.records: list[tuple[int, Record]] = []
        self.failing: set[str] = set()
        self.num_calls = 0
        self.is_closed = False

    def _call(self, name: str) -> None:
        self.num_calls += 1
        if name in self.failing:
            raise OSError(28, "No space left on device")

    def thread(self, thread: int, started: ThreadStarted) -> None:
        self._call("thread")
        self.threads[thread] = started.name

    def write(self, thread: int, records: Iterable[Record]) -> None:
        self._call("write")
        self.records += [(thread, record) for record in records]

    def flush(self) -> None:
        self._call("flush")

    def close(self) -> None:
        self._call("close")
        self.is_closed = True


def a_step(step: int = 1) -> StepRecord:
    return StepRecord(step=step, begin_ns=1, end_ns=2)


def a_live_instrument(
    sink: Sink, *, name: str = ThreadName.CORE_LOOP, capacity: int = 8192
) -> LiveInstrument:
    # An interval that never passes: tests flush when they want.
    return LiveInstrument(name, drain=Drain([sink], interval_s=3600), capacity=capacity)


def through_one_step(obs: Instrument, record: StepRecord) -> None:
    with obs.intake:
        pass
    with obs.schedule:
        pass
    with obs.execute:
        pass
    with obs.wait:
        pass
    with obs.update:
        pass
    obs.step(record)
    with obs.publish:
        pass


# The interface and the catalogue.


def test_catalogue_and_interface_name_the_same_phases() -> None:
    attributes = {name for name, kind in Instrument.__annotations__.items() if kind is Span}
    assert attributes == {phase.label for phase in Phase} == {phase.label for phase in PHASES}
    assert set(EVENTS) == set(Event)
    assert set(STARTUP_PHASES) == set(StartupPhase)


@pytest.mark.parametrize("implementation", [LiveInstrument, Recorder])
def test_implementations_have_the_full_signatures(implementation: type[Instrument]) -> None:
    for name, method in inspect.getmembers(Instrument, inspect.isfunction):
        if not name.startswith("_"):
            own = inspect.signature(getattr(implementation, name))
            assert own.parameters == inspect.signature(method).parameters, name


def test_implementations_record_what_the_null_instrument_ignores() -> None:
    for name, method in inspect.getmembers(Instrument, inspect.isfunction):
        if not name.startswith("_") and name != "close":
            assert getattr(LiveInstrument, name) is not method, name


def test_null_shares_one_span_and_returns_nothing() -> None:
    spans = {getattr(NULL, phase.label) for phase in Phase}
    assert len(spans) == 1
    record = a_step()
    through_one_step(NULL, record)
    NULL.event(Event.PREEMPT, "a", value=3)
    assert record.phases == ()
    assert not NULL.enabled
    assert NULL.for_thread("x") is NULL
    assert NULL.flush()
    assert NULL.phase_totals_ns() == {}


@pytest.mark.parametrize("obs", [NULL, Recorder(), LiveInstrument(ThreadName.CORE_LOOP)])
@pytest.mark.parametrize("phase", list(Phase))
def test_spans_do_not_swallow_errors(obs: Instrument, phase: Phase) -> None:
    with pytest.raises(KeyError, match="boom"), getattr(obs, phase.label):
        raise KeyError("boom")
    with getattr(obs, phase.label):
        pass


def test_narrow_import_is_light_and_knows_nothing_of_the_engine() -> None:
    code = (
        "import sys, instrumentation, instrumentation.setup; "
        "heavy = {'torch', 'numpy', 'transformers', 'engine', 'google', 'rich', 'zmq'}; "
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_exported_name_is_there_and_those_of_the_frontend_load_late() -> None:
    for name in instrumentation.__all__:
        assert getattr(instrumentation, name).__module__.startswith(("instrumentation", "typing"))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = instrumentation.Nothing
    code = (
        "import sys, instrumentation; late = 'instrumentation.metrics.frontend'; "
        "assert late not in sys.modules; instrumentation.Metrics().snapshot(); "
        "assert late in sys.modules; print(instrumentation.ConsoleStatus.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ConsoleStatus"


# Groups and records.


def test_step_takes_the_phases_since_the_step_before() -> None:
    clock = FakeClock(now_ns=100, tick_ns=10)
    obs = LiveInstrument(ThreadName.CORE_LOOP, clock=clock)
    first, second = a_step(1), a_step(2)
    through_one_step(obs, first)
    with obs.schedule:
        clock.advance(1000)
    obs.step(second)
    assert first.phases == (
        *(Phase.INTAKE, 100, 110, Phase.SCHEDULE, 120, 130, Phase.EXECUTE, 140, 150),
        *(Phase.WAIT, 160, 170, Phase.UPDATE, 180, 190),
    )
    assert second.phases == (Phase.PUBLISH, 200, 210, Phase.SCHEDULE, 220, 1230)


def test_worker_and_core_phases_do_not_mix_on_one_instrument() -> None:
    obs = LiveInstrument(ThreadName.CORE_LOOP)
    worker_record = WorkerStepRecord(step=1, begin_ns=1, end_ns=2)
    record = a_step()
    with obs.execute, obs.forward:
        obs.worker_step(worker_record)
    obs.step(record)
    assert record.phases[::3] == (Phase.EXECUTE,)
    assert worker_record.phases == ()
    obs.worker_step(worker_record)
    assert worker_record.phases[::3] == (Phase.FORWARD,)


def test_recorder_agrees_with_the_live_instrument() -> None:
    records = []
    for make in (Recorder, lambda clock: LiveInstrument(ThreadName.CORE_LOOP, clock=clock)):
        obs = make(FakeClock(tick_ns=7))
        record = a_step()
        through_one_step(obs, record)
        records.append(record)
    assert records[0] == records[1]


def test_recorder_keeps_errors_and_refuses_re_entry() -> None:
    obs = Recorder(FakeClock())
    with pytest.raises(ZeroDivisionError), obs.forward:
        _ = 1 // 0
    assert isinstance(obs.spans[0].error, ZeroDivisionError)
    with pytest.raises(AssertionError, match="entered while it is open"), obs.forward, obs.forward:
        pass


def test_records_cross_the_wire_unchanged() -> None:
    obs = Recorder(FakeClock(tick_ns=3))
    record = StepRecord(step=7, begin_ns=2**60, end_ns=2**60 + 5, scheduled=(3, 1, 9, 120))
    through_one_step(obs, record)
    data = msgspec.msgpack.encode(record)
    assert msgspec.msgpack.decode(data, type=StepRecord) == record


def test_loose_phases_reach_the_ring_and_add_up() -> None:
    sink = MemorySink()
    clock = FakeClock(tick_ns=5)
    obs = LiveInstrument(ThreadName.CALLER, drain=Drain([sink], interval_s=3600), clock=clock)
    for _ in range(3):
        with obs.send:
            clock.advance(100)
    with obs.receive:
        pass
    assert obs.phase_totals_ns() == {"send": 3 * 105, "receive": 5}
    obs.close()
    [(_, spans)] = sink.records
    assert isinstance(spans, Spans)
    assert spans.phases[::3] == (Phase.SEND,) * 3 + (Phase.RECEIVE,)


def test_io_threads_ride_with_the_step() -> None:
    clock = FakeClock(tick_ns=5)
    obs = LiveInstrument(ThreadName.CORE_LOOP, clock=clock)
    io = obs.for_thread(ThreadName.INPUT_IO)
    with io.decode:
        clock.advance(95)
    record = a_step()
    obs.step(record)
    assert record.io_phase_totals_ns == (Phase.DECODE, 100)


def test_a_loop_that_never_steps_does_not_grow() -> None:
    sink = MemorySink()
    obs = a_live_instrument(sink)
    for _ in range(1000):
        with obs.intake:
            pass
    record = a_step()
    obs.step(record)
    obs.close()
    assert len(record.phases) <= 3 * 70
    num_spans = sum(len(entry.phases) for _, entry in sink.records if isinstance(entry, Spans))
    assert num_spans + len(record.phases) == 3 * 1000


def test_phases_after_the_last_step_are_kept_at_close() -> None:
    sink = MemorySink()
    obs = a_live_instrument(sink)
    through_one_step(obs, a_step())
    obs.close()
    assert [type(record) for _, record in sink.records] == [StepRecord, Spans]
    assert sink.is_closed


# Rings, threads and drops.


def test_full_ring_drops_the_new_and_counts() -> None:
    ring = Ring(4, name="x", native_id=1)
    for number in range(10):
        ring.append(number)
    assert ring.take() == [0, 1, 2, 3]
    assert ring.num_dropped == 6
    ring.append(10)
    assert ring.take() == [10]
    assert ring.num_dropped == 6


def test_ring_loses_nothing_between_two_threads() -> None:
    ring = Ring(64, name="x", native_id=1)
    num_entries = 50_000
    taken: list[int] = []
    is_done = threading.Event()

    def drain() -> None:
        while not is_done.is_set() or len(ring):
            taken.extend(ring.take())

    thread = threading.Thread(target=drain)
    thread.start()
    for number in range(num_entries):
        ring.append(number)
    is_done.set()
    thread.join()
    assert len(taken) + ring.num_dropped == num_entries
    assert taken == sorted(taken)
    assert len(set(taken)) == len(taken)


def test_threads_keep_their_own_order_and_track() -> None:
    sink = MemorySink()
    obs = LiveInstrument(ThreadName.CORE_LOOP, drain=Drain([sink], interval_s=0.001))
    num_events = 2000

    def write(name: str) -> None:
        own = obs.for_thread(name)
        for number in range(num_events):
            own.event(Event.RESUME, name, value=number)
            if number % 100 == 0:
                time.sleep(0.001)

    threads = [threading.Thread(target=write, args=(f"thread {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    obs.close()
    assert obs.num_drops() == 0
    for number, name in sink.threads.items():
        values = [
            record.value
            for thread, record in sink.records
            if thread == number and isinstance(record, EventRecord)
        ]
        assert values == (list(range(num_events)) if name.startswith("thread") else [])
    assert len(sink.threads) == 5


def test_drops_are_told_to_sinks_and_to_step_records() -> None:
    sink = MemorySink()
    obs = a_live_instrument(sink, capacity=3)
    for _ in range(5):
        obs.event(Event.ABORT)
    record = a_step()
    obs.step(record)
    assert record.num_telemetry_drops == 2
    assert obs.num_drops() == 3
    obs.close()
    assert [record for _, record in sink.records if isinstance(record, Drops)] == [Drops(3)]


# Failing sinks.


@pytest.mark.parametrize("method", ["write", "flush", "thread", "close"])
def test_failing_sink_is_logged_once_detached_and_counted(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = MemorySink(), MemorySink()
    bad.failing.add(method)
    obs = LiveInstrument(ThreadName.CORE_LOOP, drain=Drain([bad, good], interval_s=3600))
    with caplog.at_level(logging.ERROR, logger="isinglass.telemetry"):
        for step in range(4):
            obs.step(a_step(step))
            assert obs.flush()
        obs.close()
    assert len(caplog.records) == 1
    assert method in caplog.text
    assert [record.step for _, record in good.records if isinstance(record, StepRecord)] == [
        *range(4)
    ]
    lost = {"write": 4, "flush": 3, "thread": 4, "close": 0}[method]
    assert obs.num_drops() == lost == 4 - len(bad.records)
    assert good.is_closed


def test_stuck_sink_neither_blocks_the_step_nor_the_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("instrumentation.record.live._CLOSE_TIMEOUT_S", 0.05)
    is_stuck, release = threading.Event(), threading.Event()

    class StuckSink(MemorySink):
        def write(self, thread: int, records: Iterable[Record]) -> None:
            is_stuck.set()
            was_released.append(release.wait(PATIENCE_S))

    was_released: list[bool] = []

    obs = LiveInstrument(
        ThreadName.CORE_LOOP, drain=Drain([StuckSink()], interval_s=0.001), capacity=16
    )
    try:
        obs.step(a_step())
        assert is_stuck.wait(PATIENCE_S)
        for step in range(100):
            obs.step(a_step(step))
        assert not obs.flush(timeout_s=0.01)
        obs.close()
        assert not was_released, "something has waited for the sink"
        assert obs.num_drops() == 100 - 16
        assert "stuck" in caplog.text
    finally:
        release.set()


def test_errors_and_drops_are_kept_by_sink() -> None:
    bad, good = MemorySink(), MemorySink()
    bad.failing.add("write")
    good.name = SinkName.PROMETHEUS
    drain = Drain([bad, good], interval_s=3600)
    obs = LiveInstrument(ThreadName.CORE_LOOP, drain=drain)
    for step in range(4):
        obs.step(a_step(step))
        assert obs.flush()
    obs.telemetry_failed(SinkName.CONSOLE, ValueError("no"))
    obs.telemetry_failed(SinkName.CONSOLE, ValueError("no"))
    assert obs.telemetry_errors() == {"opentelemetry": 1, "console": 2}
    assert drain.drops == {SinkName.OPENTELEMETRY: 4}
    for _ in range(8192 + 3):
        obs.event(Event.ABORT)
    assert obs.telemetry_drops() == {"opentelemetry": 4, "ring": 3}
    assert obs.num_drops() == 7
    assert obs.flush()
    record = a_step()
    obs.step(record)
    assert record.telemetry_errors == (SinkName.OPENTELEMETRY, 1, SinkName.CONSOLE, 2)
    obs.close()


def test_ranges_that_fail_are_left_out_and_nobody_notices() -> None:
    class BadRanges:
        num_calls = 0

        def prepare(self, name: str) -> str:
            return name

        def push(self, handle: str) -> None:
            self.num_calls += 1
            if self.num_calls > 2:
                raise OSError("the tool is gone")

        def pop(self) -> None:
            return None

    ranges = BadRanges()
    obs = LiveInstrument(ThreadName.CORE_LOOP)
    obs.set_ranges(ranges)
    record = a_step()
    for _ in range(3):
        through_one_step(obs, record)
    assert ranges.num_calls == 3
    assert obs.telemetry_errors() == {"nvtx": 1}
    assert len(record.phases) == 3 * 6


# Recording, begun and ended while the engine runs.


def test_recording_can_be_begun_and_ended_any_number_of_times(tmp_path: Path) -> None:
    obs = setup(ObservabilityConfig(), role=Role.CORE)
    worker = obs.for_thread(ThreadName.WORKER)
    for number in range(20_000):
        obs.event(Event.RESUME, value=number)
        with worker.decode:
            pass
    assert obs.num_drops() == 0, "what nobody records cannot be lost"
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        assert not obs.is_recording
        assert obs.start_recording(str(folder))
        assert obs.is_recording
        assert not obs.start_recording(str(tmp_path / "other")), "one at a time"
        obs.step(a_step(attempt))
        worker.worker_step(WorkerStepRecord(step=attempt, begin_ns=1, end_ns=2))
        with worker.decode:
            pass
        assert obs.stop_recording()
        assert not obs.stop_recording()
        obs._ring.append(a_step(99))  # left by a thread that did not know yet
        [path] = folder.iterdir()
        frames = read_journal(path).frames
        assert [record.step for _, record in frames if isinstance(record, StepRecord)] == [attempt]
        assert [type(record).__name__ for thread, record in frames if thread == 1] == [
            *("ThreadStarted", "WorkerStepRecord", "Spans")
        ]
    assert not (tmp_path / "other").exists()
    obs.close()
    assert not obs.start_recording(str(tmp_path / "late"))
    assert not (tmp_path / "late").exists()


def test_a_recording_that_cannot_begin_raises_and_changes_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    obs = setup(ObservabilityConfig(), role=Role.CORE)
    with pytest.raises(OSError, match="file"):
        obs.start_recording(str(blocked))
    assert not obs.stop_recording()
    assert obs.start_recording(str(tmp_path / "run"))
    obs.close()
    assert not NULL.start_recording(str(tmp_path / "null"))


@pytest.mark.parametrize("num_good", [0, 1])
def test_a_recording_on_a_full_disk_raises_and_leaves_no_file(
    num_good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obs = setup(ObservabilityConfig(), role=Role.CORE)
    write, written = os.write, []

    def write_what_fits(file: int, data: bytes) -> int:
        written.append(len(data))
        if len(written) > num_good:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    num_files = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr("instrumentation.record.journal.os.write", write_what_fits)
        with pytest.raises(OSError, match="No space left"):
            obs.start_recording(str(tmp_path / "run"))
    assert list((tmp_path / "run").iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == num_files
    assert obs.start_recording(str(tmp_path / "run"))
    obs.close()


def test_a_recording_that_failed_can_be_ended_and_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obs = setup(ObservabilityConfig(), role=Role.CORE, run_dir=str(tmp_path / "1"))
    with monkeypatch.context() as patch:
        patch.setattr("instrumentation.record.journal.os.write", lambda *_: 1 // 0)
        obs.step(a_step(1))
        assert obs.flush()
    for step in range(2, 5):
        obs.step(a_step(step))
        assert obs.flush()
    assert obs.num_drops() == 3, "what it missed since"
    obs.stop_recording()
    assert obs.early_end == "it could not be written: integer division or modulo by zero"
    obs.step(a_step(5))
    assert obs.flush()
    assert obs.num_drops() == 3, "it is no longer missed"
    assert obs.start_recording(str(tmp_path / "2"))
    obs.step(a_step(6))
    obs.close()
    [path] = (tmp_path / "2").iterdir()
    frames = read_journal(path).frames
    assert [record.step for _, record in frames if isinstance(record, StepRecord)] == [6]


# The price, watched.


def test_throttle_rises_with_the_share_and_falls_when_calm() -> None:
    changes: list[tuple[int, float]] = []
    throttle = Throttle(
        0.05, max_level=2, apply=lambda *change: changes.append(change), window_ns=100
    )
    readings = [(0, 0), (50, 40), (100, 10), (200, 20), (300, 30), (400, 34), (500, 36), (600, 38)]
    for now_ns, processor_ns in readings:
        throttle.observe(now_ns, processor_ns)
    assert changes == [(1, 0.1), (2, 0.1), (1, 0.02), (0, 0.02)]
    assert throttle.level == 0


def test_levels_of_the_throttle_leave_out_loose_spans_then_phases() -> None:
    sink = MemorySink()
    recorder = FlightRecorder(8, role=Role.CORE)
    drain = Drain([sink], interval_s=3600)
    obs = LiveInstrument(ThreadName.CORE_LOOP, drain=drain, recorder=recorder)
    seen = []
    for level in (0, 1, 2, 1, 0):
        obs.process.apply_level(level, 0.1)
        sink.records.clear()
        with obs.decode:
            pass
        record = a_step(level)
        through_one_step(obs, record)
        assert obs.flush()
        kinds = [type(one).__name__ for _, one in sink.records]
        seen.append(("Spans" in kinds, bool(record.phases)))
        assert "StepRecord" in kinds, "steps are never left out"
        assert "EventRecord" in kinds, "the change is on record"
    assert seen == [(True, True), (False, True), (False, False), (False, True), (True, True)]
    assert obs.phase_totals_ns()["decode"] > 0, "the metrics keep their totals"
    assert [event.value for event in recorder.events] == [0, 1, 2, 1, 0]
    obs.close()


def test_the_drain_thread_tells_its_processor_time(tmp_path: Path) -> None:
    obs = setup(ObservabilityConfig(), role=Role.CORE, run_dir=str(tmp_path))

    def is_told() -> int:
        obs.event(Event.RESUME)
        return obs.telemetry_ns()

    wait_until(is_told)
    record = a_step()
    obs.step(record)
    assert 0 < record.telemetry_ns <= obs.telemetry_ns()
    obs.close()


# Setting up.


def test_setup_chooses_by_config(tmp_path: Path) -> None:
    nothing = ObservabilityConfig(disable_log_stats=True, flight_recorder_steps=0)
    assert setup(nothing, role=Role.CORE) is NULL
    assert setup(ObservabilityConfig(), role=Role.CORE).enabled
    with pytest.raises(ValueError, match="must be one of"):
        setup(ObservabilityConfig(), role="frontend")
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(ValueError, match="name a trace_dir that can be written to"):
        setup(ObservabilityConfig(), role=Role.CORE, run_dir=str(blocked))


def test_setup_writes_a_journal_while_running(tmp_path: Path) -> None:
    obs = setup(ObservabilityConfig(), role=Role.CORE, run_dir=str(tmp_path / "run"))
    through_one_step(obs, a_step(1))
    obs.request_arrived(5, "abc", arrival_ns=3, num_prompt_tokens=4)
    obs.request(RequestTimeline(request_id="abc"))
    obs.startup(StartupPhase.IMPORT, 1, 2)
    # The drain thread brings it out without being asked.
    [path] = (tmp_path / "run").glob("core.*.journal")
    wait_until(lambda: len(read_journal(path).frames) >= 7)
    kinds = [type(record).__name__ for _, record in read_journal(path).frames]
    assert kinds == [
        *("ProcessHeader", "ClockAnchor", "ThreadStarted"),
        *("StepRecord", "RequestArrived", "RequestTimeline", "StartupRecord"),
    ]
    obs.close()
    obs.close()
    through_one_step(obs, a_step(2))


def test_two_engines_in_one_process_write_two_journals(tmp_path: Path) -> None:
    for _ in range(2):
        setup(ObservabilityConfig(), role=Role.CALLER, run_dir=str(tmp_path)).close()
    assert len(list(tmp_path.glob("caller.*.journal"))) == 2


# Price, as ratios within one run.


def test_price_of_a_step_off_and_on(tmp_path: Path) -> None:
    """Seven spans and a record, off and on, against sixteen bare Python calls.

    A yardstick in the same run makes a slow machine harmless; the minimum over many short runs
    leaves the noise of other processes out.
    """
    record = a_step()

    def bare() -> None:
        def call() -> None:
            return None

        for _ in range(2):
            call(), call(), call(), call(), call(), call(), call(), call()

    def price(obs: Instrument) -> float:
        def step() -> None:
            with obs.intake:
                pass
            with obs.schedule:
                pass
            with obs.execute:
                pass
            with obs.wait:
                pass
            with obs.update:
                pass
            with obs.publish:
                pass
            with obs.forward:
                pass
            obs.step(record)

        return min(timeit.repeat(step, number=200, repeat=60))

    yardstick = min(timeit.repeat(bare, number=200, repeat=60))
    live = setup(ObservabilityConfig(), role=Role.CORE, run_dir=str(tmp_path))
    try:
        off, on = price(NULL), price(live)
    finally:
        live.close()
    assert off < 3 * yardstick
    assert on < 8 * off
