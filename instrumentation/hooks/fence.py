"""The fence between a hook's code and the program that it watches.

Knows how to call our code so that nothing of it reaches the program. Does not know what is called.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any


class Fence:
    """Calls a hook's functions; their errors are counted, told once a function, and go no further.

    `num_errors` is the count.
    """

    def __init__(self, hook: str) -> None:
        self._hook = hook
        self._reported: set[str] = set()
        self.num_errors = 0

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function; None where it raises."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self._report(getattr(function, "__qualname__", repr(function)), error)
            return None

    def _report(self, where: str, error: Exception) -> None:
        self.num_errors += 1
        if where in self._reported:
            return
        self._reported.add(where)
        if sys.stderr is not None:
            sys.stderr.write(
                f"isinglass hooks: {self._hook}: {where} failed and is counted from now on "
                f"(the program is not affected): {type(error).__name__}: {error}\n"
            )


def wrap(
    owner: Any,
    name: str,
    *,
    fence: Fence,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    failed: Callable[..., Any] | None = None,
) -> bool:
    """Put functions around a method of a class or of an object; False where it has no such method.

    The method is called exactly once, with what was given, and its result or its error is what the
    caller gets.

    Args:
        owner: the class or the object.
        name: the method.
        fence: through which our functions are called.
        before: gets the call's arguments.
        after: gets what `before` returned, the result, and the call's arguments.
        failed: gets the error instead, and the call's arguments.
    """
    original = getattr(owner, name, None)
    if not callable(original):
        return False

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        state = fence.call(before, *args, **kwargs) if before is not None else None
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            if failed is not None:
                fence.call(failed, error, *args, **kwargs)
            raise
        if after is not None:
            fence.call(after, state, result, *args, **kwargs)
        return result

    setattr(owner, name, wrapper)
    return True
