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


def activate() -> None:
    """Watch for the targets of the hooks that the gate names; once a process, never raises."""
    gate = os.environ.get("ISINGLASS_HOOKS", "")
    is_disabled = os.environ.get("ISINGLASS_HOOKS_DISABLED", "0") not in ("", "0")
    names = list(dict.fromkeys(name.strip() for name in gate.split(",") if name.strip()))
    if is_disabled or not names or ALIAS in sys.modules:
        return
    try:
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        package = type(sys)(ALIAS, "The loader of hooks, by itself.")
        package.__path__ = [folder]
        sys.modules[ALIAS] = package
        loader = import_module(f"{ALIAS}.loader")
        registry = import_module(f"{ALIAS}.registry")
        watch = import_module(f"{ALIAS}.import_watch").watch
        loader.provide_instrumentation(os.path.dirname(os.path.dirname(folder)))
        loader.activate(names, find=registry.find_hook, watch=watch)
    except Exception as error:
        if sys.stderr is not None:
            sys.stderr.write(f"isinglass hooks: none is active: {type(error).__name__}: {error}\n")
