"""From the gate to the loader of hooks.

Knows the environment's names and where the loader lies. Does not know any hook. `sitecustomize`
calls it, and so does OpenTelemetry's own `sitecustomize`, through this folder's entry point, where
that one comes first and hides ours. Imports nothing but the standard library, because the program
around it may lack everything else.
"""

import os
import sys
from importlib import import_module

ALIAS = "_isinglass_hooks"
"""Name under which the loader's files are imported, without the package around them."""

_OLDEST = (3, 11)
"""The Python that hooks need. This file and `sitecustomize` can be read by any since 2.7."""


def activate():  # type: () -> None
    """Watch for the targets of the hooks that the gate names; once a process, never raises."""
    gate = os.environ.get("ISINGLASS_HOOKS", "")
    is_disabled = os.environ.get("ISINGLASS_HOOKS_DISABLED", "0") not in ("", "0")
    if is_disabled or not gate.strip(" ,") or ALIAS in sys.modules:
        return
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    package = type(sys)(ALIAS, "The loader of hooks, by itself.")
    package.__path__ = [folder]
    sys.modules[ALIAS] = package
    if sys.version_info < _OLDEST:
        theirs, ours = [".".join(map(str, one[:2])) for one in (sys.version_info, _OLDEST)]
        _say(sys.executable + " is Python " + theirs + ", and hooks need " + ours + " or newer")
        return
    try:
        loader = import_module(ALIAS + ".loader")
        registry = import_module(ALIAS + ".registry")
        watch = import_module(ALIAS + ".import_watch").watch
        loader.provide_instrumentation(os.path.dirname(os.path.dirname(folder)))
        loader.activate(registry.names_in(gate), find=registry.find_hook, watch=watch)
    except Exception as error:
        _say(type(error).__name__ + ": " + str(error))


def _say(why):  # type: (str) -> None
    if sys.stderr is not None:
        sys.stderr.write("isinglass hooks: none is active: " + why + "\n")
