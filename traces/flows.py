"""The arrows of a Perfetto file: from a request through its steps, from a step to the workers.

Knows which slice an arrow leaves, passes and reaches. Does not know tracks nor packets.
"""

from instrumentation.record.request_records import RequestTimeline
from instrumentation.record.step_records import StepRecord, WorkerStepRecord
from traces.journal_reader import Run
from traces.lanes import Slice
from traces.perfetto_writer import stable_id
from traces.requests import request_timelines, scheduled_pairs


class Flows:
    """Which arrows leave and reach which slice.

    One flow a request, from its track through the steps that served it; one a step, from the core
    to the workers.

    Args:
        run_key: tells the run's flows from those of other runs in the same file.
    """

    def __init__(self, run: Run, run_key: str) -> None:
        self.timelines = request_timelines(run)
        self._run_key = run_key
        self._request_flows: dict[int, int] = {}
        nums = {timeline.request_num for timeline in self.timelines}
        self._last_step: dict[int, int] = {}
        for step in run.steps:
            for request_num, _ in scheduled_pairs(step):
                if request_num in nums:
                    self._last_step[request_num] = step.step
        core_steps = {step.step for step in run.steps}
        self._last_worker_begin: dict[int, int] = {}
        for worker_step in run.worker_steps:
            if worker_step.step in core_steps:
                self._last_worker_begin[worker_step.step] = worker_step.begin_ns

    def _request_flow(self, request_num: int) -> int:
        flow = self._request_flows.get(request_num)
        if flow is None:
            flow = stable_id(self._run_key, "request", request_num)
            self._request_flows[request_num] = flow
        return flow

    def _step_flow(self, step: int) -> int:
        return stable_id(self._run_key, "step", step)

    def of_request(self, timeline: RequestTimeline) -> list[int]:
        """Flows that leave a request's first slice."""
        known = timeline.request_num in self._last_step
        return [self._request_flow(timeline.request_num)] if known else []

    def add_to_step(self, piece: Slice, step: StepRecord) -> None:
        """Let a step's slice take part in its requests' flows and begin its own."""
        for request_num, _ in scheduled_pairs(step):
            last = self._last_step.get(request_num)
            if last is not None:
                is_last = last == step.step
                ids = piece.terminating_flow_ids if is_last else piece.flow_ids
                ids.append(self._request_flow(request_num))
        if step.step in self._last_worker_begin:
            piece.flow_ids.append(self._step_flow(step.step))

    def add_to_worker_step(self, piece: Slice, step: WorkerStepRecord) -> None:
        """Let a worker's slice end the arrow from its step."""
        last = self._last_worker_begin.get(step.step)
        if last is not None:
            is_last = last == step.begin_ns
            ids = piece.terminating_flow_ids if is_last else piece.flow_ids
            ids.append(self._step_flow(step.step))
