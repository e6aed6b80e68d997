"""The narrow interface: all that engine code sees of observability.

Knows the phases and the calls. Knows no sink, library, metric name or file. Spans for phases,
records for steps, timelines for requests, events for surprises.
"""

from types import TracebackType
from typing import Final

from instrumentation.labels import StepLabel
from instrumentation.names import Event, FlightReason, SinkName, StartupPhase
from instrumentation.record.ranges import Ranges
from instrumentation.record.request_records import RequestTimeline
from instrumentation.record.step_records import StepRecord, WorkerStepRecord


class Span:
    """A phase as a context manager: `with obs.schedule: ...`. The base does nothing.

    Built once for each thread, takes no arguments and must not be entered again before it is left.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


class _NullSpan(Span):
    """The base's behaviour at less than half its price, since no Python frame is made for it."""

    __slots__ = ()

    # Built-ins that take the protocol's arguments and return something false.
    __enter__ = int  # type: ignore[assignment]
    __exit__ = "".format  # type: ignore[assignment]


_NULL_SPAN: Final = _NullSpan()


class Instrument:
    """What engine code holds as `obs`; as it stands it records nothing.

    One instrument belongs to one thread: `for_thread`, called in another thread, gives that thread
    its own. No call blocks or raises. Never call it inside loops over requests, tokens, layers or
    blocks, nor inside compiled or captured regions.
    """

    # Core loop.
    intake: Span = _NULL_SPAN
    schedule: Span = _NULL_SPAN
    execute: Span = _NULL_SPAN
    wait: Span = _NULL_SPAN
    update: Span = _NULL_SPAN
    publish: Span = _NULL_SPAN
    grammar_bitmask: Span = _NULL_SPAN
    # Worker.
    prepare: Span = _NULL_SPAN
    forward: Span = _NULL_SPAN
    logits: Span = _NULL_SPAN
    sample: Span = _NULL_SPAN
    readback: Span = _NULL_SPAN
    # Frontend.
    process_inputs: Span = _NULL_SPAN
    send: Span = _NULL_SPAN
    receive: Span = _NULL_SPAN
    process_outputs: Span = _NULL_SPAN
    # Input and output threads of the core.
    decode: Span = _NULL_SPAN
    encode: Span = _NULL_SPAN

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded. For start-up decisions, not for the step."""
        return False

    def step_begin(self, label: StepLabel) -> None:
        """Open a step in the worker, before its first phase; `worker_step` closes it."""

    def step(self, record: StepRecord) -> None:
        """Close a step: once in the core loop, after updating and before publishing.

        Sets the record's `phases` to those of the core loop since the step before.
        """

    def worker_step(self, record: WorkerStepRecord) -> None:
        """Close a step in the worker; sets the record's `phases` likewise."""

    def request(self, timeline: RequestTimeline) -> None:
        """Keep a request that has ended: once each, in the frontend."""

    def request_arrived(
        self,
        request_num: int,
        request_id: str,
        *,
        arrival_ns: int,
        num_prompt_tokens: int,
        traceparent: str | None = None,
    ) -> None:
        """Name a request that the core has taken in: once each."""

    def event(self, kind: Event, request_id: str = "", *, value: int = 0, detail: str = "") -> None:
        """Mark a surprise at this instant; `names.EVENTS` says what value and detail mean."""

    def startup(self, phase: StartupPhase, begin_ns: int, end_ns: int) -> None:
        """Keep a phase of start-up; times from `time.monotonic_ns()`, also before `setup`."""

    def for_thread(self, name: str) -> "Instrument":
        """Give the calling thread its own instrument; the main thread's files and close cover it.

        Names that the catalogue knows are in `names.ThreadName`.
        """
        return self

    def set_ranges(self, ranges: Ranges | None) -> None:
        """Bracket this thread's phases and steps with ranges of a tool from the next one on.

        Call it in the thread that the instrument belongs to, between steps.
        """

    @property
    def ranges(self) -> Ranges | None:
        """The ranges that bracket this thread's phases and steps now."""
        return None

    @property
    def is_recording(self) -> bool:
        """Whether a journal is being written."""
        return False

    def start_recording(self, run_dir: str) -> bool:
        """Begin a journal in that folder; False if one is being written, or nothing can be.

        Raises:
            OSError: the folder cannot be written to.
        """
        return False

    def stop_recording(self) -> bool:
        """End the journal; False if none is being written."""
        return False

    @property
    def early_end(self) -> str:
        """Why the recording that `stop_recording` was last asked to end had ended before; empty if
        it had not."""
        return ""

    def dump_flight(self, reason: FlightReason, detail: str = "", *, step: int = -1) -> str | None:
        """Write the last steps to a file and return its path; None where there is no recorder.

        `step` is the number of the one that is the reason.
        """
        return None

    def ask_for_flight(self, reason: FlightReason) -> None:
        """Have a flight record written soon, by another thread.

        Only sets a flag, so that a signal's handler may call it: for processes that are not ours
        (hooks). Our own core has a thread that waits for the signal, and needs no main thread.
        """

    def request_sent(
        self, request_num: int, request_id: str, *, arrival_ns: int, num_prompt_tokens: int
    ) -> None:
        """Name a request in the caller's flight recorder: once each, when it is sent to the core.

        Journals have the name from the core's `request_arrived`.
        """

    def received_step(self, step: StepRecord | None, worker_step: WorkerStepRecord | None) -> None:
        """Keep the core's records in the caller's flight recorder, where they outlive the core."""

    def telemetry_failed(self, sink: SinkName, error: BaseException) -> None:
        """Count a failure of something that telemetry flows into; logged once for each sink."""

    def telemetry_errors(self) -> dict[str, int]:
        """Failures so far in this process, by `SinkName.label`; sinks without any are left out."""
        return {}

    def telemetry_drops(self) -> dict[str, int]:
        """Entries lost so far, by `SinkName.label` of the sink that failed, or `ring` where threads
        were quicker than the sinks; they add up to `num_drops`. Those without any are left out."""
        return {}

    def telemetry_ns(self) -> int:
        """Processor time so far of this process's drain thread."""
        return 0

    def phase_totals_ns(self) -> dict[str, int]:
        """Time so far in phases that ride in no step record (frontend and input/output threads).

        Covers all threads of this process; keys are phase names.
        """
        return {}

    def num_drops(self) -> int:
        """Entries lost so far in this process, for want of room or of a working sink."""
        return 0

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Bring everything recorded so far to the operating system; False on time-out."""
        return True

    def close(self) -> None:
        """Flush and stop; afterwards nothing is recorded. Closes the threads' instruments too."""


NULL: Final = Instrument()
"""The default `obs`: records nothing, costs next to nothing."""
