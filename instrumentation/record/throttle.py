"""The price of recording, watched: when it is too high, less is recorded.

Knows how much processor time the drain thread took. Does not know what each level leaves out.
"""

from collections.abc import Callable

_WINDOW_NS = 10_000_000_000
_CALM_SHARE = 0.5


class Throttle:
    """Compares processor time with elapsed time, window by window.

    Over the share allowed, the level rises by one (less is recorded); under half of it, it falls by
    one.

    Attributes:
        level: 0 for everything, up to `max_level`.
    """

    def __init__(
        self,
        max_share: float,
        *,
        max_level: int,
        apply: Callable[[int, float], None],
        window_ns: int = _WINDOW_NS,
    ) -> None:
        self.level = 0
        self._max_share = max_share
        self._max_level = max_level
        self._apply = apply
        self._window_ns = window_ns
        self._begin: tuple[int, int] | None = None

    def observe(self, now_ns: int, processor_ns: int) -> None:
        """Take a reading of both clocks; `apply(level, share)` is called when the level changes."""
        if self._begin is None:
            self._begin = now_ns, processor_ns
            return
        elapsed_ns = now_ns - self._begin[0]
        if elapsed_ns < self._window_ns:
            return
        share = (processor_ns - self._begin[1]) / elapsed_ns
        self._begin = now_ns, processor_ns
        level = self.level
        if share > self._max_share:
            level = min(level + 1, self._max_level)
        elif share < _CALM_SHARE * self._max_share:
            level = max(level - 1, 0)
        if level != self.level:
            self.level = level
            self._apply(level, share)
