"""The commands on recorded runs: `trace summary`, `trace convert`, `trace picture`, `flight show`.

Knows arguments and output. Does not know how a run is read; imports that only when a command runs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traces.journal_reader import Run

_FILE_WIDTH = 120
_RUN_HELP = "the run's folder, or a flight record; of several, or of a folder of runs, the newest"


def add_trace_commands(subparsers: Any) -> None:
    """Add `trace` with its commands to an argparse subparsers object.

    Each command sets `handler`, a function of the parsed arguments that returns the exit status.
    """
    trace = subparsers.add_parser("trace", help="look at a recorded run")
    commands = trace.add_subparsers(dest="trace_command", required=True, metavar="COMMAND")

    summary = commands.add_parser("summary", help="show where the time went")
    summary.add_argument("run_dir", metavar="RUN_DIR", nargs="+", help=_RUN_HELP)
    summary.add_argument("--json", action="store_true", help="print one JSON document instead")
    summary.set_defaults(handler=run_summary)

    convert = commands.add_parser("convert", help="write a Perfetto file (ui.perfetto.dev)")
    convert.add_argument("run_dir", metavar="RUN_DIR", nargs="+", help=_RUN_HELP)
    convert.add_argument(
        "-o", "--output", metavar="FILE", help="file to write (default: RUN_DIR/trace.pftrace)"
    )
    convert.add_argument(
        "--profiles",
        metavar="DIR",
        help="folder with torch profiles of the run, if they are not in RUN_DIR (profiler_dir)",
    )
    convert.set_defaults(handler=run_convert)

    picture = commands.add_parser("picture", help="draw a window of the run as an SVG file")
    picture.add_argument("run_dir", metavar="RUN_DIR", nargs="+", help=_RUN_HELP)
    picture.add_argument("-o", "--output", metavar="FILE", required=True, help="file to write")
    for bound, what in (("begin", "first step's begin"), ("end", "last step's end")):
        picture.add_argument(
            f"--{bound}-ms",
            type=float,
            metavar="MS",
            help=f"{bound} of the window, from the begin of the first step (default: the {what})",
        )
    picture.set_defaults(handler=run_picture)


def add_flight_commands(subparsers: Any) -> None:
    """Add `flight` with its command to an argparse subparsers object."""
    flight = subparsers.add_parser("flight", help="look at a flight record")
    commands = flight.add_subparsers(dest="flight_command", required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="show the last steps, and why they were written")
    show.add_argument("file", metavar="FILE", help="a flight-….journal file")
    show.add_argument(
        "--last", type=_positive, default=20, metavar="N", help="steps to show (default: 20)"
    )
    show.set_defaults(handler=run_flight_show)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def run_flight_show(arguments: argparse.Namespace) -> int:
    """Print a flight record; status 1 and a message where there is none to read."""
    from traces.flight import read_flight, render_flight

    try:
        record = read_flight(arguments.file)
    except (ValueError, OSError) as error:
        return _fail(error, "flight")
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a file or a pipe has room
        console = Console(width=max(console.width, _FILE_WIDTH))
    console.print(render_flight(record, num_last=arguments.last))
    return 0


def run_summary(arguments: argparse.Namespace) -> int:
    """Print the summary of a run; the status is that of `_warn`, or 1 if there is none to read."""
    from traces.journal_reader import read_run
    from traces.summary import summarize_run

    try:
        run = read_run(_pick_run(arguments.run_dir))
        summary = summarize_run(run)
    except (ValueError, OSError) as error:
        return _fail(error)
    status = _warn(run)
    if arguments.json:
        import msgspec

        # Paths are shown as text.
        print(msgspec.json.encode(summary, enc_hook=str).decode())
        return status
    from rich.console import Console

    from traces.summary_text import render_summary

    Console().print(render_summary(summary))
    return status


def run_convert(arguments: argparse.Namespace) -> int:
    """Write the Perfetto file of a run and print its path; the status is as for a summary."""
    from traces.journal_reader import read_run

    try:
        from traces.perfetto import write_perfetto
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("perfetto", "google"):
            raise
        return _fail(f"{error}; install the packages perfetto and protobuf to convert a run")
    if arguments.profiles is not None and not Path(arguments.profiles).is_dir():
        return _fail(f"--profiles {arguments.profiles}: there is no such folder")
    try:
        run_dir = _pick_run(arguments.run_dir)
        status = _warn(read_run(run_dir))
        path = write_perfetto(run_dir, arguments.output, profiles_dir=arguments.profiles)
    except (ValueError, OSError) as error:
        return _fail(error)
    print(path)
    return status


def run_picture(arguments: argparse.Namespace) -> int:
    """Draw a window of a run and print the file's path; the status is as for a summary."""
    from traces.journal_reader import read_run
    from traces.picture import write_picture

    try:
        run_dir = _pick_run(arguments.run_dir)
        status = _warn(read_run(run_dir))
        path = write_picture(
            run_dir,
            arguments.output,
            begin_ms=arguments.begin_ms,
            end_ms=arguments.end_ms,
        )
    except (ValueError, OSError) as error:
        return _fail(error)
    print(path)
    return status


def _pick_run(given: Sequence[str]) -> Path:
    """The run that paths mean: the one named, or the newest of several, or of a folder of runs."""
    from instrumentation.record.journal import SUFFIX

    paths = [Path(one) for one in given]
    if len(paths) == 1:
        path = paths[0]
        if not path.is_dir() or any(path.glob(f"*{SUFFIX}")):
            return path
        candidates = list(path.iterdir())
    else:
        candidates = paths
    runs = {
        folder: max(file.stat().st_mtime_ns for file in folder.glob(f"*{SUFFIX}"))
        for folder in candidates
        if any(folder.glob(f"*{SUFFIX}"))
    }
    if not runs:
        return paths[0]
    newest = max(runs, key=lambda folder: (runs[folder], folder.name))
    print(
        f"isinglass trace: of {len(runs)} run{'s' if len(runs) > 1 else ''} this is the newest, "
        f"{newest}",
        file=sys.stderr,
    )
    return newest


def _warn(run: "Run") -> int:
    """Say on standard error what of a run is missing.

    Returns 0 for a whole run and for one whose journals end early, as those of a killed process do;
    3 if a journal is damaged or could not be read at all: then the run is only partly shown.
    """
    for process in run.processes:
        if process.is_damaged:
            what = "is damaged: nothing behind its last whole record could be read"
        elif process.is_truncated:
            what = "is cut off: its last record is missing"
        else:
            continue
        print(f"isinglass trace: warning: {process.path.name} {what}", file=sys.stderr)
    for reason in run.unreadable:
        print(f"isinglass trace: warning: left out: {reason}", file=sys.stderr)
    return 3 if run.unreadable or any(one.is_damaged for one in run.processes) else 0


def _fail(error: object, command: str = "trace") -> int:
    print(f"isinglass {command}: {error}", file=sys.stderr)
    return 1
