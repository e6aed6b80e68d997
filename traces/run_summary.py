"""The shape of a run's summary: plain data.

Knows the fields and their units. Does not know how they are computed (`summary`) or shown
(`summary_text`).
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of durations; all 0 where the count is 0."""

    count: int
    mean_ns: float
    p50_ns: int
    p99_ns: int
    max_ns: int


@dataclass(frozen=True, slots=True)
class ProcessSummary:
    """One process of the run."""

    role: str
    rank: int
    pid: int
    is_truncated: bool
    num_dropped: int


@dataclass(frozen=True, slots=True)
class StartupSummary:
    """One phase of start-up."""

    role: str
    pid: int
    phase: str
    offset_ns: int
    """From the begin of the run's first phase to that of this one."""
    duration_ns: int


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Steps of one kind or one label; durations as `RunSummary.are_steps_of_workers` says."""

    name: str
    num_tokens: int
    total_ns: int
    durations: Quantiles


@dataclass(frozen=True, slots=True)
class PhaseTotal:
    """One phase of a thread; `in_steps_ns` is the part of it that lies within steps."""

    name: str
    count: int
    total_ns: int
    in_steps_ns: int


@dataclass(frozen=True, slots=True)
class ThreadSummary:
    """The phases of one thread against the time of its steps.

    Where a thread has steps, the phases' parts in steps and `unexplained_ns` add up to `steps_ns`.
    """

    role: str
    rank: int
    pid: int
    name: str
    steps_ns: int
    """Time in which at least one step of this thread was under way."""
    phases: list[PhaseTotal]
    unexplained_ns: int
    """The part of it that no phase covers."""


@dataclass(frozen=True, slots=True)
class BudgetSummary:
    """The steps' time, from scheduling to having applied the output, divided without overlap.

    `phases_ns` and `unexplained_ns` add up to `duration_ns`; see
    `instrumentation.explain.step_budget`.
    """

    duration_ns: int
    phases_ns: dict[str, int]
    """By phase, the longest first."""
    unexplained_ns: int


@dataclass(frozen=True, slots=True)
class PrefixSummary:
    """Prefix cache, in tokens."""

    query_tokens: int
    hit_tokens: int
    preempted_query_tokens: int
    preempted_hit_tokens: int


@dataclass(frozen=True, slots=True)
class PoolSummary:
    """The KV pool, in blocks: the most of each state that a step saw."""

    num_blocks: int
    peak_used: int
    peak_cached_free: int
    peak_free: int
    num_evicted: int


@dataclass(frozen=True, slots=True)
class PreemptionSummary:
    """Preemptions and what they lost."""

    count: int
    blocks_lost: int
    tokens_lost: int


@dataclass(frozen=True, slots=True)
class RequestsSummary:
    """The run's requests; intervals as `RequestTimeline` defines them."""

    count: int
    by_finish_reason: dict[str, int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    ttft: Quantiles
    inter_token: Quantiles
    """Each request's mean time between two tokens."""
    e2e: Quantiles
    queue: Quantiles
    prefill: Quantiles
    decode: Quantiles
    preempted: Quantiles


@dataclass(frozen=True, slots=True)
class RunSummary:
    """All of it."""

    folder: Path
    processes: list[ProcessSummary]
    startups: list[StartupSummary]
    elapsed_ns: int
    """First step's begin to last step's end."""
    idle_ns: int
    """The part of it in which no step was under way."""
    num_steps: int
    """Steps of the core."""
    num_cut_steps: int
    """Those of them that were under way when the recording began; they count from then on."""
    are_steps_of_workers: bool
    """Whether the groups hold the steps of a worker, which follow one another, so that their
    durations add up to no more than the run. A run without any record of a worker has those of the
    core instead, scheduling to updating, which overlap under async scheduling."""
    steps_by_kind: list[StepGroup]
    steps_by_label: list[StepGroup]
    latency: Quantiles
    """Steps of the core, from scheduling to having applied the output; without those cut."""
    threads: list[ThreadSummary]
    budget: BudgetSummary
    admission_stops: dict[str, int]
    num_context_tokens: int
    num_sampled_tokens: int
    prefix: PrefixSummary
    pool: PoolSummary
    preemptions: PreemptionSummary
    requests: RequestsSummary

    @property
    def context_tokens_per_s(self) -> float:
        """Prompt tokens computed per second of elapsed time."""
        return _rate(self.num_context_tokens, self.elapsed_ns)

    @property
    def sampled_tokens_per_s(self) -> float:
        """Output tokens per second of elapsed time."""
        return _rate(self.num_sampled_tokens, self.elapsed_ns)


def _rate(count: int, duration_ns: int) -> float:
    return count / (duration_ns * 1e-9) if duration_ns else 0.0
