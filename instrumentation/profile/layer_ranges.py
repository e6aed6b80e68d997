"""A range around every layer of a model, by hooks that are attached from outside.

Knows the hooks of `torch.nn.Module`, when they are called and when not. Does not know any model,
and no model knows of it.
"""

import sys
import threading
from collections.abc import Iterable
from typing import Any

from instrumentation.record.ranges import Ranges


def is_traced() -> bool:
    """Whether Dynamo traces the caller, for a graph that must not contain it.

    Always False where it really runs, so that what is opened is closed.
    """
    import torch  # here: a hook is attached before torch is whole

    return torch.compiler.is_dynamo_compiling()


class ModuleRanges:
    """The ranges that calls of modules have open, of each thread; nested whatever is raised.

    A module's hooks do not come in pairs. Where another's hook raises before ours, ours is called
    at the end only; where what is raised is no `Exception` (Ctrl-C in a notebook), or torch exports
    the model, at the begin only. So a module closes what it has opened, and all that was left open
    within; the outermost one begins with nothing open.
    """

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._local = threading.local()

    def enter(self, module: Any, handle: Any) -> None:
        """A module is called: to be called by a hook of it."""
        stack = self._stack()
        if stack and not _is_within_another(type(module)):
            self._close(stack, len(stack))
        self._ranges.push(handle)
        stack.append(id(module))

    def leave(self, module: Any) -> None:
        """It is left."""
        stack = self._stack()
        for depth, one in enumerate(reversed(stack), 1):
            if one == id(module):
                self._close(stack, depth)
                return

    def _stack(self) -> list[int]:
        stack: list[int] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def _close(self, stack: list[int], number: int) -> None:
        for _ in range(number):
            stack.pop()
            self._ranges.pop()


def _is_within_another(module_class: Any) -> bool:
    """Whether the call whose hook this is was made by another module's."""
    call = module_class._call_impl.__code__
    num_calls = 0
    frame = sys._getframe()
    while frame is not None and num_calls < 2:
        num_calls += frame.f_code is call
        frame = frame.f_back  # type: ignore[assignment]
    return num_calls == 2


class LayerRanges:
    """Brackets the forward pass of each module with a range named by its path in the model.

    The model's own range is called by its class. What Dynamo compiles has no ranges: to its
    tracing, the hooks are empty, and the graph stays whole. Nothing is left of it after `remove`.
    """

    def __init__(self, named_modules: Iterable[tuple[str, Any]], ranges: Ranges) -> None:
        self._ranges = ModuleRanges(ranges)
        self._hooks: list[Any] = []
        for path, module in named_modules:
            self._attach(module, ranges.prepare(path or type(module).__name__))

    def _attach(self, module: Any, handle: Any) -> None:
        enter, leave = self._ranges.enter, self._ranges.leave

        def before(module: Any, args: Any) -> None:
            if not is_traced():
                enter(module, handle)

        def after(module: Any, args: Any, output: Any) -> None:
            if not is_traced():
                leave(module)

        # First in and last out, so that the hooks of others lie within the range; and closed even
        # if the layer raises.
        self._hooks.append(module.register_forward_pre_hook(before, prepend=True))
        self._hooks.append(module.register_forward_hook(after, always_call=True))

    def remove(self) -> None:
        """Take all hooks off; harmless when called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
