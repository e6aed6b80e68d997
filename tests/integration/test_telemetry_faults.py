"""Whatever fails in telemetry: the same tokens, no waiting, a count that rises, bounded memory."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from instrumentation import SinkName, StepRecord
from instrumentation.record.live import RING_CAPACITY, LiveInstrument
from instrumentation.record.records import Record, ThreadStarted
from instrumentation.record.sinks import JournalSink
from tests.integration.conftest import SMALL
from tests.support.measures import series
from tests.support.scripts import script
from tests.tiny_models import VOCAB_SIZE
from tests.waiting import PATIENCE_S, wait_until

SETTINGS = SMALL | {"skip_tokenizer_init": True, "enable_multiprocessing": False}
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=7, ignore_eos=True)
PROMPTS = [[(3 * one + token) % (VOCAB_SIZE - 9) + 5 for token in range(20)] for one in range(4)]


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, [PARAMS, DRAWN, PARAMS, DRAWN], use_tqdm=False)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[list[int]]:
    """Tokens of an engine that nobody watches."""
    with LLM(tiny_llama, disable_log_stats=True, flight_recorder_steps=0, **SETTINGS) as llm:
        return generate(llm)


def caller_obs(llm: LLM) -> LiveInstrument:
    obs = llm.llm_engine.obs
    assert isinstance(obs, LiveInstrument)
    return obs


def core_obs(llm: LLM) -> LiveInstrument:
    obs = llm.llm_engine.engine_core._core.obs
    assert isinstance(obs, LiveInstrument)
    return obs


def errors(llm: LLM, sink: SinkName) -> float:
    """What the metrics say of a sink's errors, of all processes."""
    values = series(llm, "isinglass_telemetry_errors_total")
    return sum(value for labels, value in values.items() if sink.label in labels)


class BadSink:
    """Raises, or blocks until it is released."""

    name = SinkName.OPENTELEMETRY

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def thread(self, thread: int, started: ThreadStarted) -> None:
        return None

    def write(self, thread: int, records: Iterable[Record]) -> None:
        self._work()

    def flush(self) -> None:
        return None

    def close(self) -> None:
        return None


def fail(*_: object, **__: object) -> Any:
    raise OSError("telemetry is broken on purpose")


class BadRanges:
    """A tool that breaks at the first range."""

    prepare = push = pop = staticmethod(fail)


