"""The hook `nvtx-layers`: an NVTX range around the forward of every `torch.nn.Module`.

Knows torch's global hooks and how modules are named. Does not know any model. What Dynamo compiles
has no forward of its own any more, and no range: to its tracing, the hooks are empty.
"""

from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from instrumentation.hooks.fence import Fence
from instrumentation.profile.layer_ranges import ModuleRanges, is_traced
from instrumentation.profile.nvtx import choose_nvtx
from instrumentation.record.ranges import Ranges


class GlobalLayerRanges:
    """Brackets every module's forward with a range named by its path from the outermost module.

    The outermost one is named by its class. Paths are learnt when an outermost module is first
    called; one that is reached later, by other ways, is named by its class.
    """

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._open = ModuleRanges(ranges)
        self._handles: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._fence = Fence("nvtx-layers")

    def attach(self, module_of_hooks: Any) -> None:
        """Register with `torch.nn.modules.module`."""

        def before(module: Any, args: Any) -> None:
            if not is_traced():
                self._fence.call(self._enter, module)

        def after(module: Any, args: Any, output: Any) -> None:
            if not is_traced():
                self._fence.call(self._open.leave, module)

        module_of_hooks.register_module_forward_pre_hook(before)
        # Also where the forward raises, so that ranges stay nested.
        module_of_hooks.register_module_forward_hook(after, always_call=True)

    def _enter(self, module: Any) -> None:
        handle = self._handles.get(module)
        if handle is None:
            self._learn(module)
            handle = self._handles[module]
        self._open.enter(module, handle)

    def _learn(self, root: Any) -> None:
        name_of_root = type(root).__name__
        for path, module in root.named_modules():
            name = f"{name_of_root}.{path}" if path else name_of_root
            if module not in self._handles:
                self._handles[module] = self._ranges.prepare(name)


def install(module: ModuleType) -> None:
    """Attach to `torch.nn`.

    Raises:
        RuntimeError: the package nvtx is missing, or no tool is attached.
    """
    choice = choose_nvtx("on")
    if choice.ranges is None:
        raise RuntimeError(choice.reason)
    GlobalLayerRanges(choice.ranges).attach(module.modules.module)
