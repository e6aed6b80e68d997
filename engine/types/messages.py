"""What the frontend and the engine core say to each other.

Array-like msgspec structs without garbage-collector tracking; NumPy arrays inside them travel
as frames of their own (`engine.types.codec`). Times are CLOCK_MONOTONIC nanoseconds, which
all processes of a host share.
"""

import enum
from typing import Any

import msgspec

from engine.types.logprobs import LogprobsLists
from engine.types.sampling import SamplingParams
from instrumentation import GrammarTotals, StepRecord, WorkerStepRecord

PROTOCOL_VERSION = 4
"""Raised whenever a message changes; both sides must agree."""


class MessageType(bytes, enum.Enum):
    """First frame of every message, in both directions."""

    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x02"
    SHUTDOWN = b"\x03"
    ATTACH = b"\x04"
    """A further client has come, or has come back; it is answered with READY."""
    DETACH = b"\x05"
    """The owner says that a client is gone for good: its requests end."""
    READY = b"\x10"
    FAILED = b"\x11"
    OUTPUTS = b"\x20"


class FinishReason(enum.IntEnum):
    """Why a request ended. `str()` gives the name that users see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class ErrorKind(enum.StrEnum):
    """Whose fault it is that a request has failed."""

    INPUT = "input"
    """The caller's: the same request will fail again."""
    ENGINE = "engine"


class EngineCoreRequest(msgspec.Struct, array_like=True, gc=False):
    """One request as the core sees it: token ids in, n always 1."""

    request_id: str
    request_num: int
    """Unique number of the request; stands for it in step records."""
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_ns: int
    priority: int = 0
    cache_salt: str | None = None
    traceparent: str | None = None
    """W3C trace context of the caller's span."""
    client_index: int = 0
    """Whose it is: filled in by the core's input thread, which knows the sender."""


class CoreTimes(msgspec.Struct, array_like=True, gc=False):
    """When the core did what with one request (monotonic nanoseconds; 0: not yet)."""

    queued_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    preemptions: list[tuple[int, int]] = []
    """(preempted, resumed) pairs; resumed is 0 while the request still waits."""
    grammar_ready_ns: int = 0
    """When its wait for a grammar ended, with one or without; stays 0 where it did not wait."""


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step brought for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    prompt_logprobs: LogprobsLists | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    times: CoreTimes | None = None
    """Sent with the request's first token, with its last output, and with every output behind a
    preemption, since a stop string may make the last one of it."""
    error: str | None = None
    error_kind: ErrorKind | None = None
    """Set where `error` is."""

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


class UtilityRequest(msgspec.Struct, array_like=True, gc=False):
    """A call of one of the core's utility methods."""

    call_id: int
    method: str
    args: list[Any] = []


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """Result of a utility call; `failure` is set instead when it raised."""

    call_id: int
    result: Any = None
    failure: str | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What the core tells one client at a time: after a step, after a utility call, of requests
    that were aborted or whose grammar was refused, and when nothing is left to do."""

    outputs: list[EngineCoreOutput] = []
    timestamp_ns: int = 0
    """When the core took the step's tokens in: the time stamp of each of them."""
    step: StepRecord | None = None
    worker_step: WorkerStepRecord | None = None
    utility: UtilityOutput | None = None
    engine_index: int = 0
    idle_cached_blocks: int | None = None
    """Set when requests were aborted and nothing is left to do, which no step record tells of: how
    many of the blocks, now all free, are cached."""
    sent_ns: int = 0
    """When the core began to encode the message, 0 where it crosses no process boundary."""
    grammars: GrammarTotals | None = None
    """Set when a structured output has failed or been withdrawn, since no step need follow."""


class EngineCoreReadyResponse(msgspec.Struct, array_like=True, gc=False):
    """What the core decided while it came up."""

    version: int
    num_gpu_blocks: int
    block_size: int
    max_model_len: int
    """Possibly smaller than asked for, when the KV cache cannot hold more."""
    max_num_batched_tokens: int
    dtype: str
    device: str
    attention_backend: str
    kv_cache_bytes: int
    startup_ns: dict[str, int]
    """Duration of each start-up phase in the core, nanoseconds."""
    startup_begin_ns: dict[str, int] = {}
    """When each of them began."""
    memory_bytes: dict[str, int] = {}
    """Memory by component; together the most that the core will have in use by its own measure:
    what the core's process (CPU: resident set) or its device (GPU) had in use just before the
    largest batch was tried, what that batch took on top, and the whole KV cache.

    weights: the model's tensors, packed copies included, as they lie in memory. kv_cache: all of
    it, although on a CPU no page is resident before it is written. graphs: captured graphs.
    activations: what the largest batch took, without the throw-away KV cache that it ran over.
    other: the rest of what was in use before it: interpreter, libraries, the batch's buffers; on
    a GPU also the driver's share and other processes'."""


class EngineCoreFailure(msgspec.Struct, array_like=True, gc=False):
    """Why the core did not come up, or died."""

    error_class: str
    message: str
    traceback: str
    flight_record: str = ""
    """Path of the flight record that the core has written, empty without one."""
