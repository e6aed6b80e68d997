"""What Python imports at start-up where this folder is on PYTHONPATH.

Knows the gate (`ISINGLASS_HOOKS`) and that another `sitecustomize` may lie further down the path,
which would have run without this one. Does not know any hook. Without the gate it only hands over
to that other one.
"""

import os
import sys


def _run_next() -> None:
    """Run the `sitecustomize` that this one hides, under its own name; its errors are Python's."""
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    entries = [os.path.abspath(entry) for entry in sys.path]
    begin = entries.index(here) + 1 if here in entries else 0
    rest = [entry for entry in entries[begin:] if entry != here]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("ISINGLASS_HOOKS"):
    from importlib import import_module

    # Lies beside this file, so it is on the path.
    import_module("_isinglass_hooks_boot").activate()
_run_next()
