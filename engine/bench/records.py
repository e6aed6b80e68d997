"""What is kept of each request: when it should have gone, when it went, what came and how it ended.

Knows times and counts of one request. Does not know how they are measured or summed.
"""

from dataclasses import dataclass, field
from enum import StrEnum

NEVER_SENT = "while it waited for its turn"
"""Detail of a cancelled record whose request was due and never sent."""


class Outcome(StrEnum):
    """How a request ended. Every request that was due has exactly one."""

    OK = "ok"
    """The stream came to its end."""
    HTTP_ERROR = "http_error"
    """The server answered with another status than 200."""
    REFUSED = "refused"
    """Nobody accepted the connection."""
    UNREACHABLE = "unreachable"
    """No connection for another reason: name, route, TLS, no descriptors."""
    TIMED_OUT = "timed_out"
    """Not over within `--timeout` after it was sent."""
    DISCONNECTED = "disconnected"
    """The connection broke, before the answer or in the middle of the stream."""
    ERROR_EVENT = "error_event"
    """The server reported an error within the stream."""
    BAD_STREAM = "bad_stream"
    """Status 200, but no event stream of completions."""
    CANCELLED = "cancelled"
    """Ended from here: Ctrl-C, while it was in flight or waited for its turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. All times are nanoseconds of one monotonic clock (`time.perf_counter_ns`)."""

    index: int
    request_id: str
    intended_ns: int
    """When the arrival process wanted it sent."""
    sent_ns: int
    """When it was handed to the socket library; opening a connection comes after it."""
    chunk_ns: tuple[int, ...] = ()
    """When text arrived. Events that one read of the socket brings count as one chunk."""
    end_ns: int = 0
    """When the stream, or the attempt, was over."""
    outcome: Outcome
    status: int | None = None
    """HTTP status; None where there was no answer."""
    detail: str = ""
    """The error in words, cut to a line."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    """By the server's `usage`; None where it sent none."""
    completion_tokens: int | None = None
    """Likewise; `num_events` stands in for it."""
    cached_tokens: int | None = None
    """Prompt tokens from the server's prefix cache, where its `usage` says so."""
    num_events: int = 0
    """Events that brought text."""

    def output_tokens(self) -> int:
        """Tokens made: by usage, and by events where there is no usage."""
        return self.num_events if self.completion_tokens is None else self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """A run of the load generator: what was sent, and what sending it cost."""

    model: str
    records: tuple[RequestRecord, ...]
    """Of the measured requests, in order of their index."""
    warmups: tuple[RequestRecord, ...] = ()
    """Requests sent before, which no figure includes."""
    start_ns: int
    """When the arrival process began."""
    end_ns: int
    """When the last request was over."""
    client_cpu_s: float
    """User and system time of this process between the two."""
    interrupted: bool = False
    settings: dict[str, object] = field(default_factory=dict)
    """What the run was asked to do, for the document; without secrets."""
