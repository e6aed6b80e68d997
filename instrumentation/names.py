"""The catalogue of names: phases, start-up phases, events and the small reason enums.

Knows every name that a trace or a table may show, with one line of help each; metric names are in
`metric_names`. Does not know who records or reads them. Names are API: renaming one is a breaking
change, and a number, once given, is never given to another name, because journals hold the numbers.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Role(StrEnum):
    """The processes of an engine, as they appear in journal file names."""

    CALLER = "caller"
    CORE = "core"
    WORKER = "worker"


class ThreadName(StrEnum):
    """The threads that have phases of their own."""

    CALLER = "caller"
    CORE_LOOP = "core loop"
    WORKER = "worker"
    INPUT_IO = "input io"
    OUTPUT_IO = "output io"


MAIN_THREAD_OF_ROLE: dict[str, ThreadName] = {
    Role.CALLER: ThreadName.CALLER,
    Role.CORE: ThreadName.CORE_LOOP,
    Role.WORKER: ThreadName.WORKER,
}


class Phase(IntEnum):
    """The phases of a step and of a request's way through the frontend."""

    INTAKE = 0
    SCHEDULE = 1
    EXECUTE = 2
    WAIT = 3
    UPDATE = 4
    PUBLISH = 5
    PREPARE = 6
    FORWARD = 7
    LOGITS = 8
    SAMPLE = 9
    READBACK = 10
    PROCESS_INPUTS = 11
    SEND = 12
    RECEIVE = 13
    PROCESS_OUTPUTS = 14
    DECODE = 15
    ENCODE = 16
    GRAMMAR_BITMASK = 17

    @property
    def label(self) -> str:
        """The phase's name in traces and metrics, and its attribute on `Instrument`."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class PhaseInfo:
    """What the catalogue says of one phase."""

    role: Role
    thread: ThreadName
    help: str


PHASES: dict[Phase, PhaseInfo] = {
    Phase.INTAKE: PhaseInfo(
        Role.CORE, ThreadName.CORE_LOOP, "take new messages in and apply them to the scheduler"
    ),
    Phase.SCHEDULE: PhaseInfo(
        Role.CORE, ThreadName.CORE_LOOP, "decide the tokens of each request for the next step"
    ),
    Phase.EXECUTE: PhaseInfo(
        Role.CORE, ThreadName.CORE_LOOP, "hand the step to the executor (runs it if synchronous)"
    ),
    Phase.WAIT: PhaseInfo(Role.CORE, ThreadName.CORE_LOOP, "block for the result of a step"),
    Phase.UPDATE: PhaseInfo(
        Role.CORE, ThreadName.CORE_LOOP, "apply the sampled tokens, finish and free requests"
    ),
    Phase.PUBLISH: PhaseInfo(
        Role.CORE, ThreadName.CORE_LOOP, "hand the outputs to the output thread"
    ),
    Phase.PREPARE: PhaseInfo(
        Role.WORKER, ThreadName.WORKER, "update the batch, build inputs and attention metadata"
    ),
    Phase.FORWARD: PhaseInfo(Role.WORKER, ThreadName.WORKER, "run the model"),
    Phase.LOGITS: PhaseInfo(Role.WORKER, ThreadName.WORKER, "compute the logits that are needed"),
    Phase.SAMPLE: PhaseInfo(Role.WORKER, ThreadName.WORKER, "process the logits and sample"),
    Phase.READBACK: PhaseInfo(
        Role.WORKER, ThreadName.WORKER, "bring the sampled tokens back to the host"
    ),
    Phase.PROCESS_INPUTS: PhaseInfo(
        Role.CALLER, ThreadName.CALLER, "validate and tokenise one request"
    ),
    Phase.SEND: PhaseInfo(Role.CALLER, ThreadName.CALLER, "send messages to the core"),
    Phase.RECEIVE: PhaseInfo(Role.CALLER, ThreadName.CALLER, "wait for outputs of the core"),
    Phase.PROCESS_OUTPUTS: PhaseInfo(
        Role.CALLER, ThreadName.CALLER, "detokenise and build the outputs"
    ),
    Phase.DECODE: PhaseInfo(Role.CORE, ThreadName.INPUT_IO, "decode messages from the frontend"),
    Phase.GRAMMAR_BITMASK: PhaseInfo(
        Role.CORE,
        ThreadName.CORE_LOOP,
        "make the mask of tokens that grammars allow, while the forward pass runs",
    ),
    Phase.ENCODE: PhaseInfo(Role.CORE, ThreadName.OUTPUT_IO, "encode messages to the frontend"),
}


class StartupPhase(IntEnum):
    """The phases of start-up, timed once each."""

    RESOLVE_CONFIG = 0
    SPAWN = 1
    TOKENIZER = 2
    WAIT_READY = 3
    IMPORT = 4
    LOAD_PLUGINS = 5
    LOAD_MODEL = 6
    PROFILE = 7
    ALLOCATE_KV_CACHE = 8
    WARMUP = 9
    BUILD_SCHEDULER = 10
    READY = 11

    @property
    def label(self) -> str:
        """The phase's name in traces and tables."""
        return self.name.lower()


