"""The folder of a recorded run.

Knows its name. Does not know what is written into it.
"""

import time
from pathlib import Path

from engine.errors import ConfigError


def make_run_dir(trace_dir: str) -> str:
    """A new folder for this run.

    Raises:
        ConfigError: it cannot be made.
    """
    if not trace_dir.strip():
        raise ConfigError(
            "trace_dir is empty; name a folder ('.' for the current one), or leave it out."
        )
    name = time.strftime("run-%Y%m%d-%H%M%S")
    for attempt in range(1000):
        try:
            folder = Path(trace_dir).expanduser() / (name if attempt == 0 else f"{name}-{attempt}")
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.is_dir():
                raise ConfigError(f"trace_dir {trace_dir!r} is not a folder") from None
            continue
        except (OSError, ValueError, RuntimeError) as error:  # a NUL; a home that nobody has
            raise ConfigError(f"trace_dir {trace_dir!r} cannot be used: {error}") from error
        return str(folder.resolve())
    raise ConfigError(f"trace_dir {trace_dir!r} holds a thousand runs of this second")
