"""vLLM's engine core, watched: the step's phases and its record.

Knows the engine core, its scheduler and its executor, by the methods that one step goes through.
Does not know how requests (`vllm_requests`) and blocks (`vllm_pool`) are kept account of.
"""

import signal
import threading
import time
from types import FrameType
from typing import Any

from instrumentation.hooks.fence import Fence, wrap
from instrumentation.hooks.progress import Progress, set_probe
from instrumentation.hooks.recording import process_instrument
from instrumentation.hooks.vllm_pool import PoolCounts
from instrumentation.hooks.vllm_requests import RequestBook
from instrumentation.hooks.vllm_worker import STEP_ATTRIBUTE
from instrumentation.names import AdmissionStop, Event, FlightReason, Role, StartupPhase
from instrumentation.record.instrument import Instrument, Span
from instrumentation.record.step_records import Preemption, StepRecord

_now_ns = time.monotonic_ns


class StartupTimes:
    """When the engine core's construction reached what, in one process."""

    def __init__(self) -> None:
        self._stamps_ns = [0, 0, 0, 0]

    def begin(self) -> None:
        """Construction begins: plug-ins, then the executor with its model."""
        self._stamps_ns[0] = _now_ns()

    def begin_kv_cache(self) -> None:
        """The model is there; profiling and the KV cache come next."""
        self._stamps_ns[1] = _now_ns()

    def end_kv_cache(self) -> None:
        """The KV cache is there, and the model warm."""
        self._stamps_ns[2] = _now_ns()

    def end(self) -> None:
        """All is there."""
        self._stamps_ns[3] = _now_ns()

    def tell(self, obs: Instrument) -> None:
        """Leave the phases with an instrument."""
        stamps_ns = self._stamps_ns
        if not all(stamps_ns):
            return
        for number, phase in enumerate(
            (StartupPhase.LOAD_MODEL, StartupPhase.ALLOCATE_KV_CACHE, StartupPhase.BUILD_SCHEDULER)
        ):
            obs.startup(phase, stamps_ns[number], stamps_ns[number + 1])


