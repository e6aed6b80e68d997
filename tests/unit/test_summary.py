"""The summary against sums made from the records, its rendering and its commands."""

import argparse
import io
import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from instrumentation import RequestTimeline
from tests.unit.synthetic_run import write_synthetic_run
from traces.cli import add_trace_commands
from traces.intervals import length, merge, overlap
from traces.journal_reader import read_run
from traces.summary import quantiles, summarize
from traces.summary_text import render_summary

MODES = [(False, False), (True, False), (False, True)]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_trace_commands(parser.add_subparsers())
    return parser.parse_args(arguments)


@pytest.mark.parametrize(("is_async", "is_killed"), MODES)
def test_counts_are_those_of_the_records(tmp_path: Path, is_async: bool, is_killed: bool) -> None:
    run = write_synthetic_run(tmp_path, seed=4, is_async=is_async, is_killed=is_killed)
    summary = summarize(tmp_path)
    steps = run.steps
    assert summary.num_steps == len(steps)
    for groups in (summary.steps_by_kind, summary.steps_by_label):
        assert sum(group.durations.count for group in groups) == len(steps)
        assert sum(group.num_tokens for group in groups) == sum(
            step.num_scheduled_tokens for step in steps
        )
        assert sum(group.total_ns for group in groups) == sum(
            step.end_ns - step.begin_ns for step in steps
        )
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
        assert thread.steps_ns > 0 and thread.unexplained_ns > 0
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
        assert found.count == len(values) and found.max_ns == values[-1]
        assert found.mean_ns == pytest.approx(sum(values) / len(values))
    parts = (requests.queue, requests.prefill, requests.decode, requests.preempted)
    assert sum(part.mean_ns for part in parts) == pytest.approx(requests.e2e.mean_ns)


def test_quantiles_by_nearest_rank() -> None:
    assert quantiles(range(1, 101)).p50_ns == 50 and quantiles(range(1, 101)).p99_ns == 99
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
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render_summary(summarize(tmp_path)))
    text = console.export_text()
    for expected in (
        *("Where the time went", "unexplained", "schedule", "forward", "execute_context_"),
        *("its journal is cut off", "prefix tokens hit", "time to first token", "load_model"),
    ):
        assert expected in text


def test_rendering_of_a_run_without_steps(tmp_path: Path) -> None:
    run = write_synthetic_run(tmp_path, seed=4, num_requests=0)
    assert not run.steps
    summary = summarize(tmp_path)
    assert summary.elapsed_ns == 0 and summary.sampled_tokens_per_s == 0
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render_summary(summary))
    assert "0 steps" in console.export_text()


@pytest.mark.parametrize("is_async", [False, True])
def test_rendering_says_when_steps_overlap_and_cuts_no_label(
    tmp_path: Path, is_async: bool
) -> None:
    run = write_synthetic_run(tmp_path, seed=4, num_requests=4, is_async=is_async)
    console = Console(width=90, record=True, file=io.StringIO())
    console.print(render_summary(summarize(tmp_path)))
    text = console.export_text()
    assert ("steps overlap" in text) == is_async
    assert "\N{HORIZONTAL ELLIPSIS}" not in text and run.steps


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
    assert run.steps == written.steps and run.worker_steps == written.worker_steps
    assert sorted(run.of_type(RequestTimeline), key=lambda one: one.request_num) == (
        written.timelines
    )
    assert {(process.header.role, thread.name) for process, thread in run.threads()} == {
        ("caller", "caller"),
        ("core", "core loop"),
        ("core", "worker"),
    }
