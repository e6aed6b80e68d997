"""What passed since somebody last looked: filled while the live view is watched, else not there.

Knows no watcher and no form of showing. One thread fills it and takes from it.
"""

from collections.abc import Iterable

from engine.frontend.output_processor import ProcessedOutputs
from engine.types.messages import EngineCoreOutputs
from instrumentation import RequestTimeline, StepRecord, WorkerStepRecord


class LiveTap:
    """Collects what `EngineObserver` sees; hang it up as `observer.tap`, and empty it regularly.

    Attributes:
        steps: each step's record, and its worker's where that came with it.
        token_gaps_ns: time between two tokens of a request, for each such pair.
        first_tokens: requests that got their first token, as far as they had got.
        ended: requests that ended.
    """

    __slots__ = ("ended", "first_tokens", "steps", "token_gaps_ns")

    def __init__(self) -> None:
        self.steps: list[tuple[StepRecord, WorkerStepRecord | None]] = []
        self.token_gaps_ns: list[int] = []
        self.first_tokens: list[RequestTimeline] = []
        self.ended: list[RequestTimeline] = []

    def observe(self, message: EngineCoreOutputs, done: ProcessedOutputs) -> None:
        """Keep what a message of the core brought, but for requests' ends."""
        if message.step is not None:
            self.steps.append((message.step, message.worker_step))
        self.token_gaps_ns += done.token_gaps_ns
        self.first_tokens += done.first_tokens

    def observe_ended(self, timelines: Iterable[RequestTimeline]) -> None:
        """Keep requests that have ended."""
        self.ended += timelines
