"""How much of what this frontend has sent waits for its first step, and how fast it stops waiting.

Told of each request once when it is sent and once when it waits no more, and of each step what it
left free, so that a step costs what it admits and never what waits. Knows no engine.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, MutableSequence

from instrumentation import AdmissionStop, StepRecord

_NUM_DEPARTURES = 128
"""Departures that the rate is taken from."""
_FORGET_NS = 30 * 10**9
"""Departures that are older say nothing of now: by the time in which something waited."""
_COUNT_BITS = 24
_NO_ROOM = frozenset({AdmissionStop.KV_BLOCKS, AdmissionStop.AFTER_PREEMPTION})
"""Where admission stopped for these, places that are not taken are not free."""


class QueueCounter:
    """Counts sequences and their prompt tokens from being sent until a step has admitted them.

    Preempted ones, which wait a second time, are not counted: they have been let in.

    Attributes:
        num_requests: sequences that wait; a request with n samples is n of them.
        num_tokens: tokens of their prompts.
        num_running: sequences that run in the engine, whoever sent them, as of its last step.
        shown: gets what waits, and what the engine's last step left, for other frontends to read;
            six numbers, of which the first two and the last two are ours.
    """

    def __init__(self, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.num_running = 0
        self.shown: MutableSequence[int] | None = None
        self._has_blocks = True
        self._num_budget_left: int | None = None
        self._last_step = self._order = 0
        self._clock = clock
        self._waiting: dict[int, int] = {}
        self._waited_ns, self._waiting_since_ns = 0, 0
        # Each with the time waited until then; the first is where the others are counted from.
        self._departures: deque[tuple[int, int, int]] = deque([(0, 0, 0)], _NUM_DEPARTURES + 1)

    def add(self, request_num: int, num_tokens: int) -> None:
        """A sequence has been sent to the core."""
        if not self._waiting:
            self._waiting_since_ns = self._clock()
        self._waiting[request_num] = num_tokens
        self.num_requests += 1
        self.num_tokens += num_tokens
        self._show()

    def remove(self, request_nums: Iterable[int]) -> None:
        """These wait no more, for whatever reason; those that did not wait are ignored."""
        num_requests = num_tokens = 0
        for request_num in request_nums:
            tokens = self._waiting.pop(request_num, None)
            if tokens is not None:
                num_requests += 1
                num_tokens += tokens
        if num_requests:
            now_ns = self._clock()
            self._waited_ns += now_ns - self._waiting_since_ns
            self._waiting_since_ns = now_ns
            self.num_requests -= num_requests
            self.num_tokens -= num_tokens
            self._departures.append((self._waited_ns, num_requests, num_tokens))
            self._show()

    def observe_step(self, step: StepRecord) -> None:
        """A step of the engine: what it admitted waits no more, and what it left is free."""
        self._last_step = step.step
        has_blocks = step.admission_stop not in _NO_ROOM
        self._see(2 * step.step, step.num_running_at_end, has_blocks, step.token_budget_left)
        if step.admissions:  # behind what the step left: nowhere does both count as gone
            self.remove(admission.request_num for admission in step.admissions)

    def observe_idle(self) -> None:
        """Nothing is left to do, which no step has told of."""
        self._see(2 * self._last_step + 1, 0, True, self._num_budget_left)

    def learn(self, seen: int, num_budget_left: int) -> None:
        """What a frontend shows that has seen more of the engine; ignored if it has not."""
        order = seen >> (_COUNT_BITS + 1)
        if order > self._order:
            num_running = seen >> 1 & ((1 << _COUNT_BITS) - 1)
            self._see(order, num_running, bool(seen & 1), num_budget_left)

    def num_free_places(self, max_num_seqs: int) -> int:
        """Sequences that the engine can take in besides those that run; 0 while it is short of
        KV blocks."""
        return max(0, max_num_seqs - self.num_running) if self._can_admit else 0

    def num_free_tokens(self, max_num_batched_tokens: int) -> int:
        """Prompt tokens for which the engine's next step has room."""
        if not self.num_running or self._num_budget_left is None:
            return max_num_batched_tokens
        return self._num_budget_left if self._can_admit else 0

    def seconds_until_gone(self, *, num_requests: float = 0, num_tokens: float = 0) -> float:
        """How long it takes until so much of the queue is gone, at the rate of late.

        The rate is that of the last departures, over the time in which something waited: it falls
        while nothing leaves, and an idle engine leaves it as it is. Where nothing has left of late,
        one is taken to leave now.
        """
        now_ns = self._waited_ns
        if self._waiting:
            now_ns += self._clock() - self._waiting_since_ns
        departures = self._departures
        while len(departures) > 1 and now_ns - departures[1][0] > _FORGET_NS:
            departures.popleft()
        elapsed_s = (now_ns - departures[0][0]) / 1e9
        gone_requests = sum(requests for _, requests, _ in departures) - departures[0][1]
        gone_tokens = sum(tokens for _, _, tokens in departures) - departures[0][2]
        if not gone_requests:
            gone_requests, gone_tokens = 1, next(iter(self._waiting.values()), 1)
        return elapsed_s * max(num_requests / gone_requests, num_tokens / max(1, gone_tokens))

    @property
    def _can_admit(self) -> bool:
        return self._has_blocks or not self.num_running

    def _see(
        self, order: int, num_running: int, has_blocks: bool, num_budget_left: int | None
    ) -> None:
        """So it stands behind a step, which is ignored if a later one is known."""
        if order < self._order:
            return
        self._order = order
        self.num_running, self._has_blocks = num_running, has_blocks
        self._num_budget_left = num_budget_left
        if self.shown is not None:  # the budget first, since the order is that of both
            self.shown[5] = num_budget_left or 0
            self.shown[4] = (order << _COUNT_BITS | num_running) << 1 | has_blocks

    def _show(self) -> None:
        if self.shown is not None:
            self.shown[0], self.shown[1] = self.num_requests, self.num_tokens
