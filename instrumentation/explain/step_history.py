"""The last few thousand steps and requests, kept in the caller so that questions can be answered.

Knows how long things are kept. Does not know the questions (`attribution`, `request_report`,
`slo`). Keeping a step is one append; everything else happens when somebody asks or a request ends.
One thread keeps; others may ask at any time.
"""

from collections import OrderedDict, deque
from typing import NamedTuple

from instrumentation.record.flight import copy_of
from instrumentation.record.request_records import RequestTimeline
from instrumentation.record.step_records import StepRecord, WorkerStepRecord

NUM_STEPS = 2048
NUM_REQUESTS = 1024


class HistoricStep(NamedTuple):
    """A step of the core, and how a worker ran it (None where no record of that has come)."""

    step: StepRecord
    worker_step: WorkerStepRecord | None

    @property
    def begin_ns(self) -> int:
        """When the worker began, or else the scheduler."""
        return self.worker_step.begin_ns if self.worker_step is not None else self.step.begin_ns

    @property
    def end_ns(self) -> int:
        """When the worker was done, or else the core."""
        return self.worker_step.end_ns if self.worker_step is not None else self.step.end_ns

    @property
    def duration_ns(self) -> int:
        """What the step took."""
        return self.end_ns - self.begin_ns


class StepHistory:
    """Bounded memory of steps and of requests that have ended."""

    def __init__(self, *, num_steps: int = NUM_STEPS, num_requests: int = NUM_REQUESTS) -> None:
        self._pairs: deque[tuple[StepRecord | None, WorkerStepRecord | None]] = deque(
            maxlen=num_steps
        )
        self._num_requests = num_requests
        self._finished: OrderedDict[str, RequestTimeline] = OrderedDict()

    def observe(self, step: StepRecord | None, worker_step: WorkerStepRecord | None) -> None:
        """Keep what came with a message of the core."""
        self._pairs.append((step, worker_step))

    def add(self, timeline: RequestTimeline) -> None:
        """Keep a request that has ended; of two with the same id the later one."""
        finished = self._finished
        finished.pop(timeline.request_id, None)
        finished[timeline.request_id] = timeline
        while len(finished) > self._num_requests:
            finished.popitem(last=False)

    def finished(self, request_id: str) -> RequestTimeline | None:
        """A request that has ended, None if it is not (or no longer) known."""
        return self._finished.get(request_id)

    def finished_requests(self) -> list[RequestTimeline]:
        """All that are remembered, in the order in which they ended."""
        return copy_of(self._finished.values())

    def steps(self, *, since_ns: int = 0) -> list[HistoricStep]:
        """The steps that are remembered, in the order in which they were planned.

        `since_ns` leaves out those that were planned before it, except for the last of them, which
        may still have been running then.
        """
        pairs = []
        for pair in reversed(copy_of(self._pairs)):
            pairs.append(pair)
            if pair[0] is not None and pair[0].begin_ns < since_ns:
                break
        pairs.reverse()
        workers = {worker.step: worker for _, worker in pairs if worker is not None}
        return [HistoricStep(step, workers.get(step.step)) for step, _ in pairs if step is not None]
