"""How late the event loop is: a timer that looks at the clock when it is run.

Knows asyncio. Something that blocks the loop, whatever it is, shows here and nowhere else.
"""

import asyncio
import time

from instrumentation.metrics.server import ServerMetrics

INTERVAL_S = 0.25


class LoopWatch:
    """Samples the lag of the running loop from `start` on, for as long as the loop runs."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._due_ns = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin on the running loop; harmless when it has begun."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._arm()

    def _arm(self) -> None:
        assert self._loop is not None
        self._due_ns = time.monotonic_ns() + round(INTERVAL_S * 1e9)
        self._loop.call_later(INTERVAL_S, self._sample)

    def _sample(self) -> None:
        lag_ns = time.monotonic_ns() - self._due_ns
        self._arm()
        self._metrics.observe_loop(lag_ns, next_sample_ns=self._due_ns)