@contextmanager
def fault_in(llm: LLM, sink: SinkName, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Break one sink of both processes' instruments."""
    observer = llm._observer
    assert observer is not None
    if sink is SinkName.JOURNAL:
        patch.setattr(JournalSink, "write", fail)
    elif sink is SinkName.OPENTELEMETRY:
        for obs in (caller_obs(llm), core_obs(llm)):
            obs.process.drain.attach(BadSink(fail))
    elif sink is SinkName.METRICS:
        patch.setattr(type(observer.metrics), "observe_step", fail)
    elif sink is SinkName.CONSOLE:
        patch.setattr(type(observer.console), "observe", fail)
    elif sink is SinkName.ATTRIBUTION:
        patch.setattr(type(observer.history), "observe", fail)
    elif sink is SinkName.NVTX:
        core_obs(llm).set_ranges(BadRanges())
    elif sink is SinkName.FLIGHT_RECORDER:
        patch.setattr("instrumentation.record.flight.FlightRecorder.dump", fail)
        assert core_obs(llm).process.dump_flight(0) is None
    yield


@pytest.mark.parametrize(
    "sink",
    [
        SinkName.JOURNAL,
        SinkName.OPENTELEMETRY,
        SinkName.METRICS,
        SinkName.CONSOLE,
        SinkName.ATTRIBUTION,
        SinkName.NVTX,
        SinkName.FLIGHT_RECORDER,
    ],
    ids=lambda sink: sink.label,
)
def test_a_sink_that_raises_is_counted_and_changes_no_token(
    sink: SinkName,
    tiny_llama: Path,
    tmp_path: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLM(tiny_llama, trace_dir=tmp_path, **SETTINGS) as llm:
        assert errors(llm, sink) == 0
        with fault_in(llm, sink, monkeypatch):
            assert generate(llm) == expected
            caller_obs(llm).flush()
            core_obs(llm).flush()
            assert generate(llm) == expected
        monkeypatch.undo()
        assert generate(llm) == expected
        assert errors(llm, sink) >= 1
        assert sum(series(llm, "isinglass_telemetry_errors_total").values()) == errors(llm, sink)
        if sink in (SinkName.JOURNAL, SinkName.OPENTELEMETRY):
            assert sum(series(llm, "isinglass_telemetry_drops_total").values()) > 0


def test_a_stuck_sink_blocks_neither_steps_nor_the_end(
    tiny_llama: Path, tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocked for as long as the test lasts, in both processes; memory stays within the rings."""
    monkeypatch.setattr("instrumentation.record.live._CLOSE_TIMEOUT_S", 0.3)
    released = threading.Event()
    stuck: list[object] = []
    unstuck: list[bool] = []

    def get_stuck() -> None:
        stuck.append(None)
        unstuck.append(released.wait(PATIENCE_S))

    llm = LLM(tiny_llama, trace_dir=tmp_path, **SETTINGS)
    try:
        for obs in (caller_obs(llm), core_obs(llm)):
            obs.process.drain.attach(BadSink(get_stuck))
        for _ in range(3):
            assert generate(llm) == expected
        wait_until(lambda: len(stuck) == 2)
        assert not core_obs(llm).flush(timeout_s=0.01)
        for number in range(3 * RING_CAPACITY):
            core_obs(llm).step(StepRecord(step=number, begin_ns=1, end_ns=2))
        assert len(core_obs(llm)._ring) == RING_CAPACITY
        assert core_obs(llm).num_drops() >= RING_CAPACITY
        assert generate(llm) == expected
        llm.shutdown()
        assert not unstuck, "something has waited for a sink"
    finally:
        released.set()
        llm.shutdown()


def test_numbers_that_make_no_sense_change_nothing(
    tiny_llama: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_llama, **SETTINGS) as llm:
        client = llm.llm_engine.engine_core
        get_output = client.get_output

        def corrupted() -> Any:
            message = get_output()
            if message.step is not None:
                message.step.num_context_tokens = -5
                message.step.num_evicted_blocks = float("nan")
                message.step.prefix_query_tokens = -1
            if message.worker_step is not None:
                message.worker_step.end_ns = message.worker_step.begin_ns - 1000
                message.worker_step.device_time_ns = float("inf")
            return message

        monkeypatch.setattr(client, "get_output", corrupted)
        assert generate(llm) == expected
        monkeypatch.undo()
        assert generate(llm) == expected
        assert series(llm, "isinglass_generation_tokens_total")
        assert str(llm.request_timeline("0"))


def test_a_full_disk_ends_the_recording_not_the_engine(tiny_llama: Path) -> None:
    """No file may grow beyond a limit, in the caller and in the core: writes fail there."""
    body = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
import time
from pathlib import Path
from instrumentation.names import SinkName
llm = start(trace_dir="runs")
first = generate(llm, 20)
deadline = time.monotonic() + 180
def count():
    return sum(
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "isinglass_telemetry_errors_total"
        and SinkName.JOURNAL.label in metric.labels.values()
    )
while not count() and time.monotonic() < deadline:
    assert generate(llm, 20) == first
assert generate(llm, 20) == first
say("errors", int(count()))
say("largest", max(path.stat().st_size for path in Path(llm.run_dir).iterdir()))
llm.shutdown()
"""
    with script(body, model=tiny_llama) as running:
        assert int(running.wait_for("errors")) >= 1
        assert int(running.wait_for("largest")) <= 40_000
        code, _, err = running.finish()
        assert code == 0, err
        assert "is detached" in err
        running.assert_nothing_left()
