"""The commands on recorded runs: `trace summary`, `trace convert` and `trace picture`.

Knows arguments and output. Does not know how a run is read; imports that only when a command runs.
"""

import argparse
import sys
from typing import Any


def add_trace_commands(subparsers: Any) -> None:
    """Add `trace` with its commands to an argparse subparsers object.

    Each command sets `handler`, a function of the parsed arguments that returns the exit status.
    """
    trace = subparsers.add_parser("trace", help="look at a recorded run")
    commands = trace.add_subparsers(dest="trace_command", required=True, metavar="COMMAND")

    summary = commands.add_parser("summary", help="show where the time went")
    summary.add_argument("run_dir", metavar="RUN_DIR", help="the run's trace_dir")
    summary.add_argument("--json", action="store_true", help="print one JSON document instead")
    summary.set_defaults(handler=run_summary)

    convert = commands.add_parser("convert", help="write a Perfetto file (ui.perfetto.dev)")
    convert.add_argument("run_dir", metavar="RUN_DIR", help="the run's trace_dir")
    convert.add_argument(
        "-o", "--output", metavar="FILE", help="file to write (default: RUN_DIR/trace.pftrace)"
    )
    convert.set_defaults(handler=run_convert)

    picture = commands.add_parser("picture", help="draw a window of the run as an SVG file")
    picture.add_argument("run_dir", metavar="RUN_DIR", help="the run's trace_dir")
    picture.add_argument("-o", "--output", metavar="FILE", required=True, help="file to write")
    for bound, what in (("begin", "first step's begin"), ("end", "last step's end")):
        picture.add_argument(
            f"--{bound}-ms",
            type=float,
            metavar="MS",
            help=f"{bound} of the window, from the begin of the first step (default: the {what})",
        )
    picture.set_defaults(handler=run_picture)


def run_summary(arguments: argparse.Namespace) -> int:
    """Print the summary of a run; status 1 and a message where there is none to read."""
    from traces.summary import summarize

    try:
        summary = summarize(arguments.run_dir)
    except (ValueError, OSError) as error:
        return _fail(error)
    if arguments.json:
        import msgspec

        # Paths are shown as text.
        print(msgspec.json.encode(summary, enc_hook=str).decode())
        return 0
    from rich.console import Console

    from traces.summary_text import render_summary

    Console().print(render_summary(summary))
    return 0


def run_convert(arguments: argparse.Namespace) -> int:
    """Write the Perfetto file of a run and print its path; status 1 and a message on failure."""
    try:
        from traces.perfetto import write_perfetto
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("perfetto", "google"):
            raise
        return _fail(f"{error}; install the packages perfetto and protobuf to convert a run")
    try:
        print(write_perfetto(arguments.run_dir, arguments.output))
    except (ValueError, OSError) as error:
        return _fail(error)
    return 0


def run_picture(arguments: argparse.Namespace) -> int:
    """Draw a window of a run and print the file's path; status 1 and a message on failure."""
    from traces.picture import write_picture

    try:
        path = write_picture(
            arguments.run_dir,
            arguments.output,
            begin_ms=arguments.begin_ms,
            end_ms=arguments.end_ms,
        )
    except (ValueError, OSError) as error:
        return _fail(error)
    print(path)
    return 0


def _fail(error: object) -> int:
    print(f"isinglass trace: {error}", file=sys.stderr)
    return 1