class CoreObserver:
    """Watches one engine core, from the end of its construction on.

    What is patched is this engine's objects, so that any scheduler class is seen. All of it runs in
    the engine core's own thread.
    """

    def __init__(self, core: Any, fence: Fence) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._fence = fence
        rank = core.vllm_config.parallel_config.data_parallel_rank
        self._obs = process_instrument(Role.CORE, rank=rank)
        self._requests = RequestBook(self._obs)
        self._pool = PoolCounts(core.scheduler.kv_cache_manager.block_pool, fence)
        self._step = 0
        self._num_updated = 0
        self._records: dict[int, StepRecord] = {}
        self._preempted: list[Preemption] = []
        self._waiting: Span | None = None
        """The phase `wait`, while it is open."""
        self._failed_step: int | None = None
        """Which step has failed, -1 for none that was planned; None where it is the oldest."""

    def attach(self, times: StartupTimes) -> None:
        """Put ourselves around the methods that a step goes through."""
        times.tell(self._obs)
        core, scheduler, fence = self._core, self._scheduler, self._fence
        wrap(
            scheduler,
            "schedule",
            fence=fence,
            before=self._before_schedule,
            after=self._after_schedule,
            failed=self._schedule_failed,
        )
        wrap(
            scheduler,
            "update_from_output",
            fence=fence,
            before=self._before_update,
            after=self._after_update,
            failed=self._update_failed,
        )
        wrap(scheduler, "add_request", fence=fence, before=self._requests.add)
        wrap(scheduler, "finish_requests", fence=fence, after=self._after_finish_requests)
        wrap(scheduler, "_preempt_request", fence=fence, before=self._before_preempt)
        for name in ("execute_model", "sample_tokens"):
            wrap(
                core.model_executor,
                name,
                fence=fence,
                before=self._before_execute,
                after=self._after_execute,
                failed=self._execute_failed,
            )
        wrap(
            core,
            "_handle_client_request",
            fence=fence,
            before=self._open_intake,
            after=self._close_intake,
        )
        wrap(core, "step_fn", fence=fence, after=self._after_step, failed=self._step_failed)
        wrap(core, "_process_engine_step", fence=fence, after=self._close_publish)
        wrap(core, "shutdown", fence=fence, before=self._shutdown)
        set_probe(self._progress)
        self._take_signal()

    def _take_signal(self) -> None:
        """Let SIGUSR2 ask for a flight record, where vLLM does not handle it."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:

            def handle(number: int, frame: FrameType | None) -> None:
                self._obs.ask_for_flight(FlightReason.SIGNAL)

            signal.signal(signal.SIGUSR2, handle)

    def _progress(self) -> Progress:
        return Progress(bool(self._scheduler.requests), self._step + self._num_updated)

    # Phases around the step.

    def _open_intake(self, *args: Any) -> None:
        self._obs.intake.__enter__()

    def _close_intake(self, *args: Any) -> None:
        self._obs.intake.__exit__(None, None, None)

    def _before_execute(self, *args: Any, **kwargs: Any) -> None:
        self._close_wait()
        self._obs.execute.__enter__()

    def _after_execute(self, *args: Any, **kwargs: Any) -> None:
        self._obs.execute.__exit__(None, None, None)
        self._waiting = self._obs.wait
        self._waiting.__enter__()

    def _execute_failed(self, *args: Any, **kwargs: Any) -> None:
        self._obs.execute.__exit__(None, None, None)
        self._failed_step = max(self._records, default=-1)  # what is handed over is the newest

    def _close_wait(self) -> None:
        if self._waiting is not None:
            self._waiting.__exit__(None, None, None)
            self._waiting = None

    def _after_step(self, *args: Any) -> None:
        self._waiting = None
        self._obs.publish.__enter__()

    def _close_publish(self, *args: Any) -> None:
        self._obs.publish.__exit__(None, None, None)

    def _step_failed(self, error: BaseException) -> None:
        """Write down the steps that were under way, and the last ones before."""
        self._close_wait()
        failed, self._failed_step = self._failed_step, None
        if not isinstance(error, Exception):
            return
        if failed is None:  # the one whose result was waited for, or taken in
            failed = min(self._records, default=-1)
        end_ns = _now_ns()
        for record in self._records.values():
            self._close(record, end_ns)
        self._records.clear()
        detail = f"{type(error).__name__}: {error}"
        self._obs.event(Event.STEP_FAILED, detail=detail)
        self._obs.dump_flight(FlightReason.CRASH, detail, step=failed)
        self._obs.flush()

    def _shutdown(self) -> None:
        self._obs.close()

    # Scheduling.

    def _before_schedule(self, *args: Any, **kwargs: Any) -> int:
        self._obs.schedule.__enter__()
        return _now_ns()

    def _after_schedule(self, begin_ns: int, output: Any, *args: Any, **kwargs: Any) -> None:
        self._obs.schedule.__exit__(None, None, None)
        if not output.total_num_scheduled_tokens:
            return
        record = self._record(begin_ns, output)
        self._records[record.step] = record
        # The workers learn number and label with the plan itself, wherever they are.
        setattr(output, STEP_ATTRIBUTE, (record.step, *record.label))
        self._step += 1

    def _schedule_failed(self, *args: Any, **kwargs: Any) -> None:
        self._obs.schedule.__exit__(None, None, None)
        self._failed_step = -1

    def _record(self, begin_ns: int, output: Any) -> StepRecord:
        scheduler = self._scheduler
        num_running, num_waiting = scheduler.get_request_counts()
        label, scheduled = self._requests.plan(
            scheduler.requests, output.num_scheduled_tokens, begin_ns=begin_ns
        )
        admitted = self._requests.admit(scheduler.requests, output)
        num_deferred = min(num_waiting, len(getattr(scheduler, "kv_holding_waiting", ())))
        preempted, self._preempted = tuple(self._preempted), []
        budget_left = scheduler.max_num_scheduled_tokens - output.total_num_scheduled_tokens
        head = _head(scheduler.waiting)
        used, cached_free, free = self._pool.counts()
        record = StepRecord(
            step=self._step,
            begin_ns=begin_ns,
            end_ns=0,
            num_context_requests=label.num_context_requests,
            num_context_tokens=label.num_context_tokens,
            num_generation_requests=label.num_generation_requests,
            num_generation_tokens=label.num_generation_tokens,
            token_budget_left=budget_left,
            num_running=num_running,
            num_waiting=num_waiting,
            waiting_by_reason=(num_waiting - num_deferred, num_deferred),
            preempted=preempted,
            num_blocks_used=used,
            num_blocks_cached_free=cached_free,
            num_blocks_free=free,
            num_evicted_blocks=self._pool.take_evictions(),
            scheduled=scheduled,
            prefix_query_tokens=admitted.query_tokens,
            prefix_hit_tokens=admitted.hit_tokens,
            preempted_prefix_query_tokens=admitted.preempted_query_tokens,
            preempted_prefix_hit_tokens=admitted.preempted_hit_tokens,
            oldest_waiting_since_ns=self._requests.waiting_since_ns(head),
            oldest_running_since_ns=self._requests.running_since_ns(scheduler.running),
        )
        if num_waiting:
            record.admission_stop = self._why_stopped(record)
            record.admission_stop_request_num = self._requests.num_of(head)
        return record

    def _why_stopped(self, record: StepRecord) -> AdmissionStop:
        """vLLM does not say why it admitted nobody else; what was used up does."""
        if record.preempted:
            return AdmissionStop.AFTER_PREEMPTION
        if not record.token_budget_left:
            return AdmissionStop.TOKEN_BUDGET
        if record.num_running >= self._scheduler.max_num_running_reqs:
            return AdmissionStop.MAX_NUM_SEQS
        return AdmissionStop.KV_BLOCKS

    def _before_preempt(self, request: Any, *args: Any, **kwargs: Any) -> None:
        groups = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        num_blocks = sum(len(group) for group in groups)
        num_tokens = request.num_computed_tokens
        request_num = self._requests.preempt(request.request_id)
        self._preempted.append(Preemption(request_num, num_blocks, num_tokens))
        self._obs.event(Event.PREEMPT, request.request_id, value=num_tokens)

    # What became of the step.

    def _before_update(self, output: Any, *args: Any, **kwargs: Any) -> None:
        self._close_wait()
        self._obs.update.__enter__()

    def _after_update(
        self, begin: None, result: Any, output: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._obs.update.__exit__(None, None, None)
        step = getattr(output, STEP_ATTRIBUTE, None)
        record = self._records.pop(step[0], None) if step is not None else None
        end_ns = _now_ns()
        outcome = self._requests.apply(result, end_ns=end_ns)
        if record is None:
            return
        record.first_tokens = tuple(outcome.first_tokens)
        record.finished = tuple(outcome.finished)
        record.num_sampled_tokens = outcome.num_tokens
        self._num_updated += 1
        self._close(record, end_ns)
        for timeline in outcome.ended:
            self._obs.request(timeline)

    def _update_failed(self, error: BaseException, output: Any, *args: Any, **kwargs: Any) -> None:
        self._obs.update.__exit__(None, None, None)

    def _close(self, record: StepRecord, end_ns: int) -> None:
        record.end_ns = end_ns
        record.num_blocks_used_at_end, record.num_blocks_cached_free_at_end, _ = self._pool.counts()
        self._obs.step(record)

    def _after_finish_requests(self, begin: None, result: Any, *args: Any, **kwargs: Any) -> None:
        for request in result:
            reason = str(request.get_finished_reason())
            timeline = self._requests.give_up(request.request_id, reason)
            if timeline is not None:
                self._obs.event(
                    Event.ABORT, request.request_id, value=timeline.num_generation_tokens
                )
                self._obs.request(timeline)


def _head(queue: Any) -> Any:
    """The request that is next in a queue, None for an empty one."""
    return queue.peek_request() if len(queue) else None
