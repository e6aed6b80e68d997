"""`isinglass`: the command line. Flags come from the configuration's own fields.

Knows arguments and exit codes; what a command does lives elsewhere.
"""

import argparse
import sys
from collections.abc import Sequence

from engine import __version__
from engine.api import cli_generate
from engine.errors import IsinglassError

_DESCRIPTION = """\
Isinglass runs large language models and shows everything that happens while it does.

  isinglass generate "The capital of France is"     text from the embedded model, as it is made
  isinglass generate --chat "Why is the sky blue?"  through the model's chat template
  isinglass generate --trace-dir runs "Hello"       and record every step
  isinglass trace summary runs/run-…                where the time went
  isinglass trace convert runs/run-…                a Perfetto file for https://ui.perfetto.dev

Without --model the embedded SmolLM2-135M-Instruct is used, and no network.
`isinglass COMMAND --help` lists every option of a command, by group.
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="isinglass",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"isinglass {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    cli_generate.add_command(commands)
    from traces.cli import add_trace_commands

    add_trace_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (2 for wrong usage, 1 for an error, 130 for Ctrl-C)."""
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.handler(arguments)
    except IsinglassError as error:
        print(f"isinglass: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`isinglass … | head`): not an error of ours.
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
