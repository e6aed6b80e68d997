"""What Python imports at start-up where this folder is on PYTHONPATH.

Knows the gate (`ISINGLASS_HOOKS`) and that another `sitecustomize` may lie further down the path,
which would have run without this one. Does not know any hook. Without the gate it only hands over
to that other one. Any Python may come across it, so it is written for all since 2.7.
"""

import os
import sys

if sys.version_info >= (3, 5):  # noqa: UP036 - not ours, but whoever has this folder on its path

    def _run(rest):  # type: (list[str]) -> None
        from _frozen_importlib import module_from_spec
        from _frozen_importlib_external import PathFinder

        spec = PathFinder.find_spec("sitecustomize", rest)
        if spec is None or spec.loader is None:
            return
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)

else:

    def _run(rest):
        import imp

        try:
            stream, path, kind = imp.find_module("sitecustomize", rest)
        except ImportError:
            return
        # Without us under that name, or it would be executed as us; kept, or we lose our globals.
        sys.modules["_isinglass_sitecustomize"] = sys.modules.pop("sitecustomize")
        try:
            imp.load_module("sitecustomize", stream, path, kind)
        finally:
            stream.close()
            sys.modules.setdefault("sitecustomize", sys.modules["_isinglass_sitecustomize"])


def _run_next():  # type: () -> None
    """Run the `sitecustomize` that this one hides, under its own name; its errors are Python's."""
    here = os.path.dirname(os.path.abspath(__file__))
    entries = [os.path.abspath(entry) for entry in sys.path]
    begin = entries.index(here) + 1 if here in entries else 0
    _run([entry for entry in entries[begin:] if entry != here])


if os.environ.get("ISINGLASS_HOOKS"):
    from importlib import import_module

    # Lies beside this file, so it is on the path.
    import_module("_isinglass_hooks_boot").activate()
_run_next()
