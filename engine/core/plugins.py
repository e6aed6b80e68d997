"""Plugins: functions that other packages register to run in the engine core before the model loads.

A package offers one through the entry-point group `isinglass.general_plugins`; it is called
without arguments, and may register models, hooks or backends.
"""

from importlib.metadata import entry_points

from engine.log import get_logger

logger = get_logger(__name__)

GROUP = "isinglass.general_plugins"


def load_plugins() -> list[str]:
    """Call every plugin once; one that fails is reported and skipped.

    Returns:
        Names of those that ran.
    """
    loaded = []
    for entry in entry_points(group=GROUP):
        try:
            entry.load()()
        except Exception:
            logger.exception("plugin %s (%s) failed and is skipped", entry.name, entry.value)
            continue
        loaded.append(entry.name)
    return loaded
