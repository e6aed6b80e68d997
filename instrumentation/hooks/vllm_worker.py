"""vLLM's workers, watched: how long each took for a step, and in which phases.

Knows the worker's two calls of a step and the methods of its model runner, of either generation.
Does not know the scheduler: the step's number and label come with the plan.
"""

import time
from typing import Any

from instrumentation.hooks.fence import Fence, wrap
from instrumentation.hooks.recording import existing_instrument, process_instrument
from instrumentation.labels import StepLabel
from instrumentation.names import Phase, Role, ThreadName
from instrumentation.profile.layer_ranges import is_traced
from instrumentation.record.instrument import Instrument, Span
from instrumentation.record.step_records import WorkerStepRecord

STEP_ATTRIBUTE = "isinglass_step"
"""Attribute of a plan of vLLM's scheduler: (step, *label)."""

_OBSERVER_ATTRIBUTE = "isinglass_observer"

_PHASES: dict[str, Phase] = {
    # The model runner that vLLM calls V1.
    "_update_states": Phase.PREPARE,
    "_prepare_inputs": Phase.PREPARE,
    "_model_forward": Phase.FORWARD,
    "_sample": Phase.SAMPLE,
    "_bookkeeping_sync": Phase.READBACK,
    # And V2.
    "add_requests": Phase.PREPARE,
    "update_requests": Phase.PREPARE,
    "prepare_inputs": Phase.PREPARE,
    "prepare_attn": Phase.PREPARE,
    "sample": Phase.SAMPLE,
}
"""Methods of a model runner, and the phase that each is."""


def observe_workers(worker_class: Any, fence: Fence) -> None:
    """Watch all workers of that class.

    Raises:
        AttributeError: it is not the class that the hook knows.
    """

    def begin(worker: Any, plan: Any, *args: Any, **kwargs: Any) -> None:
        step = getattr(plan, STEP_ATTRIBUTE, None)
        # A warm-up, or a round without tokens.
        if step is None:
            return
        observer = getattr(worker, _OBSERVER_ATTRIBUTE, None)
        if observer is None:
            observer = WorkerObserver(worker, fence)
            setattr(worker, _OBSERVER_ATTRIBUTE, observer)
        observer.begin(step)

    def after_execute(state: None, result: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
        observer = getattr(worker, _OBSERVER_ATTRIBUTE, None)
        if observer is not None and result is not None:
            observer.end()

    def after_sample(state: None, result: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
        observer = getattr(worker, _OBSERVER_ATTRIBUTE, None)
        if observer is not None:
            observer.end()

    def failed(error: BaseException, worker: Any, *args: Any, **kwargs: Any) -> None:
        after_sample(None, None, worker)

    is_known = wrap(
        worker_class,
        "execute_model",
        fence=fence,
        before=begin,
        after=after_execute,
        failed=failed,
    ) and wrap(worker_class, "sample_tokens", fence=fence, after=after_sample, failed=failed)
    if not is_known:
        raise AttributeError(
            "vLLM's Worker has no execute_model or no sample_tokens; the hook knows vLLM 0.32"
        )


class WorkerObserver:
    """Watches one worker, in the thread that runs its steps."""

    def __init__(self, worker: Any, fence: Fence) -> None:
        core = existing_instrument(Role.CORE)
        self._obs: Instrument = (
            core.for_thread(ThreadName.WORKER)
            if core is not None
            else process_instrument(Role.WORKER, rank=worker.rank)
        )
        self._record: WorkerStepRecord | None = None
        self._open: list[Span] = []
        self._watch_phases(worker.model_runner, fence)

    def begin(self, step: tuple[int, ...]) -> None:
        """A step's first call."""
        number, *counts = step
        label = StepLabel(*counts)
        self._open.clear()
        self._obs.step_begin(label)
        self._record = WorkerStepRecord(
            step=number,
            begin_ns=time.monotonic_ns(),
            end_ns=0,
            num_context_requests=label.num_context_requests,
            num_context_tokens=label.num_context_tokens,
            num_generation_requests=label.num_generation_requests,
            num_generation_tokens=label.num_generation_tokens,
        )

    def end(self) -> None:
        """The step's last call is over; does nothing where none is under way."""
        record, self._record = self._record, None
        if record is not None:
            record.end_ns = time.monotonic_ns()
            self._obs.worker_step(record)

    def _watch_phases(self, runner: Any, fence: Fence) -> None:
        seen = {name for name in _PHASES if self._watch(runner, name, _PHASES[name], fence)}
        model = runner.get_model()
        self._watch(model, "compute_logits", Phase.LOGITS, fence)
        if "_model_forward" not in seen:
            # Graphs that are replayed as a whole, or compiled with this model's call, do not come
            # through here.
            def before(*args: Any) -> None:
                if not is_traced():
                    fence.call(self._enter, Phase.FORWARD)

            def after(*args: Any) -> None:
                if not is_traced():
                    fence.call(self._leave)

            model.register_forward_pre_hook(before)
            model.register_forward_hook(after, always_call=True)

    def _watch(self, owner: Any, name: str, phase: Phase, fence: Fence) -> bool:
        return wrap(
            owner,
            name,
            fence=fence,
            before=lambda *args, **kwargs: self._enter(phase),
            after=lambda *args, **kwargs: self._leave(),
            failed=lambda *args, **kwargs: self._leave(),
        )

    def _enter(self, phase: Phase) -> None:
        """Begin a phase; one that it lies in pauses, so that no time is counted twice."""
        if self._record is None:
            return
        if self._open:
            self._open[-1].__exit__(None, None, None)
        span: Span = getattr(self._obs, phase.label)
        self._open.append(span)
        span.__enter__()

    def _leave(self) -> None:
        if self._record is None or not self._open:
            return
        self._open.pop().__exit__(None, None, None)
        if self._open:
            self._open[-1].__enter__()
