"""How much of what this frontend has sent waits for its first step, and how fast it stops waiting.

Told of each request once when it is sent and once when it waits no more, so that a step costs what
it admits and never what waits. Knows no engine.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

_NUM_DEPARTURES = 128
"""Departures that the rate is taken from."""
_FORGET_NS = 30 * 10**9
"""Departures that are older say nothing of now."""


class QueueCounter:
    """Counts sequences and their prompt tokens from being sent until a step has admitted them.

    Preempted ones, which wait a second time, are not counted: they have been let in.

    Attributes:
        num_requests: sequences that wait; a request with n samples is n of them.
        num_tokens: tokens of their prompts.
    """

    def __init__(self, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._clock = clock
        self._waiting: dict[int, int] = {}
        self._departures: deque[tuple[int, int, int]] = deque(maxlen=_NUM_DEPARTURES)

    def add(self, request_num: int, num_tokens: int) -> None:
        """A sequence has been sent to the core."""
        self._waiting[request_num] = num_tokens
        self.num_requests += 1
        self.num_tokens += num_tokens

    def remove(self, request_nums: Iterable[int]) -> None:
        """These wait no more, for whatever reason; those that did not wait are ignored."""
        num_requests = num_tokens = 0
        for request_num in request_nums:
            tokens = self._waiting.pop(request_num, None)
            if tokens is not None:
                num_requests += 1
                num_tokens += tokens
        if num_requests:
            self.num_requests -= num_requests
            self.num_tokens -= num_tokens
            self._departures.append((self._clock(), num_requests, num_tokens))

    def seconds_until_gone(self, *, num_requests: int = 0, num_tokens: int = 0) -> float | None:
        """How long it takes until so much of the queue is gone, at the rate of late.

        The rate is that of the last departures up to now, so that it falls while nothing leaves.
        None where nothing has left of late.
        """
        now_ns = self._clock()
        recent = [one for one in self._departures if now_ns - one[0] <= _FORGET_NS]
        if not recent:
            return None
        elapsed_s = max(1, now_ns - recent[0][0]) / 1e9
        gone_requests = sum(requests for _, requests, _ in recent)
        gone_tokens = sum(tokens for _, _, tokens in recent)
        return max(
            num_requests * elapsed_s / gone_requests, num_tokens * elapsed_s / max(1, gone_tokens)
        )
