"""Counts what passes through the frontend: metrics, and a status line now and then.

One object is told of every message; an engine without statistics simply has none. What fails in
here is counted and logged once, and never reaches a request.
"""

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from engine.checkpoint.locate import EMBEDDED_MODEL
from engine.config import EngineConfig
from engine.frontend.live_tap import LiveTap
from engine.frontend.opentelemetry_tracer import open_tracer
from engine.frontend.output_processor import ProcessedOutputs
from engine.frontend.request_tracer import RequestTracer
from engine.log import get_logger
from engine.types.messages import EngineCoreOutputs, EngineCoreReadyResponse
from engine.types.sampling import SamplingParams
from instrumentation import (
    ConsoleStatus,
    Instrument,
    Metrics,
    ObservabilityConfig,
    RequestTimeline,
    SinkName,
    StepHistory,
    StepRecord,
    objectives_of,
    slo_misses,
)
from instrumentation.metrics.buckets import parse_buckets
from instrumentation.metrics.requests import ArrivedRequest

logger = get_logger(__name__)


class EngineObserver:
    """Feeds the accumulators and the console from messages and time lines.

    Attributes:
        tap: gets all of it too, while the live view is watched; None while it is not.
    """

    def __init__(
        self,
        metrics: Metrics,
        console: ConsoleStatus,
        *,
        wanted: ObservabilityConfig | None = None,
        counts_steps: bool = True,
    ) -> None:
        self._counts_steps = counts_steps
        self.metrics = metrics
        self.console = console
        self.history = StepHistory()
        self.tap: LiveTap | None = None
        self._wanted = wanted or ObservabilityConfig()
        self._objectives = objectives_of(self._wanted)
        self._sinks_logged: set[SinkName] = set()

    def engine_is_ready(
        self,
        config: EngineConfig,
        ready: EngineCoreReadyResponse,
        *,
        version: str,
        model: str,
        startup_ns: Mapping[str, int],
    ) -> None:
        """The core has come up with these settings; `startup_ns` has every phase's duration."""
        info = {"version": version, "model": model, **_core_facts(ready)}
        self._count_once(self._take_facts, config, ready, info, startup_ns)

    def engine_died(self) -> None:
        """The core is no more, in whatever way; the metrics keep its totals."""
        self._count_once(self.metrics.engine_died)

    def observe_arrival(self, params: SamplingParams, *, index: int) -> None:
        """A sequence was accepted: that sample of a request with `n` of them."""
        arrived = ArrivedRequest(params.n if index == 0 else None, params.max_tokens)
        self._count_once(self.metrics.requests.observe_arrival, arrived)

    def observe_rejection(self, error: Exception) -> None:
        """A request was refused before it was sent."""
        kind = type(error).__name__
        self._count_once(self.metrics.requests.observe_rejection, kind)

    def observe(
        self, message: EngineCoreOutputs, done: ProcessedOutputs, *, received_ns: int = 0
    ) -> None:
        """One message from the core, and what became of it."""
        with self.metrics.lock:
            began_ns = time.monotonic_ns()
            self._fenced(SinkName.METRICS, self._count, message, done, received_ns)
            step, worker_step = message.step, message.worker_step
            if step is not None or worker_step is not None:
                self._fenced(SinkName.ATTRIBUTION, self.history.observe, step, worker_step)
            if step is not None and self._counts_steps:
                self._fenced(SinkName.CONSOLE, self._say, step, done.num_generation_tokens)
            if self.tap is not None:
                self._fenced(SinkName.LIVE_VIEW, self.tap.observe, message, done)
            self.observe_ended(done.timelines)
            self.metrics.engine.count_time(time.monotonic_ns() - began_ns)

    def observe_ended(self, timelines: Iterable[RequestTimeline]) -> None:
        """Requests that have ended."""
        timelines = list(timelines)
        with self.metrics.lock:
            if self.tap is not None:
                self.tap.observe_ended(timelines)
            for timeline in timelines:
                self._fenced(SinkName.METRICS, self.metrics.requests.observe_end, timeline)
                self._fenced(SinkName.ATTRIBUTION, self.history.add, timeline)
                if self._objectives and timeline.is_complete:
                    self._fenced(SinkName.ATTRIBUTION, self._judge, timeline)

    def _count_once(self, call: Callable[..., Any], *arguments: Any) -> None:
        with self.metrics.lock:
            self._fenced(SinkName.METRICS, call, *arguments)

    def _fenced(self, sink: SinkName, call: Callable[..., Any], *arguments: Any) -> None:
        """Call what may fail without harm; its first error is logged, all are counted."""
        try:
            call(*arguments)
        except Exception as error:
            self.metrics.engine.count_error(sink)
            if sink not in self._sinks_logged:
                self._sinks_logged.add(sink)
                logger.exception("%s failed (logged once, all are counted): %r", sink.label, error)

    def _count(self, message: EngineCoreOutputs, done: ProcessedOutputs, received_ns: int) -> None:
        metrics = self.metrics
        if message.step is not None and self._counts_steps:
            metrics.observe_step(message.step)
        if message.worker_step is not None and self._counts_steps:
            metrics.steps.observe_worker_step(message.worker_step)
        if message.idle_cached_blocks is not None and self._counts_steps:
            metrics.steps.forget_queues(num_cached_blocks=message.idle_cached_blocks)
        if message.grammars is not None and self._counts_steps:
            metrics.structured_outputs.observe_totals(message.grammars)
        if message.sent_ns and received_ns:
            metrics.engine.observe_transport(received_ns - message.sent_ns)
        if done.num_generation_tokens:
            metrics.requests.observe_tokens(done.num_generation_tokens, done.token_gaps_ns)
        for timeline in done.first_tokens:
            metrics.requests.observe_first_token(timeline)

    def _judge(self, timeline: RequestTimeline) -> None:
        """Hold a request against the objectives."""
        misses = slo_misses(timeline, self.history, self._wanted)
        self.metrics.requests.observe_objectives(self._objectives, misses)

    def _say(self, step: StepRecord, num_tokens: int) -> None:
        self.console.observe(step, num_generation_tokens=num_tokens)

    def _take_facts(
        self,
        config: EngineConfig,
        ready: EngineCoreReadyResponse,
        info: Mapping[str, str],
        startup_ns: Mapping[str, int],
    ) -> None:
        settings = {
            name: "" if value is None else str(value)
            for group in config.to_dict().values()
            for name, value in group.items()
        }
        settings |= _core_facts(ready)
        settings["max_num_batched_tokens"] = str(ready.max_num_batched_tokens)
        self.metrics.engine.engine_is_ready(
            info=info,
            settings=settings,
            kv_cache_tokens=ready.num_gpu_blocks * ready.block_size,
            max_model_len=ready.max_model_len,
            memory_bytes=ready.memory_bytes,
            startup_ns=startup_ns,
        )


