"""Where hooks write.

Knows the environment's name for it and the default. Does not know what is written.
"""

import os
import time
from pathlib import Path

VARIABLE = "ISINGLASS_HOOKS_DIR"
_DEFAULT_PARENT = "isinglass-hooks"


def new_run_folder() -> Path:
    """A folder name for a new run, below the working directory; nothing is made."""
    stem = time.strftime("run-%Y%m%d-%H%M%S")
    return Path(_DEFAULT_PARENT).absolute() / f"{stem}-{os.getpid()}"


def folder_path() -> Path:
    """The run's folder, which need not be there; the children of this process get the same one."""
    path = os.environ.get(VARIABLE)
    if not path:
        path = os.environ[VARIABLE] = str(new_run_folder())
    return Path(path).absolute()


def hooks_folder() -> Path:
    """The run's folder, made if need be.

    Raises:
        OSError: it cannot be made.
    """
    folder = folder_path()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
