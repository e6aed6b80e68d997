"""The summary against sums made from the records, its rendering and its commands."""

import argparse
import io
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from instrumentation import RequestTimeline, StepLabel, format_step_label
from instrumentation.record.journal import SUFFIX, JournalWriter
from instrumentation.record.records import ProcessHeader, ThreadStarted
from tests.support.synthetic_run import write_synthetic_run
from traces.cli import add_trace_commands
from traces.intervals import length, merge, overlap
from traces.journal_reader import read_run
from traces.run_summary import Quantiles, RunSummary, StepGroup
from traces.summary import quantiles, summarize, summarize_run
from traces.summary_text import render_summary

MODES = [(False, False), (True, False), (False, True)]


def rendered(summary: RunSummary, *, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render_summary(summary))
    return console.export_text()


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_trace_commands(parser.add_subparsers())
    return parser.parse_args(arguments)


@pytest.mark.parametrize(("is_async", "is_killed"), MODES)
def test_counts_are_those_of_the_records(tmp_path: Path, is_async: bool, is_killed: bool) -> None:
    run = write_synthetic_run(tmp_path, seed=4, is_async=is_async, is_killed=is_killed)
    summary = summarize(tmp_path)
    steps, worker_steps = run.steps, run.worker_steps
    assert summary.num_steps == len(steps)
    assert summary.are_steps_of_workers
    for groups in (summary.steps_by_kind, summary.steps_by_label):
        assert sum(group.durations.count for group in groups) == len(worker_steps)
        assert sum(group.num_tokens for group in groups) == sum(
            step.num_context_tokens + step.num_generation_tokens for step in worker_steps
        )
        total_ns = sum(group.total_ns for group in groups)
        assert total_ns == sum(step.end_ns - step.begin_ns for step in worker_steps)
        assert 0 < total_ns <= summary.elapsed_ns
    assert summary.latency.count == len(steps)
    assert summary.latency.max_ns == max(step.end_ns - step.begin_ns for step in steps)
    assert summary.num_sampled_tokens == sum(step.num_sampled_tokens for step in steps)
    assert summary.preemptions.count == sum(step.num_preempted for step in steps) > 0
    assert summary.prefix.query_tokens == sum(step.prefix_query_tokens for step in steps)
    assert summary.pool.peak_used == max(step.num_blocks_used for step in steps)
    assert summary.pool.num_blocks == 512
    assert summary.elapsed_ns == max(step.end_ns for step in steps) - steps[0].begin_ns
    assert summary.sampled_tokens_per_s == pytest.approx(
        summary.num_sampled_tokens / (summary.elapsed_ns * 1e-9)
    )
    assert [process.is_truncated for process in summary.processes] == [False, is_killed]
    if not is_killed:
        assert summary.num_sampled_tokens == summary.requests.num_generation_tokens
        assert summary.requests.by_finish_reason == {"length": len(run.timelines)}


@pytest.mark.parametrize(("is_async", "is_killed"), MODES)
def test_time_in_steps_is_explained_to_the_last_nanosecond(
    tmp_path: Path, is_async: bool, is_killed: bool
) -> None:
    write_synthetic_run(tmp_path, seed=6, is_async=is_async, is_killed=is_killed)
    summary = summarize(tmp_path)
    threads = {thread.name: thread for thread in summary.threads}
    assert list(threads) == ["caller", "core loop", "worker"]
    for name in ("core loop", "worker"):
        thread = threads[name]
        in_phases = sum(phase.in_steps_ns for phase in thread.phases)
        assert thread.steps_ns > 0
        assert thread.unexplained_ns > 0
        assert in_phases + thread.unexplained_ns == thread.steps_ns
    assert threads["core loop"].steps_ns + summary.idle_ns == summary.elapsed_ns
    assert threads["caller"].steps_ns == threads["caller"].unexplained_ns == 0


