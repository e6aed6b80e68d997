"""Applying hooks: each at the import of its targets, and none able to hurt the program.

Knows the fence around a hook. Does not know where hooks come from (`registry`) nor how imports are
seen (`import_watch`); whoever calls it brings both. Standard library only, like those.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_reported: set[str] = set()


def report(name: str, error: BaseException) -> None:
    """Say once that a hook is skipped."""
    if name in _reported:
        return
    _reported.add(name)
    if sys.stderr is not None:
        sys.stderr.write(f"isinglass hooks: {name} is skipped: {type(error).__name__}: {error}\n")


def activate(
    names: Sequence[str],
    *,
    find: Callable[[str], Any],
    watch: Callable[[str, Callable[[ModuleType], None]], None],
) -> None:
    """Watch for the targets of these hooks.

    Args:
        names: the hooks.
        find: the hook of a name (`registry.Hook`), or None.
        watch: calls a function with a module once that is imported.
    """
    for name in names:
        try:
            hook = find(name)
            if hook is None:
                raise LookupError("there is no such hook; see `isinglass hooks list`")
            if not hook.targets:
                hook.load()
            for target in hook.targets:
                watch(target, _fenced(hook))
        except (Exception, SystemExit) as error:
            report(name, error)


def _fenced(hook: Any) -> Callable[[ModuleType], None]:
    """Apply the hook to a target, unless it has failed before."""

    def apply(module: ModuleType) -> None:
        if hook.name in _reported:
            return
        try:
            if hook.source == "builtin":
                check_instrumentation()
            hook.load()(module)
        except (Exception, SystemExit) as error:
            report(hook.name, error)

    return apply


class _InstrumentationFinder:
    """Finds the package `instrumentation`, and nothing else, in a folder that is not on the path.

    It comes last, so it shadows nothing of the program; and what else lies in that folder, perhaps
    a whole site-packages of another interpreter, stays out of the program's sight.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The package's spec, or None for anything else."""
        if name != "instrumentation":
            return None
        return PathFinder.find_spec(name, [self.root])


def provide_instrumentation(root: str) -> None:
    """Make the package `instrumentation` of that folder importable, unless it is anyway."""
    sys.meta_path.append(_InstrumentationFinder(root))


def check_instrumentation() -> None:
    """Import the package `instrumentation`, before the hooks that need it.

    Raises:
        ImportError: the program has a module of that name, or lacks what ours needs.
    """
    try:
        import instrumentation
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}; install the package {error.name} into {sys.prefix}") from error
    if not hasattr(instrumentation, "StepRecord"):
        raise ImportError(
            f"the program has a module named instrumentation of its own ({instrumentation!r}), "
            "which hides that of Isinglass"
        )
