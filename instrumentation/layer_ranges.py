"""A range around every layer of a model, by hooks that are attached from outside.

Knows the hooks of `torch.nn.Module`. Does not know any model, and no model knows of it.
"""

from collections.abc import Iterable
from typing import Any

from instrumentation.ranges import Ranges


class LayerRanges:
    """Brackets the forward pass of each module with a range named by its path in the model.

    The model's own range is called by its class. Nothing is left of it after `remove`.
    """

    def __init__(self, named_modules: Iterable[tuple[str, Any]], ranges: Ranges) -> None:
        self._ranges = ranges
        self._hooks: list[Any] = []
        for path, module in named_modules:
            self._attach(module, ranges.prepare(path or type(module).__name__))

    def _attach(self, module: Any, handle: Any) -> None:
        push, pop = self._ranges.push, self._ranges.pop

        def before(module: Any, args: Any) -> None:
            push(handle)

        def after(module: Any, args: Any, output: Any) -> None:
            pop()

        # First in and last out, so that the hooks of others lie within the range; and closed even
        # if the layer raises.
        self._hooks.append(module.register_forward_pre_hook(before, prepend=True))
        self._hooks.append(module.register_forward_hook(after, always_call=True))

    def remove(self) -> None:
        """Take all hooks off; harmless when called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
