"""The report and the picture say what is in the run, and warn where figures mislead."""

import io
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from engine.bench.measure import Objective, measure
from engine.bench.plot import draw
from engine.bench.records import LoadRun, Outcome
from engine.bench.report import print_report, warnings_of
from tests.unit.bench_runs import load_run, record

SVG = "{http://www.w3.org/2000/svg}"


def busy_run() -> LoadRun:
    """Twenty good requests, and two that were turned away with words that look like markup."""
    good = [
        record(i, due=i * 50, chunks=(i * 50 + 20, i * 50 + 45), end=i * 50 + 50) for i in range(20)
    ]
    bad = [
        record(
            20 + i,
            due=i * 400,
            end=i * 400 + 1,
            outcome=Outcome.HTTP_ERROR,
            status=429,
            detail="[red]too & <many>[/red]",
        )
        for i in range(2)
    ]
    return load_run(*good, *bad, end=1000, warmups=(record(-1, due=0, end=1),))


def report_of(run: LoadRun, **changes: object) -> str:
    """The printed report."""
    out = io.StringIO()
    settings = {
        "metrics": ("ttft", "tpot", "itl", "e2el"),
        "percents": (50, 99),
        "arrival": "Poisson, 20 requests/s",
    }
    document = measure(run, percents=(50, 99), objective=Objective(ttft_ms=25))
    print_report(Console(file=out, width=120), run, document, **(settings | changes))
    return out.getvalue()


def test_the_report_shows_load_outcomes_and_figures() -> None:
    text = report_of(busy_run())
    for part in (
        "Poisson, 20 requests/s; 22 requests in 1.0 s",
        "left out: 1 warm-up requests (1 ok)",
        "[red]too & <many>[/red]",
        "20.00 (90.9%)",
        "200 input tokens; 40 output tokens, counted by usage",
        "2 of 22 requests failed and are in no latency figure",
    ):
        assert part in text
    ttft = next(line for line in text.splitlines() if "TTFT " in line)
    assert [cell.strip() for cell in ttft.split("│")[2:-1]] == ["20.00"] * 4
    assert "INTERRUPTED" not in text


def test_only_the_rows_asked_for_are_shown() -> None:
    text = report_of(busy_run(), metrics=("tpot",))
    assert "TPOT" in text
    assert "TTFT" not in text
    assert "E2EL" not in text


def test_an_interrupted_run_says_so() -> None:
    assert "INTERRUPTED" in report_of(load_run(end=10, interrupted=True))


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (load_run(record(0, due=0, sent=90, chunks=(99,), end=99), end=99), "too slow"),
        (
            load_run(
                record(0, due=0, sent=90, chunks=(99,), end=99),
                end=99,
                settings={"base_url": "", "endpoint": "chat", "max_concurrency": 1},
            ),
            "--max-concurrency held requests back",
        ),
        (
            load_run(record(0, due=0, chunks=(1,), end=99), end=1000, client_cpu_s=0.9),
            "the generator used 90% of a core",
        ),
        (
            load_run(record(0, due=0, chunks=(1, 2), end=3, completion_tokens=8), end=9),
            "4.0 tokens came per chunk",
        ),
        (
            load_run(record(0, due=0, chunks=(1, 2), end=3, completion_tokens=None), end=9),
            "tokens are counted by events",
        ),
    ],
)
def test_misleading_figures_come_with_a_warning(run: LoadRun, words: str) -> None:
    notes = warnings_of(measure(run))
    assert len(notes) == 1
    assert words in notes[0]


def test_a_clean_run_has_no_warning() -> None:
    assert warnings_of(measure(load_run(record(0, due=0, chunks=(1,), end=3), end=9))) == []


def test_the_picture_has_a_mark_for_each_request() -> None:
    run = busy_run()
    root = ET.fromstring(draw(run, measure(run)))
    assert len(root.findall(f"{SVG}circle")) == 20
    crosses = [path for path in root.findall(f"{SVG}path") if path.find(f"{SVG}title") is not None]
    assert len(crosses) == 2
    assert "[red]too & <many>" in (crosses[0].findtext(f"{SVG}title") or "")
    words = {text.text for text in root.findall(f"{SVG}text")}
    assert {"TTFT", "TPOT", "ITL", "E2EL", "m at http://there"} <= words


def test_everything_drawn_lies_within_the_picture() -> None:
    run = busy_run()
    root = ET.fromstring(draw(run, measure(run)))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    points = [
        tuple(map(float, pair.split(",")))
        for line in root.findall(f"{SVG}polyline")
        for pair in line.attrib["points"].split()
    ]
    points += [
        (float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.findall(f"{SVG}circle")
    ]
    assert len(points) > 100
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)


@pytest.mark.parametrize(
    "run", [load_run(end=0), load_run(record(0, due=0, chunks=(5,), end=5), end=5)]
)
def test_the_smallest_runs_can_be_drawn(run: LoadRun) -> None:
    ET.fromstring(draw(run, measure(run)))
    assert report_of(run)
