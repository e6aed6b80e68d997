"""Seeing imports: calling functions with a module once it has been executed.

Knows the import system's finders and loaders. Does not know what the functions do; they must not
raise. Nothing of it stays on a module that was seen: its loader and its spec are the usual ones.
"""

import sys
from collections.abc import Callable
from importlib.machinery import (
    ExtensionFileLoader,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]

_OWN_INSTANCE = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)
"""Loaders of which each module has an instance of its own."""


class _ImportWatcher:
    """A finder that finds nothing itself, but has the loader of a watched module tell us."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}
        self._being_found: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec that the other finders give, for a watched module only."""
        if name not in self.callbacks or name in self._being_found:
            return None
        self._being_found.add(name)
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                if finder is self or find is None:
                    continue
                spec: ModuleSpec | None = find(name, path, target)
                if spec is not None:
                    self._instrument(spec)
                    return spec
        finally:
            self._being_found.discard(name)
        return None

    def _instrument(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return
        if type(loader) in _OWN_INSTANCE:
            execute = loader.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)
                execute(module)
                self.tell(module, spec.name)

            vars(loader)["exec_module"] = execute_and_tell
        else:
            spec.loader = _TellingLoader(loader, self)  # type: ignore[assignment]

    def tell(self, module: ModuleType, name: str) -> None:
        """Call a module's callbacks, once."""
        # What a module puts into sys.modules in its own place is what others will import.
        found = sys.modules.get(name, module)
        for callback in self.callbacks.pop(name, []):
            callback(found)


class _TellingLoader:
    """Stands in for a loader that several modules share, until its module is executed."""

    def __init__(self, loader: Any, watcher: _ImportWatcher) -> None:
        self._loader = loader
        self._watcher = watcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader itself does."""
        create = getattr(self._loader, "create_module", None)
        module: ModuleType | None = create(spec) if create is not None else None
        return module

    def exec_module(self, module: ModuleType) -> None:
        """As the loader itself does; then step aside and tell."""
        spec = module.__spec__
        assert spec is not None
        spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._watcher.tell(module, spec.name)


_watcher = _ImportWatcher()


def watch(name: str, callback: Callback) -> None:
    """Call a function with the module of that name: now if it is imported, else once it is."""
    module = sys.modules.get(name)
    is_being_imported = getattr(getattr(module, "__spec__", None), "_initializing", False)
    if module is not None and not is_being_imported:
        callback(module)
        return
    _watcher.callbacks.setdefault(name, []).append(callback)
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