def make_observer(
    wanted: ObservabilityConfig,
    obs: Instrument,
    *,
    model_name: str | None,
    counts_steps: bool = True,
) -> EngineObserver | None:
    """The observer of one engine; None where no statistics are wanted.

    Of several frontends over one core, one has `counts_steps`: their metrics are added up.
    """
    if wanted.disable_log_stats:
        return None
    metrics = Metrics(
        {"model_name": model_name or EMBEDDED_MODEL, "engine": "0"},
        instrument=obs,
        buckets=parse_buckets(wanted.custom_histogram_buckets),
    )
    console = ConsoleStatus(interval_s=wanted.log_stats_interval_s)
    return EngineObserver(metrics, console, wanted=wanted, counts_steps=counts_steps)


def tracer_opener(
    wanted: ObservabilityConfig, observer: EngineObserver | None
) -> Callable[..., RequestTracer]:
    """What the engine calls with its model's name once its core is on its way up.

    It holds the metrics alone: the exporting thread must not keep a forgotten engine alive.
    """
    collect = None if observer is None else observer.metrics.snapshot
    return functools.partial(open_tracer, wanted, collect=collect)


def _core_facts(ready: EngineCoreReadyResponse) -> dict[str, str]:
    """What was "auto" before the core decided."""
    return {
        "dtype": ready.dtype,
        "device": ready.device,
        "attention_backend": ready.attention_backend,
    }
