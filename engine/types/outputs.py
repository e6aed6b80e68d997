"""What users receive: fields and names as in vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.types.logprobs import PromptLogprobs, SampleLogprobs
from instrumentation import RequestTimeline

RequestMetrics = RequestTimeline
"""Time stamps of one request and the intervals between them (nanoseconds, monotonic)."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence of a request."""

    index: int
    """Which of the request's n sequences."""
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    """Sum of the sampled tokens' logprobs; None unless logprobs were asked for."""
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    """stop, length, abort or error; None while the sequence grows."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the model's own end."""
    metrics: RequestMetrics | None = None
    """Time line of this sequence, once it has ended."""

    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What is known of one request: its prompt and its sequences so far."""

    request_id: str
    prompt: str | None
    """The prompt's text; None when it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    metrics: RequestMetrics | None = None
    """Time line of the first sequence, once the request has ended."""
    error: str | None = None
    """Why the request failed, if its finish reason is error."""
    error_kind: str | None = None
    """Whose fault that is: input (the caller's; it will fail again) or engine."""
