"""The status line: throughput, queues and cache use, every few seconds while there is work.

Knows what the line says. Does not know where records come from; the frontend feeds it.
"""

import logging
import time
from collections.abc import Callable

from instrumentation.record.step_records import StepRecord

_LOGGER = logging.getLogger("isinglass.status")


class ConsoleStatus:
    """Sums up steps between two lines and logs a line once the interval is over.

    Rates are over the time since the line before. An interval without a step prints nothing, except
    that one last line follows the last activity, so that the log does not end on a busy engine.
    """

    def __init__(
        self,
        *,
        interval_s: float = 10.0,
        log: Callable[[str], None] = _LOGGER.info,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if interval_s <= 0:
            raise ValueError(f"interval_s is {interval_s}; it must be above 0")
        self._interval_ns = round(interval_s * 1e9)
        self._log = log
        self._clock = clock
        self._last_line_ns = clock()
        self._last_step: StepRecord | None = None
        self._was_active = False
        self._reset()

    def _reset(self) -> None:
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_query_tokens = 0
        self._num_hit_tokens = 0
        self._num_preempted = 0

    def observe(self, record: StepRecord, *, num_generation_tokens: int) -> None:
        """Take one step in, with the output tokens that it delivered."""
        was_long = self._clock() - self._last_line_ns >= self._interval_ns
        if not self._num_steps and (was_long or not self._was_active):
            # The engine was idle, or coming up: that time is no part of the rates.
            self._last_line_ns = max(self._last_line_ns, record.begin_ns)
        self._last_step = record
        self._num_steps += 1
        self._num_prompt_tokens += record.num_context_tokens
        self._num_generation_tokens += num_generation_tokens
        self._num_query_tokens += record.prefix_query_tokens
        self._num_hit_tokens += record.prefix_hit_tokens
        self._num_preempted += record.num_preempted
        self.tick()

    def tick(self) -> None:
        """Log the line if it is time. Call it also while idle, if the loop wakes then."""
        now_ns = self._clock()
        if now_ns - self._last_line_ns < self._interval_ns:
            return
        is_active = self._num_steps > 0
        if self._last_step is not None and (is_active or self._was_active):
            self._log(self._line(self._last_step, now_ns - self._last_line_ns))
        self._was_active = is_active
        self._last_line_ns = now_ns
        self._reset()

    def _line(self, step: StepRecord, elapsed_ns: int) -> str:
        elapsed_s = elapsed_ns * 1e-9
        num_blocks = step.num_blocks_used + step.num_blocks_cached_free + step.num_blocks_free
        parts = [
            f"Avg prompt throughput: {self._num_prompt_tokens / elapsed_s:.1f} tokens/s",
            f"Avg generation throughput: {self._num_generation_tokens / elapsed_s:.1f} tokens/s",
            f"Running: {step.num_running} reqs",
            f"Waiting: {step.num_waiting} reqs",
            f"KV cache usage: {_percent(step.num_blocks_used, num_blocks)}",
            f"Prefix cache hit rate: {_percent(self._num_hit_tokens, self._num_query_tokens)}",
        ]
        if self._num_preempted:
            parts.append(f"Preempted: {self._num_preempted} reqs")
        return "Engine 000: " + ", ".join(parts)  # vLLM's line, with the number of the one there is


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "n/a"