STARTUP_PHASES: dict[StartupPhase, tuple[Role, str]] = {
    StartupPhase.RESOLVE_CONFIG: (Role.CALLER, "check the options and work out the rest"),
    StartupPhase.SPAWN: (Role.CALLER, "start the core's process"),
    StartupPhase.TOKENIZER: (Role.CALLER, "load the tokenizer while the core boots"),
    StartupPhase.WAIT_READY: (Role.CALLER, "wait for the core's ready message"),
    StartupPhase.IMPORT: (Role.CORE, "import the libraries of the core"),
    StartupPhase.LOAD_PLUGINS: (Role.CORE, "load plugins"),
    StartupPhase.LOAD_MODEL: (Role.CORE, "build the model and stream its weights in"),
    StartupPhase.PROFILE: (Role.CORE, "measure peak memory with a worst-case batch"),
    StartupPhase.ALLOCATE_KV_CACHE: (Role.CORE, "size and allocate the pool of KV blocks"),
    StartupPhase.WARMUP: (Role.CORE, "warm up kernels and capture graphs"),
    StartupPhase.BUILD_SCHEDULER: (Role.CORE, "build the scheduler and the block pool"),
    StartupPhase.READY: (Role.CORE, "answer ready to the frontend"),
}


class Event(IntEnum):
    """Surprises: rare things that deserve an instant of their own."""

    PREEMPT = 0
    RESUME = 1
    ABORT = 2
    ENGINE_DEAD = 3
    KV_REDUCED_MAX_MODEL_LEN = 4
    RESET_PREFIX_CACHE = 5
    STEP_FAILED = 6
    TELEMETRY_THROTTLED = 7
    RECORDING_ENDED = 8
    FLIGHT_RECORD = 9
    GARBAGE_COLLECTION = 10
    GRAMMAR_FAILED = 11

    @property
    def label(self) -> str:
        """The event's name in traces and tables."""
        return self.name.lower()


EVENTS: dict[Event, str] = {
    Event.PREEMPT: "a running request lost its blocks; value: tokens to recompute",
    Event.RESUME: "a preempted request was scheduled again; value: tokens found in the cache",
    Event.ABORT: "a request was ended by its caller; value: tokens generated until then",
    Event.ENGINE_DEAD: "the core or a worker died; value: exit code; detail: last words",
    Event.KV_REDUCED_MAX_MODEL_LEN: "memory holds less than one full context; value: new length",
    Event.RESET_PREFIX_CACHE: "the prefix cache was emptied; value: blocks forgotten",
    Event.STEP_FAILED: "a step raised; detail: the error",
    Event.TELEMETRY_THROTTLED: "telemetry cost more than its share; value: level of detail now",
    Event.RECORDING_ENDED: "a recording reached its limit; value: bytes written",
    Event.FLIGHT_RECORD: "a flight record was written; detail: its file",
    Event.GARBAGE_COLLECTION: "Python collected garbage; value: nanoseconds; detail: generation",
    Event.GRAMMAR_FAILED: "a structured output could not be compiled; value: nanoseconds; "
    "detail: what became of it, and why",
}


