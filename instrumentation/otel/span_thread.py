"""The thread that makes spans, and the inbox that it takes its work from.

Knows the order of requests, steps and HTTP exchanges, and how much time steps may take. Does not
know receivers nor the SDK's set-up. Whoever puts something into the inbox never waits.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from opentelemetry.trace import Tracer

from instrumentation.otel.exporting import BoundedProcessor
from instrumentation.otel.health import ExportHealth
from instrumentation.otel.http_spans import HttpSpans
from instrumentation.otel.request_spans import RequestSpans
from instrumentation.otel.step_spans import StepSpans
from instrumentation.record.request_records import RequestTimeline
from instrumentation.record.step_records import StepRecord, WorkerStepRecord

_MAX_INBOX = 8192
_WAKE_AT = 512
_POLL_S = 0.25
_STEP_SHARES = {"off": 0.0, "sampled": 0.05, "all": 0.25}
"""Of one processor's time, for writing spans of steps; what does not fit in waits, or is lost."""
_STEPS_SHARE_OF_CLOSE = 0.5


class Tracers(NamedTuple):
    """Who makes the spans, by what they are of."""

    requests: Tracer
    steps: Tracer


class _Message(NamedTuple):
    """One message from the core."""

    step: StepRecord | None
    worker: WorkerStepRecord | None
    timelines: Sequence[RequestTimeline]


class SpanThread:
    """Makes spans of what it is told, on a thread of its own.

    Args:
        processor: takes the spans; None where it is the application's own.
        step_mode: which steps get spans: off, sampled or all.
        slow_ns: a request that takes so long has the spans of all its steps written.

    Attributes:
        tracers: who makes the spans.
        requests, http: the spans that begin in the caller's thread.
    """

    def __init__(
        self,
        tracers: Tracers,
        processor: BoundedProcessor | None,
        health: ExportHealth,
        *,
        step_mode: str,
        slow_ns: float,
    ) -> None:
        self.tracers = tracers
        self.http = HttpSpans(tracers.requests)
        self.requests = RequestSpans(tracers.requests, parent_of=self.http.parent_of)
        self._steps = StepSpans(tracers.steps, self.requests.context_of, mode=step_mode)
        self._processor = processor
        self._health = health
        self._step_mode = step_mode
        self._slow_ns = slow_ns
        self._num_inbox_drops = 0
        self._inbox: deque[Callable[[], None] | _Message] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._close_timeout_s = 0.0
        self._thread = threading.Thread(target=self._run, name="isinglass-otel", daemon=True)
        self._thread.start()

    @property
    def num_drops(self) -> int:
        """Steps, and messages of the core, that were lost before a span was made of them."""
        return self._num_inbox_drops + self._steps.num_drops

    def put(self, item: Callable[[], None] | _Message) -> None:
        """Have something done on the thread; what it raises counts as a lost span."""
        self._inbox.append(item)
        if len(self._inbox) >= _WAKE_AT:
            self._wake.set()

    def observe(
        self,
        step: StepRecord | None,
        worker: WorkerStepRecord | None,
        timelines: Sequence[RequestTimeline],
    ) -> None:
        """One message from the core: a step, and the requests that ended in it."""
        if step is not None and self._step_mode == "off" and not step.num_context_requests:
            step = None  # nothing would become of it
        if step is None and not timelines:
            return
        # Requests' ends are never turned away: a span that does not end is never seen.
        if len(self._inbox) >= _MAX_INBOX and step is not None:
            self._num_inbox_drops += 1
            step = worker = None
            if not timelines:
                return
        self.put(_Message(step, worker, tuple(timelines)))

    def close(self, timeout_s: float, *, until: float) -> None:
        """End what is open and wait for the thread until a moment of the monotonic clock.

        Args:
            timeout_s: what closing takes at most; steps that still wait get a share of it.
        """
        self._close_timeout_s = timeout_s
        self._closing.set()
        self._wake.set()
        self._thread.join(max(0.0, until - time.monotonic()))

    # -- on the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        share, before = _STEP_SHARES[self._step_mode], time.monotonic()
        while not self._closing.is_set():
            self._wake.wait(_POLL_S)
            self._wake.clear()
            self._drain()
            now = time.monotonic()
            self._export_steps(share * (now - before))
            before = now
        self._drain()
        self._export_steps(self._close_timeout_s * _STEPS_SHARE_OF_CLOSE)
        self._steps.drop_waiting()
        self.requests.fail_all("shutdown", "the engine was shut down")
        self.http.end_all("shutdown", end_ns=time.monotonic_ns())
        if self._processor is not None:
            self._processor.shutdown()  # may block; `close` does not wait for ever

    def _drain(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            try:
                self._process(item) if isinstance(item, _Message) else item()
            except Exception as error:
                # One malformed record must not cost all later ones.
                self._health.failed(f"a span could not be made: {error!r}", num_lost=1)

    def _process(self, message: _Message) -> None:
        requests, steps, step = self.requests, self._steps, message.step
        if step is not None:
            if step.num_context_requests:
                requests.add_chunks(
                    step.scheduled, step.first_tokens, step=step.step, begin_ns=step.begin_ns
                )
            steps.observe(step, message.worker)
        remarkable = [one for one in message.timelines if self._is_remarkable(one)]
        if remarkable:
            steps.export_served(
                {one.request_num for one in remarkable},
                since_ns=min(one.arrival_ns for one in remarkable),
            )
        for timeline in message.timelines:
            requests.end(timeline)

    def _is_remarkable(self, timeline: RequestTimeline) -> bool:
        return (
            timeline.e2e_ns >= self._slow_ns
            or bool(timeline.preemptions)
            or timeline.finish_reason == "error"
        )

    def _export_steps(self, budget_s: float) -> None:
        """Write spans of steps for so long, unless the exporter is behind already."""
        steps, processor = self._steps, self._processor
        until = time.monotonic() + budget_s
        while True:
            try:
                steps.export_waiting(
                    lambda: time.monotonic() < until and not (processor and processor.is_crowded)
                )
                return
            except Exception as error:
                # A processor or sampler of the application: the step is lost, the others are not.
                self._health.failed(f"a step's span could not be made: {error!r}", num_lost=1)
