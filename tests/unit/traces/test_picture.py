"""The picture, parsed back: well-formed, with every slice of the window, the same each time."""

import argparse
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from instrumentation.labels import format_step_label
from tests.support.synthetic_run import write_synthetic_run
from traces.cli import add_trace_commands
from traces.journal_reader import read_run
from traces.picture import WIDTH, draw, write_picture
from traces.picture_window import LEFT, MAX_REQUESTS, RIGHT, Window, ticks
from traces.request_slices import request_slices
from traces.requests import request_timelines
from traces.svg import text_width

SVG = "{http://www.w3.org/2000/svg}"
THREADS = ("caller", "core loop", "worker")


def parse(path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(path.read_text(encoding="utf-8"))


def slices(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [one for one in root.iter(f"{SVG}rect") if one.get("class") == f"slice {kind}"]


def names(elements: list[ElementTree.Element]) -> Counter[str]:
    tips = [one.findtext(f"{SVG}title") or "" for one in elements]
    return Counter(tip.partition(":")[0] for tip in tips)


def texts(root: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in root.iter(f"{SVG}text")]


def box(one: ElementTree.Element) -> tuple[float, float, float, float]:
    """What a text covers at most: left, top, right and bottom."""
    size, weight = float(one.get("font-size", "nan")), int(one.get("font-weight", "400"))
    width = text_width(one.text or "", size, weight=weight)
    share = {"start": 0.0, "middle": 0.5, "end": 1.0}[one.get("text-anchor", "start")]
    left, base = float(one.get("x", "nan")) - share * width, float(one.get("y", "nan"))
    return left, base - 0.7 * size, left + width, base


def lines(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """The corners of what leads from a text to its slice, and of the counters' curves."""
    strokes = ("#2b303b", "#5b95d1", "#8a6cc0")
    found = [one.get("d", "") for one in root.iter(f"{SVG}path") if one.get("stroke") in strokes]
    numbers = [[float(number) for number in re.findall(r"[-\d.]+", one)] for one in found]
    return [list(zip(one[::2], one[1::2], strict=True)) for one in numbers]


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_trace_commands(parser.add_subparsers())
    parsed = parser.parse_args(["trace", "picture", *arguments])
    return parsed.handler(parsed)


@pytest.mark.parametrize(("is_async", "is_killed"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("share", [(0.0, 1.0), (0.2, 0.6), (-0.1, 1.2)])
def test_every_slice_of_the_window_is_drawn_once(
    tmp_path: Path, is_async: bool, is_killed: bool, share: tuple[float, float]
) -> None:
    write_synthetic_run(tmp_path, seed=11, is_async=is_async, is_killed=is_killed)
    run = read_run(tmp_path)
    zero_ns = run.steps[0].begin_ns
    length_ns = max(step.end_ns for step in run.steps) - zero_ns
    begin_ms, end_ms = (part * length_ns / 1e6 for part in share)
    begin_ns, end_ns = (zero_ns + round(bound * 1e6) for bound in (begin_ms, end_ms))

    def shows(one_begin_ns: int, one_end_ns: int) -> bool:
        return one_begin_ns < end_ns and one_end_ns > begin_ns

    path = write_picture(tmp_path, tmp_path / "a.svg", begin_ms=begin_ms, end_ms=end_ms)
    root = parse(path)
    assert names(slices(root, "step")) == Counter(
        format_step_label(step.label)
        for step in run.worker_steps
        if shows(step.begin_ns, step.end_ns)
    )
    phases = Counter(
        span.phase.label
        for _, thread in run.threads()
        for span in thread.phase_spans()
        if thread.name in THREADS and shows(span.begin_ns, span.end_ns)
    )
    assert names(slices(root, "phase")) == phases
    assert phases.keys() < set(texts(root))
    tips = [one.findtext(f"{SVG}title") or "" for one in root.iter(f"{SVG}rect")]
    shown = [tip.removeprefix("request ") for tip in tips if tip.startswith("request ")]
    timelines = {one.request_id: one for one in request_timelines(run)}
    showing = [
        one
        for one in timelines.values()
        if shows(one.arrival_ns, max(one.end_ns, one.delivered_ns))
    ]
    assert len(set(shown)) == len(shown) == min(MAX_REQUESTS, len(showing))
    assert len(showing) > MAX_REQUESTS
    assert names(slices(root, "request")) == Counter(
        piece.name
        for request_id in shown
        for piece in request_slices(timelines[request_id])
        if shows(piece.begin_ns, piece.end_ns)
    )
    assert len([one for one in root.iter(f"{SVG}path") if one.get("class") == "counter"]) == 2
    for one in root.iter(f"{SVG}rect"):
        if (one.get("class") or "").startswith("slice"):
            x, width = float(one.get("x", "nan")), float(one.get("width", "nan"))
            assert x >= LEFT
            assert x + width <= RIGHT + 1


def test_slices_lie_where_their_times_say(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path, seed=12, num_requests=3)
    run = read_run(tmp_path)
    root = parse(write_picture(tmp_path, tmp_path / "a.svg"))
    zero_ns, end_ns = run.steps[0].begin_ns, max(step.end_ns for step in run.steps)
    scale = (RIGHT - LEFT) / (end_ns - zero_ns)
    drawn = slices(root, "step")
    assert len(drawn) == len(run.worker_steps)
    for one, step in zip(drawn, run.worker_steps, strict=True):
        assert float(one.get("x", "nan")) == pytest.approx(
            LEFT + (step.begin_ns - zero_ns) * scale, abs=0.01
        )
        assert float(one.get("width", "nan")) == pytest.approx(
            (step.end_ns - step.begin_ns) * scale, abs=0.8
        )


def test_queue_prefill_and_decode_are_called_out_with_the_requests_own_times(
    tmp_path: Path,
) -> None:
    write_synthetic_run(tmp_path, seed=13, num_requests=6)
    run = read_run(tmp_path)
    begin_ms = (run.timelines[0].arrival_ns - run.steps[0].begin_ns) / 1e6
    root = parse(write_picture(tmp_path, tmp_path / "a.svg", begin_ms=begin_ms))
    assert len([one for one in root.iter(f"{SVG}path") if one.get("class") == "arrow"]) == 3
    headings = [
        (
            f"queue {one.queue_ns / 1e6:.0f} ms",
            f"prefill {one.prefill_ns / 1e6:.0f} ms",
            f"decode {one.decode_ns / 1e6:.0f} ms",
        )
        for one in run.timelines
    ]
    found = texts(root)
    assert any(set(three) <= set(found) for three in headings)


@pytest.mark.parametrize("seed", range(4))
def test_no_text_is_cut_off_or_struck_through(tmp_path: Path, seed: int) -> None:
    write_synthetic_run(tmp_path, seed=seed, num_requests=20)
    run = read_run(tmp_path)
    for timeline in run.timelines:
        timeline.request_id = f"chatcmpl-{timeline.request_num:024x}/{timeline.request_num}"
    length_ms = (max(step.end_ns for step in run.steps) - run.steps[0].begin_ns) / 1e6
    chance = random.Random(seed)
    num_stepped_down = 0
    for _ in range(20):
        begin_ms = chance.uniform(-0.05, 0.9) * length_ms
        end_ms = begin_ms + chance.choice([1.0, 0.1, 0.01]) * length_ms
        root = ElementTree.fromstring(draw(run, begin_ms=begin_ms, end_ms=max(end_ms, 0.001)))
        boxes = [box(one) for one in root.iter(f"{SVG}text")]
        assert all(left >= 0 and right <= WIDTH for left, _, right, _ in boxes)
        for corners in lines(root):
            num_stepped_down += len(corners) == 3 and corners[1][1] - corners[2][1] > 20
            for (x, y), (end_x, end_y) in pairwise(corners):
                for left, top, right, bottom in boxes:
                    is_beside = max(x, end_x) < left or min(x, end_x) > right
                    assert is_beside or max(y, end_y) < top or min(y, end_y) > bottom
        names_shown = [one for one in texts(root) if one.startswith("…")]
        assert len(set(names_shown)) == len(names_shown)
    assert num_stepped_down


def test_requests_that_are_left_out_are_counted(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path, seed=20, num_requests=MAX_REQUESTS + 3)
    run = read_run(tmp_path)
    zero_ns = run.steps[0].begin_ns
    begin_ms = min(0.0, *((one.arrival_ns - zero_ns) / 1e6 for one in run.timelines))
    root = ElementTree.fromstring(draw(run, begin_ms=begin_ms))
    assert "and 3 more requests, which the Perfetto file has" in texts(root)
    write_synthetic_run(tmp_path / "few", seed=20, num_requests=MAX_REQUESTS)
    assert not any(
        "more requests" in one
        for one in texts(ElementTree.fromstring(draw(read_run(tmp_path / "few"))))
    )


def test_same_run_same_picture_without_anything_from_outside(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path, seed=14)
    first = write_picture(tmp_path, tmp_path / "a.svg").read_bytes()
    assert write_picture(tmp_path, tmp_path / "b.svg").read_bytes() == first
    text = first.decode()
    for foreign in ("href", "url(", "<image", "<script", "@import", str(tmp_path)):
        assert foreign not in text
    assert text.count("http") == 1
    assert f'width="{WIDTH}"' in text


@pytest.mark.parametrize("missing", ["caller", "worker"])
def test_threads_that_left_nothing_are_left_out(tmp_path: Path, missing: str) -> None:
    write_synthetic_run(tmp_path, seed=15)
    run = read_run(tmp_path)
    for process in run.processes:
        process.threads[:] = [one for one in process.threads if one.name != missing]
    root = ElementTree.fromstring(draw(run))
    assert [name for name in THREADS if name in texts(root)] == [
        name for name in THREADS if name != missing
    ]
    assert bool(slices(root, "step")) == (missing != "worker")
    assert slices(root, "request")


def test_ticks_are_round_and_within() -> None:
    chance = random.Random(16)
    for _ in range(500):
        length_ns = chance.randint(6, 10 ** chance.randint(1, 13))
        begin_ns = chance.randint(-(10**12), 10**12)
        window = Window(0, begin_ns, begin_ns + length_ns)
        found = ticks(window)
        assert 5 <= len(found) <= 16
        assert all(begin_ns <= one <= begin_ns + length_ns for one in found)
        [step_ns] = {after - before for before, after in pairwise(found)}
        assert str(step_ns).rstrip("0") in ("1", "2", "5")
        assert not any(one % step_ns for one in found)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "run", tmp_path / "x.svg"
    write_synthetic_run(folder, seed=17)
    bounds = ("--begin-ms", "1", "--end-ms", "4")
    assert run_command(str(folder), "-o", str(out), *bounds) == 0
    assert capsys.readouterr().out.strip() == str(out)
    whole = write_picture(folder, tmp_path / "whole.svg")
    assert 0 < len(slices(parse(out), "step")) < len(slices(parse(whole), "step"))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (("--begin-ms", "4", "--end-ms", "4"), "is empty"),
        (("--begin-ms", "nan"), "finite"),
        (("--end-ms", "inf"), "finite"),
    ],
)
def test_windows_that_show_nothing_fail_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bounds: tuple[str, ...], message: str
) -> None:
    write_synthetic_run(tmp_path, seed=18)
    assert run_command(str(tmp_path), "-o", str(tmp_path / "x.svg"), *bounds) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.svg").exists()


def test_a_run_without_steps_fails_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_synthetic_run(tmp_path, seed=19, num_requests=0)
    assert run_command(str(tmp_path), "-o", str(tmp_path / "x.svg")) == 1
    assert "holds no step" in capsys.readouterr().err
