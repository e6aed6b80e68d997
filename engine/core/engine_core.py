"""The step: schedule, execute, update. The file to read first.

With async scheduling two steps are in flight, so that one is scheduled while the other runs;
without it, one. The loop is the same. Knows scheduler and executor; no socket and no thread.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from engine.config import EngineConfig
from engine.core.block_map import block_map
from engine.core.request import Request, RequestStatus
from engine.core.startup import StartupTimes, bring_up
from engine.errors import ConfigError
from engine.executor.base import Executor
from engine.log import get_logger
from engine.types.block_map import BlockMap
from engine.types.messages import (
    PROTOCOL_VERSION,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
)
from engine.types.plan import ModelRunnerOutput, SchedulerOutput
from instrumentation import Event, FlightReason, Instrument, StartupPhase, StepRecord

logger = get_logger(__name__)

UTILITIES = (
    *("reset_prefix_cache", "get_supported_tasks", "check_integrity"),
    *("start_recording", "stop_recording", "dump_flight_record"),
    *("start_profile", "stop_profile", "profile_status"),
    *("kv_block_map", "warm_up_structured_outputs"),
)
"""Methods that the frontend may call by name."""

_GRAMMAR_POLL_S = 0.005
"""How often an engine that waits for nothing but a grammar looks for messages."""


class _InFlight(NamedTuple):
    """A step that the executor has and whose result is still to come."""

    plan: SchedulerOutput
    record: StepRecord
    result: Future[ModelRunnerOutput] | None
    """None while sampling waits for what the step before has sampled, which its grammars need."""


class EngineCore:
    """One engine: a scheduler over an executor."""

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Executor],
        *,
        obs: Instrument,
        before_ns: Mapping[StartupPhase, tuple[int, int]] | None = None,
    ) -> None:
        self.config = config
        self.obs = obs
        self._startup = StartupTimes(obs, before_ns)
        parts = bring_up(config, executor_class, obs=obs, times=self._startup)
        self.executor, self.scheduler = parts.executor, parts.scheduler
        self.structured_outputs = parts.structured_outputs
        self._size, self._block_hasher = parts.size, parts.block_hasher
        self._ready: EngineCoreReadyResponse | None = None
        self._tells_idle = False
        self.listeners: set[int] = {0}
        """Clients that are told of every step."""
        self._depth = 2 if config.scheduler.async_scheduling else 1
        self._in_flight: deque[_InFlight] = deque()
        self._at_hand = -1
        """The step that the loop launches, samples or collects; -1 before it does any."""

    # -- the step ------------------------------------------------------------------------------

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Plan a step and hand it over; then bring in the oldest one's result.

        Returns outputs by client index: empty while the pipeline fills.
        """
        self._at_hand = -1
        ended = self._take_grammars() if self.structured_outputs.has_pending else {}
        is_launched = self._launch()
        if is_launched and len(self._in_flight) < self._depth:
            return ended
        if not self._in_flight and self.structured_outputs.has_pending:
            # A grammar ends the wait at once, a message is seen at its end.
            self.structured_outputs.compiler.wait(_GRAMMAR_POLL_S)
        packages = self._collect()
        for client, package in ended.items():
            merged = packages.setdefault(client, EngineCoreOutputs())
            merged.outputs[:0], merged.grammars = package.outputs, package.grammars
        return packages

    def _launch(self) -> bool:
        """Schedule a step and hand it to the executor; False when there is none to compute."""
        with self.obs.schedule:
            planned = self.scheduler.schedule()
        if planned is None:
            return False
        plan, record = planned
        structured = bool(plan.structured_output_request_ids)
        record.grammars = self.structured_outputs.totals
        self._at_hand = record.step
        step = _InFlight(plan, record, None)
        self._in_flight.append(step)  # before it can fail
        with self.obs.execute:
            self.executor.execute_model(plan)
            if not structured:
                self._in_flight[-1] = step._replace(result=self.executor.sample_tokens(None))
        if structured and len(self._in_flight) == 1:
            self._sample()
        return True

    def _sample(self) -> None:
        """Let the newest step sample, with its grammars knowing all tokens of the steps before."""
        step = self._in_flight[-1]
        self._at_hand = step.record.step
        requests = self.scheduler.requests
        with self.obs.grammar_bitmask:
            grammar_output = self.structured_outputs.grammar_output(
                requests.get(request_id) for request_id in step.plan.structured_output_request_ids
            )
            if grammar_output is not None:
                step.record.num_structured = len(grammar_output.req_ids)
        result = self.executor.sample_tokens(grammar_output)
        self._in_flight[-1] = step._replace(result=result)

    def _take_grammars(self) -> dict[int, EngineCoreOutputs]:
        """Let requests go on whose grammars are ready, and end those that get none."""
        packages: dict[int, EngineCoreOutputs] = {}
        for request, failure in self.structured_outputs.take():
            if failure is None:
                self.scheduler.release_request(request)
                continue
            output = self.scheduler.fail_request(request, failure.error, failure.kind)
            packages.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        if packages:
            for client in self.listeners:
                carrier = packages.setdefault(client, EngineCoreOutputs())
                carrier.grammars = self.structured_outputs.totals
        return packages

    def _collect(self) -> dict[int, EngineCoreOutputs]:
        """Bring in the oldest step's result, if there is one."""
        if not self._in_flight:
            return {}
        # It stays in the queue until it is done: one that fails is to be written down.
        plan, record, future = self._in_flight[0]
        self._at_hand = record.step
        assert future is not None, "only the newest of several steps waits for its grammars"
        with self.obs.wait:
            result = future.result()
        with self.obs.update:
            packages = self.scheduler.update_from_output(plan, result, record)
        self.obs.step(record)
        self._in_flight.popleft()
        if record.num_running_at_end and not self.scheduler.has_unfinished_requests():
            self._tells_idle = True  # steps overlap: its record has those that the one before ended
        if self._in_flight and self._in_flight[-1].result is None:
            self._sample()
        for client in self.listeners:
            carrier = packages.setdefault(client, EngineCoreOutputs())
            carrier.step, carrier.worker_step = record, result.record
        return packages

    def record_failure(self, error: Exception) -> str | None:
        """Write down the steps that were under way when the loop failed, and the last ones before.

        Returns the path of the flight record, None where there is none.
        """
        now_ns = time.monotonic_ns()
        for _, record, _ in self._in_flight:
            record.end_ns = now_ns
            self.obs.step(record)
        self._in_flight.clear()
        detail = f"{type(error).__name__}: {error}"
        self.obs.event(Event.STEP_FAILED, detail=detail)
        return self.obs.dump_flight(FlightReason.CRASH, detail, step=self._at_hand)

    # -- requests --------------------------------------------------------------------------------

    def prepare_request(self, message: EngineCoreRequest) -> Request:
        """Make the core's request and hash its blocks; callable from any thread."""
        return Request(message, self._block_hasher)

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        if not self.structured_outputs.begin(request):
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
        self.scheduler.add_request(request)
        self.obs.request_arrived(
            request.num,
            request.request_id,
            arrival_ns=request.arrival_ns,
            num_prompt_tokens=request.num_prompt_tokens,
            traceparent=request.traceparent,
        )

    def abort_requests(self, request_ids: Iterable[str]) -> dict[int, EngineCoreOutputs]:
        """End requests in whatever state; their last outputs say `abort`."""
        aborted = self.scheduler.finish_requests(request_ids, FinishReason.ABORT)
        packages: dict[int, EngineCoreOutputs] = {}
        for request in aborted:
            self.structured_outputs.forget(request)
            self.obs.event(Event.ABORT, request.request_id, value=request.num_output_tokens)
            output = EngineCoreOutput(
                request.request_id,
                [],
                finish_reason=FinishReason.ABORT,
                num_cached_tokens=request.num_cached_tokens,
                times=request.times,
            )
            packages.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
            self._tells_idle = True
        return packages

    def idle_outputs(self) -> dict[int, EngineCoreOutputs]:
        """What listeners are to know when nothing is left, and no step has said so."""
        if not self._tells_idle:
            return {}
        self._tells_idle = False
        cached = self.scheduler.kv_cache.pool.num_cached_free_blocks
        grammars = self.structured_outputs.totals
        return {
            client: EngineCoreOutputs(idle_cached_blocks=cached, grammars=grammars)
            for client in self.listeners
        }

    def abort_client(self, client_index: int) -> None:
        """End all requests of a client that is gone, and tell nobody."""
        self.listeners.discard(client_index)
        of_client = [
            request.request_id
            for request in self.scheduler.requests.values()
            if request.client_index == client_index
        ]
        self.abort_requests(of_client)

    def has_work(self) -> bool:
        """Whether a call of `step` can do anything."""
        return bool(self._in_flight) or self.scheduler.has_unfinished_requests()

    # -- utilities -------------------------------------------------------------------------------

    def call_utility(self, method: str, args: list[Any]) -> Any:
        """Call one of `UTILITIES`; AttributeError for any other name."""
        if method not in UTILITIES:
            raise AttributeError(f"no utility {method!r}; there are {', '.join(UTILITIES)}")
        return getattr(self, method)(*args)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while requests hold blocks."""
        pool = self.scheduler.kv_cache.pool
        num_cached = pool.num_cached_free_blocks
        done = self.scheduler.kv_cache.reset_prefix_cache()
        if done:
            self.obs.event(Event.RESET_PREFIX_CACHE, value=num_cached)
        else:
            logger.debug("the prefix cache was not reset: requests are holding blocks")
        return done

    def get_supported_tasks(self) -> list[str]:
        """What the model can be asked for."""
        return ["generate"]

    def check_integrity(self) -> bool:
        """Assert every invariant that holds between steps."""
        self.scheduler.check_integrity()
        return True

    def warm_up_structured_outputs(self) -> bool:
        """Get ready for the first constraint, in the background; False if there can be none."""
        if self.config.model.skip_tokenizer_init:
            return False
        self.structured_outputs.warm_up()
        return True

    def kv_block_map(self) -> BlockMap:
        """Every KV block's state at this moment, see `block_map`."""
        scheduler = self.scheduler
        return block_map(
            scheduler.kv_cache, scheduler.requests.values(), now_ns=time.monotonic_ns()
        )

    def start_recording(self, run_dir: str) -> bool:
        """Begin this process's journal in a folder; False if one is being written.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        try:
            return self.obs.start_recording(run_dir)
        except OSError as error:
            raise ConfigError(f"cannot write a recording to {run_dir!r}: {error}") from error

    def stop_recording(self) -> tuple[bool, str]:
        """End this process's journal; whether one was being written, and why it ended before."""
        return self.obs.stop_recording(), self.obs.early_end

    def dump_flight_record(self, detail: str = "") -> str | None:
        """Write the last steps to a file and return its path; None without a flight recorder."""
        return self.obs.dump_flight(FlightReason.API, detail)

    def start_profile(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        """Begin a torch profile in every worker; returns their status, by rank."""
        return self.executor.start_profile(options)

    def stop_profile(self) -> list[dict[str, Any]]:
        """End it; the files are written while steps go on."""
        return self.executor.collective_rpc("stop_profile")

    def profile_status(self) -> list[dict[str, Any]]:
        """How far each worker's last profile is."""
        return self.executor.collective_rpc("profile_status")

    def ready_response(self) -> EngineCoreReadyResponse:
        """What start-up decided; gathering it, once, is the last phase of start-up.

        That phase ends before the message that tells of it is sent, so all views have it alike.
        """
        if self._ready is None:
            with self._startup.phase(StartupPhase.READY):
                facts, memory_bytes = self.executor.facts, self.executor.memory_bytes
            limits = self.scheduler.limits
            self._ready = EngineCoreReadyResponse(
                version=PROTOCOL_VERSION,
                num_gpu_blocks=self._size.num_blocks,
                block_size=self.config.cache.block_size,
                max_model_len=limits.max_model_len,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                dtype=facts["dtype"],
                device=facts["device"],
                attention_backend=facts["attention_backend"],
                kv_cache_bytes=self._size.num_bytes,
                startup_ns=self._startup.durations_ns,
                startup_begin_ns=self._startup.begins_ns,
                memory_bytes=memory_bytes,
            )
        return self._ready

    def shutdown(self) -> None:
        """Stop the workers and write out what was recorded."""
        self.structured_outputs.close()
        self.executor.shutdown()
        self.obs.close()
