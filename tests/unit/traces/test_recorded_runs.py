"""What recorded runs say where it is awkward: begun amid load, several frontends, long labels."""

import argparse
import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from instrumentation import AdmissionStop, FlightReason, StepRecord, WorkerStepRecord
from instrumentation.names import Role
from instrumentation.record.flight import FlightRecorder
from instrumentation.record.journal import SUFFIX, JournalWriter, read_journal
from instrumentation.record.records import ProcessHeader
from tests.support.perfetto_files import load, step_slices
from tests.support.synthetic_run import SyntheticRun, write_synthetic_run
from traces.beginning import cut_at_beginning
from traces.cli import add_flight_commands
from traces.flight import read_flight, render_flight
from traces.intervals import length, merge, overlap
from traces.journal_reader import read_run
from traces.perfetto import write_perfetto
from traces.run_summary import RunSummary
from traces.summary import summarize, summarize_run
from traces.summary_text import render_summary

BEGUN_AT = 8
"""The first step whose end was recorded."""


def rendered(summary: RunSummary) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_summary(summary))
    return console.export_text()


def write_tail(folder: Path, run: SyntheticRun) -> None:
    """Record the same engine from later on: the steps that end after that, with their phases."""
    folder.mkdir()
    for file in run.folder.glob(f"*{SUFFIX}"):
        journal = JournalWriter(folder / file.name)
        for thread, record in read_journal(file).frames:
            if isinstance(record, StepRecord | WorkerStepRecord) and record.step < BEGUN_AT:
                continue
            journal.write(record, thread=thread)
        journal.close()


@pytest.mark.parametrize("has_phases", [True, False])
def test_a_recording_begun_amid_load_adds_up(tmp_path: Path, has_phases: bool) -> None:
    run = write_synthetic_run(tmp_path / "run", seed=6, is_async=True)
    write_tail(tmp_path / "tail", run)
    steps = [step for step in run.steps if step.step >= BEGUN_AT]
    first = steps[0]
    known_ns = min(first.phases[1::3])
    assert first.begin_ns < known_ns < first.end_ns, "it was scheduled before the recording"
    tail = read_run(tmp_path / "tail")
    if not has_phases:
        known_ns = first.begin_ns + 1000
        for process in tail.processes:
            process.header.started_ns = known_ns
        for step in tail.of_type(StepRecord):
            step.phases = ()
    summary = summarize_run(tail)
    window = [(known_ns, steps[-1].end_ns)]
    assert summary.num_cut_steps == 1
    assert summary.elapsed_ns == length(window)
    assert summary.budget.duration_ns == summary.elapsed_ns - summary.idle_ns
    worker_steps = merge(
        (step.begin_ns, step.end_ns) for step in run.worker_steps if step.step >= BEGUN_AT
    )
    assert sum(one.total_ns for one in summary.steps_by_kind) == overlap(window, worker_steps)
    assert summary.latency.count == len(steps) - 1, "what the one cut took is not known"
    assert "1 of the steps began before the recording" in rendered(summary)
    if has_phases:
        spans = [
            (begin, end)
            for step in run.steps
            for begin, end in zip(step.phases[1::3], step.phases[2::3], strict=True)
        ]
        [core] = [one for one in summary.threads if one.name == "core loop"]
        assert core.unexplained_ns == length(window) - overlap(window, merge(spans))


def test_a_recording_begun_amid_load_is_drawn_from_its_beginning(tmp_path: Path) -> None:
    run = write_synthetic_run(tmp_path / "run", seed=6, is_async=True)
    write_tail(tmp_path / "tail", run)
    [first] = [step for step in run.steps if step.step == BEGUN_AT]
    loaded = load(write_perfetto(tmp_path / "tail").read_bytes())
    assert step_slices(loaded, "core")[BEGUN_AT].begin_ns == min(first.phases[1::3])


def test_frontends_are_named_apart(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path, seed=4)
    assert "pid" not in rendered(summarize(tmp_path))
    [file] = tmp_path.glob(f"caller.*{SUFFIX}")
    journal = JournalWriter(tmp_path / f"caller.4101{SUFFIX}")
    for thread, record in read_journal(file).frames:
        if isinstance(record, ProcessHeader):
            record = msgspec.structs.replace(record, pid=4101)
        journal.write(record, thread=thread)
    journal.close()
    text = rendered(summarize(tmp_path))
    for pid in (4100, 4101):
        # At start-up, and among the threads.
        assert text.count(f"caller pid {pid}") == 2
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_whole_run_is_not_cut(tmp_path: Path, is_async: bool) -> None:
    write_synthetic_run(tmp_path, seed=6, is_async=is_async)
    whole = read_run(tmp_path)
    assert cut_at_beginning(whole) == (whole, 0)
    # Phases that the throttle left out at first are no reason either.
    for step in whole.steps[:5]:
        step.phases = ()
    assert cut_at_beginning(whole) == (whole, 0)


def flight_file(folder: Path) -> Path:
    """A flight record with a long label, a decision and large numbers."""
    recorder = FlightRecorder(8, role=Role.CORE, folder=str(folder))
    step = StepRecord(
        step=123_456,
        begin_ns=10**9,
        end_ns=3 * 10**9,
        num_context_requests=128,
        num_context_tokens=16_384,
        num_generation_requests=100,
        num_generation_tokens=100,
        num_blocks_used=12_000,
        num_blocks_free=345,
        admission_stop=AdmissionStop.MAX_NUM_SEQS,
        admission_stop_request_num=7,
    )
    recorder.steps.append(step)
    path = recorder.dump(FlightReason.CRASH, "it broke")
    assert path is not None
    return Path(path)


LONG_LABEL = "execute_context_128(16384)_generation_100(100)"


@pytest.mark.parametrize("width", [80, 100, 120])
def test_labels_of_a_flight_record_stay_whole(tmp_path: Path, width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    console.print(render_flight(read_flight(flight_file(tmp_path))))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert LONG_LABEL in text
    assert all(len(line) <= width for line in text.splitlines())


def test_a_flight_record_has_room_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    parser = argparse.ArgumentParser()
    add_flight_commands(parser.add_subparsers())
    arguments = parser.parse_args(["flight", "show", str(flight_file(tmp_path))])
    assert arguments.handler(arguments) == 0
    [line] = [one for one in capsys.readouterr().out.splitlines() if LONG_LABEL in one]
    for part in ("123456", "2,000.0", "12,000"):
        assert part in line, part