class AdmissionStop(IntEnum):
    """Why the scheduler took no further request from the waiting queue in a step."""

    NONE = 0
    """The queue was empty at the end."""
    TOKEN_BUDGET = 1
    MAX_NUM_SEQS = 2
    KV_BLOCKS = 3
    CHUNKED_PREFILL_OFF = 4
    """The next prompt is longer than the budget that is left, and may not be split."""
    AFTER_PREEMPTION = 5
    """Somebody was preempted in this step, so nobody new may come in."""

    @property
    def label(self) -> str:
        """The reason's name in traces and tables."""
        return self.name.lower()


HEAD_OF_LINE = "head_of_line"
"""Why all waiting requests wait but the one at which admission stopped: that one is before them."""

RING = "ring"
"""Where entries are dropped before any sink: beside the labels of `SinkName`."""


class WaitingReason(IntEnum):
    """Index into `StepRecord.waiting_by_reason`; the entries add up to `num_waiting`."""

    CAPACITY = 0
    """In the queue; only room is missing."""
    DEFERRED = 1
    """Passed over, because something other than room is missing; told by the hooks in vLLM only:
    Isinglass's own scheduler passes requests over for a grammar alone."""
    GRAMMAR = 2
    """Passed over, because the grammar of its structured output is being compiled."""

    @property
    def label(self) -> str:
        """The reason's name in traces and tables."""
        return self.name.lower()


class PrefixMiss(IntEnum):
    """Why the prefix cache had no more of a request's tokens."""

    NONE = 0
    """It had all full blocks that it may serve, one at least."""
    NEVER_CACHED = 1
    EVICTED = 2
    PARTIAL_BLOCK = 3
    """The request has no full block that it may serve."""
    DISABLED = 4

    @property
    def label(self) -> str:
        """The cause's name in traces and tables."""
        return self.name.lower()


class GrammarOutcome(IntEnum):
    """What became of a structured output's constraint that was to be compiled."""

    COMPILED = 0
    INVALID = 1
    TIMED_OUT = 2
    CRASHED = 3
    """The process that compiled it died."""
    UNAVAILABLE = 4
    """Nothing can be compiled: no process, or no usable tokenizer."""
    WITHDRAWN = 5
    """Nobody wanted it any more before it was compiled."""

    @property
    def label(self) -> str:
        """The outcome's name in metrics and events."""
        return self.name.lower()


class SinkName(IntEnum):
    """What telemetry flows into; each can fail without the others."""

    JOURNAL = 0
    FLIGHT_RECORDER = 1
    OPENTELEMETRY = 2
    METRICS = 3
    PROMETHEUS = 4
    NVTX = 5
    PROFILER = 6
    ATTRIBUTION = 7
    CONSOLE = 8
    LIVE_VIEW = 9

    @property
    def label(self) -> str:
        """The sink's name in metrics and logs."""
        return self.name.lower()


class FlightReason(IntEnum):
    """Why a flight record is written."""

    API = 0
    SIGNAL = 1
    SLOW_STEP = 2
    CRASH = 3
    ENGINE_DEAD = 4

    @property
    def label(self) -> str:
        """The reason's name in file names and tables."""
        return self.name.lower()


class GraphMode(IntEnum):
    """How a step's forward pass was launched."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2

    @property
    def label(self) -> str:
        """The mode's name in traces and tables."""
        return self.name.lower()
