"""First code of a spawned core: read the boot message from standard input, then run.

`spawn` semantics: the child is a fresh interpreter that inherits the environment and nothing
else. Unlike multiprocessing's, it does not run the caller's script again, so a script needs no
`if __name__ == "__main__"` guard. Only plain keyword arguments cross.

Standard input stays open for the life of the parent: its end of file is how the child learns
that the parent has died, even by SIGKILL.
"""

import importlib
import os
import select
import shutil
import signal
import sys
import threading
import time
from typing import Any, NoReturn

from engine.interpreter import READ_BOOT

_POLL_S = 0.5
_REMOVALS = 5

_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""Sent to all processes of a terminal; what they mean is for the process that we serve to say."""

BLOCKED_AT_START = (*_TERMINAL_SIGNALS, signal.SIGUSR2)
"""Signals that the child must begin with blocked, before its interpreter's start and any thread of
a `sitecustomize`. SIGUSR2 stays blocked until the target handles it."""

BOOTSTRAP = READ_BOOT + "from engine.transport.boot import run; run(boot)"
"""What `python -c` executes in the child."""


def run(boot: dict[str, Any]) -> None:
    """Watch the parent, then call the target with the boot message's keyword arguments."""
    threading.Thread(
        target=_watch_parent,
        args=(boot["parent_pid"], boot["private_dir"]),
        name="parent-watch",
        daemon=True,
    ).start()
    if boot["main_path"]:
        _load_main(boot["main_path"])
    for number in _TERMINAL_SIGNALS:  # only now: the script may handle them, when it is itself
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERMINAL_SIGNALS)
    module, _, function = boot["target"].partition(":")
    getattr(importlib.import_module(module), function)(**boot["kwargs"])


def _watch_parent(parent_pid: int, private_dir: str) -> None:
    """End this process, and remove the socket folder, when the parent is gone.

    A fork of the parent may hold the pipe open, hence the second test.
    """
    stdin = sys.stdin.fileno()
    while os.getppid() == parent_pid:
        readable, _, _ = select.select([stdin], [], [], _POLL_S)
        if readable and not os.read(stdin, 4096):
            break
    _exit_orphan(private_dir)


def _exit_orphan(private_dir: str) -> NoReturn:
    for _ in range(_REMOVALS):  # other children may write into it until they end, too
        shutil.rmtree(private_dir, ignore_errors=True)
        if not os.path.exists(private_dir):
            break
        time.sleep(_POLL_S)
    os._exit(0)


def _load_main(path: str) -> None:
    """Run the caller's script under the name `__mp_main__`, for classes defined in it."""
    import runpy
    import types

    module = types.ModuleType("__mp_main__")
    module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__mp_main__"] = module
