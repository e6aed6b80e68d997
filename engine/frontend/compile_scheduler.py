"""Which constraint is tried out next, and for how long.

The rule: each gets a short slice of the quick lane, and what is not done by then begins anew in the
slow lane, where one at a time, in the order of coming, has all of its time. The reason: nobody
knows beforehand what a constraint takes, and a quick one is never to wait for a slow one.

First slices go to the newest and to the oldest by turns, so that however many have come at once, a
newcomer waits for two or three slices, and nobody for ever. While the slow lane is busy, what is
bound for it may have one longer slice of the quick lane, which ends when a newcomer needs it.

Knows turns and times. Knows no constraint's meaning; workers are handed in.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from engine.frontend.grammar_worker import ChildDeathError, Worker, Workers
from engine.types.grammar_messages import WALL_FACTOR, CompileRequest, CompileResult, GrammarKey
from instrumentation import GrammarOutcome

_SLICES_S: Final = (0.2, 1.0)
"""Processor time in the quick lane, for the first try and the second."""
_NUM_TRIES: Final = 2
"""Of a constraint whose worker dies: something else may have killed the first."""


@dataclass(slots=True)
class _AskedState:
    """A constraint that is to be tried out, and what has been spent on it."""

    number: int
    key: GrammarKey
    level: int = 0
    """How many slices it has used up."""
    num_deaths: int = 0
    spent_ns: int = 0


@dataclass(slots=True)
class _LaneState:
    """One of the two, and what is tried out there."""

    asked: _AskedState | None = None
    worker: Worker | None = None
    is_last_try: bool = False
    """Whether it has all the time that a constraint may take."""
    began_ns: int = 0
    deadline_ns: int = 0


class CompileScheduler:
    """Constraints that wait and that are being tried out.

    Args:
        workers: makes a worker, or has one ready.
        timeout_s: processor time that one constraint may take in one go.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        timeout_s: float,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._workers = workers
        self._timeout_s = timeout_s
        self._clock = clock
        self._waiting: list[deque[_AskedState]] = [deque() for _ in range(len(_SLICES_S) + 1)]
        self._quick, self._slow = _LaneState(), _LaneState()
        self._is_oldests_turn = False

    @property
    def filenos(self) -> list[int]:
        """Of the workers at work, to be waited for."""
        return [worker.fileno() for _, worker, _ in self._busy()]

    @property
    def num_waiting(self) -> int:
        """Constraints that no worker has."""
        return sum(len(waiting) for waiting in self._waiting)

    def seconds_left(self) -> float | None:
        """Until the next worker is out of time, None with no worker at work."""
        left_ns = [lane.deadline_ns - self._clock() for lane, _, _ in self._busy()]
        return max(0.0, min(left_ns) / 1e9) if left_ns else None

    def take(self, request: CompileRequest) -> None:
        """A constraint is wanted, or no longer."""
        if request.key is not None:
            self._waiting[0].append(_AskedState(request.number, request.key))
            return
        for lane, worker, asked in self._busy():
            if asked.number == request.number:
                worker.end()
                self._clear(lane)
        for level, waiting in enumerate(self._waiting):
            self._waiting[level] = deque(
                asked for asked in waiting if asked.number != request.number
            )

    def advance(self, readable: Iterable[int]) -> list[CompileResult]:
        """Read answers, end what is out of time, begin what is next; returns what is settled."""
        ready = set(readable)
        results: list[CompileResult] = []
        for lane, worker, asked in self._busy():
            if worker.fileno() in ready:
                results += self._read(lane, worker, asked)
            elif self._clock() >= lane.deadline_ns:
                worker.end()
                results += self._give_way(lane, asked)
        self._begin_next()
        return results

    def _busy(self) -> list[tuple[_LaneState, Worker, _AskedState]]:
        return [
            (lane, lane.worker, lane.asked)
            for lane in (self._quick, self._slow)
            if lane.worker is not None and lane.asked is not None
        ]

    def _read(self, lane: _LaneState, worker: Worker, asked: _AskedState) -> list[CompileResult]:
        try:
            result = worker.read()
        except ChildDeathError as death:
            if death.is_out_of_time:
                return self._give_way(lane, asked)
            return self._take_death(lane, asked)
        if result is None:
            return []
        self._leave(lane, asked)
        if lane is self._quick:
            self._workers.give_back(worker)
        else:
            worker.end()  # it may have grown
        result.number, result.duration_ns = asked.number, asked.spent_ns
        return [result]

    def _give_way(self, lane: _LaneState, asked: _AskedState) -> list[CompileResult]:
        """Its time is up: that of its slice, or all."""
        self._leave(lane, asked)
        if lane.is_last_try:
            text = f"compiling it took longer than {self._timeout_s:g} s; make it simpler"
            return [_failed(asked, GrammarOutcome.TIMED_OUT, text)]
        asked.level += 1
        self._waiting[asked.level].append(asked)
        return []

    def _take_death(self, lane: _LaneState, asked: _AskedState) -> list[CompileResult]:
        self._leave(lane, asked)
        asked.num_deaths += 1
        if asked.num_deaths < _NUM_TRIES:
            self._waiting[asked.level].appendleft(asked)
            return []
        text = "the grammar compiler crashed on it twice, or ran out of memory; make it simpler"
        return [_failed(asked, GrammarOutcome.CRASHED, text)]

    def _begin_next(self) -> None:
        first = self._waiting[0]
        running = self._quick.asked
        if first and running is not None and running.level > 0:
            assert self._quick.worker is not None
            self._quick.worker.end()
            self._leave(self._quick, running)
            self._waiting[running.level].appendleft(running)
        if self._slow.worker is None:
            # Before the quick lane takes it: there it would be in the way of others.
            leftovers = [waiting for waiting in self._waiting[1:] if waiting]
            if leftovers:
                oldest = min(leftovers, key=lambda waiting: waiting[0].number)
                self._begin(self._slow, oldest.popleft(), self._timeout_s)
        if self._quick.worker is not None:
            return
        if first:
            asked = first.popleft() if self._is_oldests_turn else first.pop()
            self._is_oldests_turn = not self._is_oldests_turn
            self._begin(self._quick, asked, _SLICES_S[0])
        elif self._waiting[1]:
            self._begin(self._quick, self._waiting[1].popleft(), _SLICES_S[1])

    def _begin(self, lane: _LaneState, asked: _AskedState, slice_s: float) -> None:
        processor_s = min(slice_s, self._timeout_s)
        lane.asked = asked
        lane.worker = self._workers.take(is_new=asked.num_deaths > 0)
        lane.is_last_try = processor_s == self._timeout_s
        lane.began_ns = self._clock()
        lane.deadline_ns = lane.began_ns + int(processor_s * WALL_FACTOR * 1e9)
        lane.worker.ask(asked.key, processor_s=processor_s)

    def _leave(self, lane: _LaneState, asked: _AskedState) -> None:
        """The worker is gone, or has nothing to do any more."""
        asked.spent_ns += self._clock() - lane.began_ns
        self._clear(lane)

    def _clear(self, lane: _LaneState) -> None:
        lane.asked = lane.worker = None


def _failed(asked: _AskedState, outcome: GrammarOutcome, failure: str) -> CompileResult:
    return CompileResult(asked.number, outcome, failure, asked.spent_ns)