def test_intervals_of_requests(tmp_path: Path) -> None:
    run = write_synthetic_run(tmp_path, seed=8)
    requests = summarize(tmp_path).requests
    for name, attribute in (
        ("e2e", "e2e_ns"),
        ("queue", "queue_ns"),
        ("decode", "decode_ns"),
        ("ttft", "ttft_ns"),
    ):
        values = sorted(getattr(timeline, attribute) for timeline in run.timelines)
        found = getattr(requests, name)
        assert found.count == len(values)
        assert found.max_ns == values[-1]
        assert found.mean_ns == pytest.approx(sum(values) / len(values))
    parts = (requests.queue, requests.prefill, requests.decode, requests.preempted)
    assert sum(part.mean_ns for part in parts) == pytest.approx(requests.e2e.mean_ns)


def test_quantiles_by_nearest_rank() -> None:
    assert quantiles(range(1, 101)).p50_ns == 50
    assert quantiles(range(1, 101)).p99_ns == 99
    assert quantiles([7]) == quantiles([7.2])
    assert quantiles([]).count == 0
    chance = random.Random(1)
    for _ in range(50):
        values = [chance.randrange(1000) for _ in range(chance.randint(1, 40))]
        found = quantiles(values)
        for quantile, share in ((found.p50_ns, 0.5), (found.p99_ns, 0.99)):
            assert quantile in values
            assert sum(value <= quantile for value in values) >= share * len(values)
            assert sum(value < quantile for value in values) < share * len(values)


def test_interval_arithmetic_against_counting_points() -> None:
    chance = random.Random(2)

    def some() -> list[tuple[int, int]]:
        begins = [chance.randrange(60) for _ in range(chance.randint(0, 8))]
        return [(begin, begin + chance.randrange(15)) for begin in begins]

    def points(intervals: list[tuple[int, int]]) -> set[int]:
        return {point for begin, end in intervals for point in range(begin, end)}

    for _ in range(300):
        left, right = some(), some()
        assert length(merge(left)) == len(points(left))
        assert overlap(merge(left), merge(right)) == len(points(left) & points(right))


def test_rendering_names_the_remainder_and_the_flaws(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path, seed=4, is_killed=True)
    text = rendered(summarize(tmp_path), width=160)
    for expected in (
        *("Where the time went", "unexplained", "schedule", "forward", "execute_context_"),
        *(
            "its journal is cut off",
            "found in the prefix cache",
            "time to first token",
            "load_model",
        ),
    ):
        assert expected in text


def test_rendering_of_a_run_without_steps(tmp_path: Path) -> None:
    run = write_synthetic_run(tmp_path, seed=4, num_requests=0)
    assert not run.steps
    summary = summarize(tmp_path)
    assert summary.elapsed_ns == 0
    assert summary.sampled_tokens_per_s == 0
    assert "0 steps" in rendered(summary, width=160)


@pytest.mark.parametrize("is_async", [False, True])
def test_rendering_fits_80_columns_and_cuts_nothing(tmp_path: Path, is_async: bool) -> None:
    run = write_synthetic_run(tmp_path, seed=4, num_requests=30, is_async=is_async)
    summary = summarize(tmp_path)
    text = rendered(summary, width=80)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= 80
    lines = [line.split() for line in text.splitlines()]
    assert len(summary.steps_by_label) > 15 < len(run.steps)
    assert f"the 15 of {len(summary.steps_by_label)} that took most time" in text
    for number, group in enumerate(summary.steps_by_label):
        found = [line for line in lines if line[:1] == [group.name]]
        assert [line[1] for line in found] == [str(group.durations.count)] * (number < 15)
    for thread in summary.threads:
        for phase in thread.phases:
            assert any(phase.name in line and str(phase.count) in line for line in lines)


