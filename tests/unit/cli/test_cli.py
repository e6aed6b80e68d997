"""The command line at its edges: closed and full streams, damaged runs, log probabilities."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli.generate import _Printer
from engine.cli.logprobs import logprob_lines
from engine.cli.main import main
from engine.types.logprobs import Logprob
from engine.types.outputs import CompletionOutput
from tests.support.synthetic_run import write_synthetic_run
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
CLI = ("-m", "engine.cli.main")


def shell(redirections: str, *arguments: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    """Exit code and streams of a command, with redirections as a shell writes them."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, *CLI, *arguments],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr.decode()


@pytest.mark.parametrize(
    ("redirections", "arguments", "message"),
    [
        (">&-", ["generate", "Hello"], "standard output is closed"),
        ("<&-", ["generate"], "there is no prompt, and standard input is closed"),
    ],
)
def test_streams_that_are_missing(redirections: str, arguments: list[str], message: str) -> None:
    code, _, err = shell(redirections, *arguments)
    assert code == 1
    assert message in err
    assert "Traceback" not in err
    assert err.startswith("isinglass: error: ")


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_standard_input_that_is_no_text(locale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", locale)
    code, _, err = shell("", "generate", stdin=b"caf\xe9 au lait")
    assert code == 1
    assert err == (
        "isinglass: error: standard input is not UTF-8 text (byte 3); convert it, for example "
        "with iconv\n"
    )


@pytest.mark.parametrize("arguments", [["trace", "summary"], ["trace", "summary", "--json"]])
def test_a_full_disk_below_standard_output(arguments: list[str], tmp_path: Path) -> None:
    write_synthetic_run(tmp_path / "run")
    code, _, err = shell("> /dev/full", *arguments, str(tmp_path / "run"))
    assert (code, err) == (1, "isinglass: error: [Errno 28] No space left on device\n")


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path / "run")
    command = f"{sys.executable} -m engine.cli.main trace summary --json {tmp_path}/run"
    done = subprocess.run(
        ["sh", "-c", f"{{ sleep 0.1; {command}; echo $? >&2; }} | true"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stderr == "0\n"


def logprobs(*entries: tuple[int, str | None, float, int]) -> dict[int, Logprob]:
    return {token: Logprob(value, rank, text) for token, text, value, rank in entries}


def test_lines_of_log_probabilities() -> None:
    lines = logprob_lines(
        [
            None,
            logprobs((7, " a", -3.5, 9), (8, "b\n", -0.25, 1), (9, "c", -1.0, 2)),
            logprobs((8, None, -0.125, 1)),
        ]
    )
    assert lines == [
        "  ' a' -3.5000 rank 9  |  'b\\n' -0.2500  |  'c' -1.0000",
        "  8 -0.1250 rank 1",
    ]


def test_log_probabilities_follow_their_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    printer = _Printer(["Hi"], 2, echo=True)
    printer.add_prompt_logprobs(0, [None, logprobs((1, "i", -2.0, 4))])
    printer.add(0, CompletionOutput(1, "second", [3], logprobs=[logprobs((3, "s", -1.0, 1))]))
    printer.add(0, CompletionOutput(0, " a", [7], logprobs=[logprobs((7, " a", -0.5, 1))]))
    printer.add(0, CompletionOutput(1, "", [], finish_reason="stop"))
    printer.add(
        0,
        CompletionOutput(
            0, " b", [8], logprobs=[logprobs((8, " b", -0.75, 2))], finish_reason="length"
        ),
    )
    assert capsys.readouterr().out == (
        "--- prompt 1, sequence 1 ---\nHi a b\n"
        "prompt logprobs:\n  'i' -2.0000 rank 4\n"
        "logprobs:\n  ' a' -0.5000 rank 1\n  ' b' -0.7500 rank 2\n"
        "--- prompt 1, sequence 2 ---\nHisecond\n"
        "logprobs:\n  's' -1.0000 rank 1\n"
    )


def damaged(folder: Path, how: str) -> Path:
    """A run one of whose journals (the core's) has come to harm."""
    write_synthetic_run(folder)
    (journal,) = folder.glob("core*.journal")
    data = bytearray(journal.read_bytes())
    if how == "cut off":
        del data[-7:]
    elif how == "overwritten":
        data[len(data) // 2 : len(data) // 2 + 40] = b"\xc1" * 40
    else:
        data[:40] = b"\0" * 40
    journal.write_bytes(data)
    return folder


@pytest.mark.parametrize("command", ["summary", "convert"])
@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("cut off", 0, "is cut off: its last record is missing"),
        ("overwritten", 3, "is damaged: nothing behind its last whole record"),
        ("another file", 3, "left out: "),
    ],
)
def test_damaged_journals(
    how: str,
    code: int,
    message: str,
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = damaged(tmp_path / "run", how)
    assert main(["trace", command, str(folder)]) == code
    out, err = capsys.readouterr()
    assert out
    assert err.startswith("isinglass trace: warning: ")
    assert message in err
    assert "core" in err


def test_a_folder_of_runs_means_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(["run-b", "run-c", "run-a"]):
        write_synthetic_run(tmp_path / name, seed=number)
        for file in (tmp_path / name).iterdir():
            os.utime(file, (number, number))
    (tmp_path / "run-b" / "trace.pftrace").write_text("made later")
    (tmp_path / "notes.txt").write_text("no run")
    assert main(["trace", "summary", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "of 3 runs this is the newest, " in err
    assert err.endswith("run-a\n")
    assert "run-a" in out.replace("\n", "")
    assert main(["trace", "convert", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run-a' / 'trace.pftrace'}\n"
    # What a shell makes of `run-*`.
    assert main(["trace", "convert", *(str(tmp_path / f"run-{name}") for name in "abc")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run-a' / 'trace.pftrace'}\n"
    assert main(["trace", "convert", str(tmp_path), "--profiles", str(tmp_path / "none")]) == 1
    assert "no such folder" in capsys.readouterr().err
