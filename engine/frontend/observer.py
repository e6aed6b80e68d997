"""Counts what passes through the frontend: metrics, and a status line now and then.

One object is told of every message; an engine without statistics simply has none.
"""

from collections.abc import Iterable

from engine.frontend.output_processor import ProcessedOutputs
from engine.types.messages import EngineCoreOutputs
from instrumentation import ConsoleStatus, Metrics, RequestTimeline


class EngineObserver:
    """Feeds the accumulators and the console from messages and time lines."""

    def __init__(self, metrics: Metrics, console: ConsoleStatus) -> None:
        self.metrics = metrics
        self.console = console

    def observe(self, message: EngineCoreOutputs, done: ProcessedOutputs) -> None:
        """One message from the core and what became of it."""
        if message.step is not None:
            self.metrics.observe_step(message.step)
            self.console.observe(message.step, num_generation_tokens=done.num_generation_tokens)
        if message.worker_step is not None:
            self.metrics.observe_worker_step(message.worker_step)
        if done.num_generation_tokens:
            self.metrics.observe_tokens(done.num_generation_tokens, done.token_gaps_ns)
        for timeline in done.first_tokens:
            self.metrics.observe_first_token(timeline)
        self.observe_ended(done.timelines)

    def observe_ended(self, timelines: Iterable[RequestTimeline]) -> None:
        """Requests that have ended."""
        for timeline in timelines:
            self.metrics.observe_request(timeline)
