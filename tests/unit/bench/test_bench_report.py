"""The report and the picture say what is in the run, and warn where figures mislead."""

import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from engine.bench import command
from engine.bench.measure import Objective, measure
from engine.bench.plot import draw
from engine.bench.prompts import FixedPrompts
from engine.bench.records import LoadRun, Outcome
from engine.bench.report import print_report, warnings_of
from engine.bench.settings import LoadSettings
from engine.errors import IsinglassError
from tests.support.bench_runs import load_run, record

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
    assert "INTERRUPTED, figures of what" in report_of(
        load_run(record(0, due=0, chunks=(1,), end=3), end=10, interrupted=True)
    )


def test_a_run_that_ended_in_its_warm_up_says_that_nothing_was_measured() -> None:
    warmup = record(-1, due=0, end=1, outcome=Outcome.CANCELLED)
    text = report_of(load_run(end=0, interrupted=True, warmups=(warmup,)))
    assert "INTERRUPTED before the first request of the load: nothing was measured" in text
    assert "left out: 1 warm-up requests (1 cancelled)" in text


@pytest.mark.parametrize("percents", [(50,), (50, 99)])
def test_the_warning_of_lateness_names_the_figure_it_gives(percents: tuple[float, ...]) -> None:
    run = load_run(*(record(i, due=0, sent=i, chunks=(100,), end=100) for i in range(100)), end=100)
    (note,) = warnings_of(measure(run, percents=percents))
    assert ("98 ms late (p99)" if 99 in percents else "99 ms late (max)") in note


def run_command(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> int:
    """The command, over a run that has been."""
    monkeypatch.setattr(command, "run_in_loop", lambda *_, **__: busy_run())
    options: dict[str, Any] = {
        "metrics": ("ttft",),
        "percents": (50,),
        "objective": None,
        "save": None,
        "save_detailed": False,
        "plot": None,
        "show_progress": False,
    }
    prompts = FixedPrompts(text="a", output_len=1)
    return command.run(LoadSettings(base_url="http://h"), prompts, **(options | changes))


def test_a_file_that_cannot_be_written_costs_no_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "run.svg"
    with pytest.raises(IsinglassError, match=r"cannot write /dev/full: No space left"):
        run_command(monkeypatch, save=Path("/dev/full"), plot=plot)
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["completed"] == 20
    assert any("TTFT" in line for line in lines)
    assert plot.read_text().startswith("<svg")  # the other file is written all the same


def test_a_reader_that_leaves_hides_no_error_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            if text:
                raise BrokenPipeError
            return 0

    monkeypatch.setattr("sys.stdout", Gone())
    with pytest.raises(BrokenPipeError):
        run_command(monkeypatch)
    with pytest.raises(IsinglassError, match="/dev/full"):
        run_command(monkeypatch, save=Path("/dev/full"))


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
        (load_run(record(0, due=0, end=3), end=9), "1 answers were empty"),
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


def test_the_picture_is_xml_whatever_a_server_calls_its_model() -> None:
    run = load_run(record(0, due=0, chunks=(5,), end=5), end=5)
    document = measure(run) | {"model_id": "a\x1b[1m<b>\x00\ud800\uffff"}
    drawn = draw(run, document).encode()
    assert "a\ufffd[1m<b>" in (ET.fromstring(drawn).findtext(f"{SVG}title") or "")


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
