"""The commands on hooks: `hooks list` and `hooks run`.

Knows arguments, environment and exit codes. Does not know what a hook does.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import IsinglassError
from instrumentation.hooks import folder, registry

_SITE_FOLDER = Path(registry.__file__).parent / "site"
_KILL_SWITCH = "ISINGLASS_HOOKS_DISABLED"
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # as shells have it
_ASK_TIMEOUT_S = 60.0
_FILE_WIDTH = 10_000

_RUN_DESCRIPTION = """\
Run a program with hooks in it and in every Python that it starts.

  isinglass hooks run gc torch-profiler -- python script.py --its-own-flag
  isinglass hooks run vllm --dir runs/vllm -- /path/to/vllm/bin/python offline.py

The program's interpreter need not have Isinglass installed. Set ISINGLASS_HOOKS_DISABLED=1 to
switch all hooks off without changing the command.
"""


def add_command(commands: Any) -> None:
    """Add `hooks` with its commands to an argparse subparsers object."""
    hooks = commands.add_parser("hooks", help="bring recording into other programs from outside")
    subcommands = hooks.add_subparsers(dest="hooks_command", required=True, metavar="COMMAND")
    show = subcommands.add_parser("list", help="show the hooks there are")
    show.set_defaults(handler=list_hooks)
    run = subcommands.add_parser(
        "run",
        help="run a program with hooks",
        usage="isinglass hooks run NAME [NAME …] [--dir DIR] -- COMMAND [ARGUMENT …]",
        description=_RUN_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="NAME … -- COMMAND …")
    # `--dir` may stand before the names; after them the remainder has it.
    run.add_argument("--dir", metavar="DIR", help="folder that the hooks write to (default: new)")
    run.set_defaults(handler=run_with_hooks, parser=run)


def list_hooks(arguments: argparse.Namespace) -> int:
    """Print each hook: name, targets, source, help."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    rows = [
        (hook.name, ", ".join(map(_when, hook.targets)), hook.source, hook.help)
        for _, hook in sorted(registry.all_hooks().items())
    ]
    table = Table(box=None, pad_edge=False)
    for column, heading in enumerate(("name", "applied at", "source", "what it does")):
        words = [word for row in rows for word in row[column].split()]
        is_names = column < 2  # to be copied, so they stay whole
        min_width = max(map(len, words)) if is_names else None
        table.add_column(heading, overflow="fold", min_width=min_width)
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:  # a file or a pipe has room: one line a hook
        width = Measurement.get(console, console.options.update(max_width=_FILE_WIDTH), table)
        console.width = max(console.width, width.maximum)
    console.print(table)
    return 0


def _when(target: str) -> str:
    return "start" if target == registry.AT_START else f"import {target}"


def run_with_hooks(arguments: argparse.Namespace) -> int:
    """Become the command, with the hooks' environment; returns only where that is impossible."""
    names, command, given_dir = _split(arguments)
    command = [_program(command[0]), *command[1:]]
    _check(names, command)
    environment = hooked_environment(names, os.environ, run_dir=given_dir or arguments.dir)
    where = environment[folder.VARIABLE]
    is_off = environment.get(_KILL_SWITCH, "0") not in ("", "0")
    state = f"switched off by {_KILL_SWITCH}" if is_off else f"writing to {where}"
    print(f"isinglass hooks: {', '.join(names)}: {state}", file=sys.stderr, flush=True)
    return _become(command, environment)


def hooked_environment(
    names: Sequence[str], environment: Mapping[str, str], *, run_dir: str | None
) -> dict[str, str]:
    """An environment with these hooks, besides those that it has already."""
    gate = [name for name in environment.get(registry.GATE_VARIABLE, "").split(",") if name]
    # An empty entry means the working directory, so it stays.
    path = environment["PYTHONPATH"].split(os.pathsep) if environment.get("PYTHONPATH") else []
    site = str(_SITE_FOLDER)
    run_dir = run_dir or environment.get(folder.VARIABLE) or str(folder.new_run_folder())
    return {
        **environment,
        registry.GATE_VARIABLE: ",".join(dict.fromkeys([*gate, *names])),
        "PYTHONPATH": os.pathsep.join([site, *(part for part in path if part != site)]),
        folder.VARIABLE: str(Path(run_dir).absolute()),
    }


def _split(arguments: argparse.Namespace) -> tuple[list[str], list[str], str | None]:
    """Names, command and folder out of the words around `--`."""
    parser: argparse.ArgumentParser = arguments.parser
    words: list[str] = arguments.words
    if "--" not in words:
        parser.error("put -- between the hooks' names and the command")
    middle = words.index("--")
    of_names = argparse.ArgumentParser(usage=parser.usage, add_help=False)
    of_names.add_argument("names", nargs="*")
    of_names.add_argument("--dir")
    parsed = of_names.parse_intermixed_args(words[:middle])
    if not parsed.names:
        parser.error("name at least one hook; `isinglass hooks list` shows them")
    if not words[middle + 1 :]:
        parser.error("there is no command after --")
    return parsed.names, words[middle + 1 :], parsed.dir


def _program(name: str) -> str:
    """Where a command lies; where there is no `python` on the path, this one."""
    found = shutil.which(name)
    if found is None and name in ("python", "python3"):
        return sys.executable
    return found or name


def _check(names: Sequence[str], command: Sequence[str]) -> None:
    """Raise for a hook that neither this interpreter nor that of the command knows."""
    known = registry.hook_names()
    unknown = [name for name in dict.fromkeys(names) if name not in known]
    if unknown:
        theirs = _hooks_of_interpreter(command[0])
        unknown = [name for name in unknown if name not in theirs]
    if unknown:
        raise IsinglassError(
            f"there is no hook named {', '.join(unknown)}; there are: {', '.join(known)}"
        )


def _hooks_of_interpreter(program: str) -> list[str]:
    """Names of users' hooks that another Python would find; none if it is no Python."""
    if not Path(program).name.startswith("python"):
        return []
    code = (
        "from importlib.metadata import entry_points\n"
        f"print(*(one.name for one in entry_points(group={registry.GROUP!r})), sep='\\n')"
    )
    try:
        done = subprocess.run(  # noqa: S603 - the command that the user is about to run anyway
            [program, "-c", code], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split("\n") if done.returncode == 0 else []


def _become(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Replace this process; an exit status as a shell's where the command cannot be run."""
    try:
        os.execve(command[0], list(command), environment)  # noqa: S606 - no shell is wanted
    except FileNotFoundError:
        print(f"isinglass hooks: {command[0]}: no such command", file=sys.stderr)
        return _NOT_FOUND
    except OSError as error:
        print(f"isinglass hooks: {command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_EXECUTABLE