def test_long_labels_and_numbers_keep_their_line(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path, seed=4, num_requests=3)
    summary = summarize(tmp_path)
    label = format_step_label(StepLabel(128, 8192, 128, 128))
    group = StepGroup(label, 9, 3_600 * 10**9, Quantiles(9_999, 1, 10**10, 10**10, 1))
    summary = replace(summary, elapsed_ns=4_000 * 10**9, steps_by_kind=[], steps_by_label=[group])
    text = rendered(summary, width=80)
    [line] = [line for line in text.splitlines() if line.startswith(f"{label} ")]
    assert line.split()[1:] == ["9,999", "10,000.0", "10,000.0", "90.0", "%"]
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


@pytest.mark.parametrize("is_async", [False, True])
def test_without_a_worker_steps_are_the_cores_and_the_summary_says_so(
    tmp_path: Path, is_async: bool
) -> None:
    written = write_synthetic_run(tmp_path, seed=4, is_async=is_async)
    run = read_run(tmp_path)
    for _, thread in run.threads():
        if thread.name == "worker":
            thread.records.clear()
    summary = summarize_run(run)
    assert not summary.are_steps_of_workers
    assert sum(group.total_ns for group in summary.steps_by_kind) == sum(
        step.end_ns - step.begin_ns for step in written.steps
    )
    text = rendered(summary, width=80)
    assert "no worker's record" in text
    assert "may overlap" in " ".join(text.split())
    assert "no worker's record" not in rendered(summarize(tmp_path), width=80)


def test_workers_side_by_side_count_once(tmp_path: Path) -> None:
    written = write_synthetic_run(tmp_path, seed=4)
    [process] = [one for one in read_run(tmp_path).processes if one.header.role == "core"]
    header = ProcessHeader(
        role="worker",
        rank=1,
        pid=7,
        host="synthetic",
        version="0",
        python_version="3",
        argv=(),
        started_ns=process.header.started_ns,
    )
    journal = JournalWriter(tmp_path / f"worker.7{SUFFIX}")
    journal.write(header)
    journal.write(ThreadStarted("worker", 7))
    for step in written.worker_steps:
        journal.write(step)
    journal.close()
    summary = summarize(tmp_path)
    assert sum(group.durations.count for group in summary.steps_by_kind) == len(written.steps)
    assert [thread.rank for thread in summary.threads if thread.name == "worker"] == [0, 1]


def test_ascii_terminals_get_ascii_bars(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path, seed=4)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(width=80, file=stream).print(render_summary(summarize(tmp_path)))
    stream.flush()
    assert b"==" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    run = write_synthetic_run(folder, seed=4)
    arguments = parse("trace", "summary", str(folder))
    assert arguments.handler(arguments) == 0
    assert "unexplained" in capsys.readouterr().out
    arguments = parse("trace", "summary", str(folder), "--json")
    assert arguments.handler(arguments) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == len(run.steps)
    arguments = parse("trace", "convert", str(folder))
    assert arguments.handler(arguments) == 0
    assert capsys.readouterr().out.strip() == str(folder / "trace.pftrace")
    arguments = parse("trace", "convert", str(folder), "-o", str(tmp_path / "x"))
    assert arguments.handler(arguments) == 0
    assert (tmp_path / "x").read_bytes() == (folder / "trace.pftrace").read_bytes()


@pytest.mark.parametrize("command", ["summary", "convert"])
def test_commands_on_nothing_fail_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    arguments = parse("trace", command, str(tmp_path))
    assert arguments.handler(arguments) == 1
    assert "holds no readable journal" in capsys.readouterr().err


def test_run_is_sorted_out_by_thread(tmp_path: Path) -> None:
    written = write_synthetic_run(tmp_path, seed=4)
    run = read_run(tmp_path)
    assert run.steps == written.steps
    assert run.worker_steps == written.worker_steps
    assert sorted(run.of_type(RequestTimeline), key=lambda one: one.request_num) == (
        written.timelines
    )
    assert {(process.header.role, thread.name) for process, thread in run.threads()} == {
        ("caller", "caller"),
        ("core", "core loop"),
        ("core", "worker"),
    }
