"""How a fresh interpreter of ours is started: its command, and the first line on its input.

Spawned, not forked: only what stands in that line crosses, as JSON. Knows no target.
"""

import json
import os
import subprocess
import sys
from typing import Any, Final

READ_BOOT: Final = (
    "import sys, json; line = sys.stdin.buffer.readline(); "
    "boot = json.loads(line) if line.endswith(b'\\n') else sys.exit(1); "
    "sys.path[:] = boot.pop('sys_path'); "
)
"""Code that such an interpreter begins with: from then on the line's other facts are in `boot`.

It ends there, and says nothing, where whoever started it has ended before the line was whole.
"""


def command(code: str, *arguments: str) -> list[str]:
    """What starts an interpreter with the options of this one, to run some code."""
    # As multiprocessing does; private, so unknown to the stubs.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", code, *arguments]


def boot_line(**facts: Any) -> bytes:
    """The line that `READ_BOOT` reads: these facts and `parent_pid`."""
    boot = {"sys_path": sys.path, "parent_pid": os.getpid(), **facts}
    return json.dumps(boot).encode() + b"\n"
