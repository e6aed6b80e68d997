"""`isinglass`: the command line. Flags come from the configuration's own fields.

Knows arguments and exit codes; what a command does lives elsewhere.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from engine import __version__
from engine.cli import generate as cli_generate
from engine.cli import hooks as cli_hooks
from engine.cli.parser import CommandParser
from engine.errors import IsinglassError

_DESCRIPTION = """\
Isinglass runs large language models and shows everything that happens while it does.

  isinglass generate "The capital of France is"     text from the embedded model, as it is made
  isinglass generate --chat "Why is the sky blue?"  through the model's chat template
  isinglass generate --trace-dir runs "Hello"       and record every step
  isinglass serve                                   an OpenAI-compatible server
  isinglass trace summary runs/run-…                where the time went
  isinglass trace convert runs/run-…                a Perfetto file for https://ui.perfetto.dev
  isinglass flight show FILE                        the last steps before something went wrong

Without --model the embedded SmolLM2-135M-Instruct is used, and no network.
`isinglass COMMAND --help` lists every option of a command, by group.
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = CommandParser(
        prog="isinglass",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"isinglass {__version__}")
    commands: argparse._SubParsersAction[Any] = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    cli_generate.add_command(commands)
    from engine.cli import bench as cli_bench
    from engine.cli import serve as cli_serve

    cli_serve.add_command(commands)
    cli_bench.add_command(commands)
    cli_hooks.add_command(commands)
    from traces.cli import add_flight_commands, add_trace_commands

    add_trace_commands(commands)
    add_flight_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    0: done; 1: an error; 2: wrong usage; 3: done, but part of a recorded run could not be read;
    130: Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character
    arguments = build_parser().parse_args(argv)
    try:
        code = arguments.handler(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a full disk can still be reported
    except BrokenPipeError:
        # The reader of our output has gone (`isinglass … | head`): not an error of ours.
        _forget_standard_output()
        return 0
    except OSError as error:
        _forget_standard_output()
        return _report(error)
    except IsinglassError as error:
        return _report(error)
    except KeyboardInterrupt:
        return 130
    return code


def _report(error: Exception) -> int:
    if sys.stderr is not None:  # print() would take standard output instead
        print(f"isinglass: error: {error}", file=sys.stderr)
    return 1


def _forget_standard_output() -> None:
    """Let what is still to be written go nowhere, or the interpreter's end would fail with it."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or somebody's stand-in
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
