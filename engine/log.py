"""Loggers of the engine: `isinglass.*`, configured by whoever owns the process.

Importing the package configures nothing. `configure` attaches one handler that writes to
standard error, unless the program has set up logging itself.
"""

import logging
import sys

_ROOT = "isinglass"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, below the package's own."""
    return logging.getLogger(f"{_ROOT}.{name}")


def configure(level: str, *, role: str, own_process: bool) -> None:
    """Set the level and, where nobody else handles log records, write them to standard error.

    Args:
        level: debug, info, warning or error.
        role: who writes, shown in every line ("caller", "EngineCore").
        own_process: whether this process is ours alone, so that no other handler can exist.
    """
    logger = logging.getLogger(_ROOT)
    logger.setLevel(level.upper())
    if not own_process and (logging.getLogger().handlers or logger.handlers):
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(levelname)s %(asctime)s [{role}] %(message)s", "%H:%M:%S")
    )
    logger.handlers[:] = [handler]
    logger.propagate = False
