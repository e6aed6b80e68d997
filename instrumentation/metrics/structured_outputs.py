"""Metrics of structured outputs: compiled grammars, what they cost, what became of the others.

Knows the totals that ride in step records, or alone where no step follows.
"""

from instrumentation.metrics.accumulators import Families
from instrumentation.metrics.info import AfterDeath, MetricKind, Unit, declare
from instrumentation.names import GrammarOutcome
from instrumentation.record.step_records import GrammarTotals, StepRecord

_COUNTER, _GAUGE = MetricKind.COUNTER, MetricKind.GAUGE

STRUCTURED_OUTPUT_REQUESTS = declare(
    "structured_output_requests_total",
    _COUNTER,
    unit=Unit.REQUESTS,
    help="Requests (each of n) with a structured output, by whether its constraint had been "
    "compiled before",
    cache=("hit", "miss"),
)
STRUCTURED_OUTPUT_COMPILES = declare(
    "structured_output_compiles_total",
    _COUNTER,
    unit=Unit.ENTRIES,
    help="Constraints of structured outputs that were to be compiled, by what became of them",
    outcome=tuple(outcome.label for outcome in GrammarOutcome),
)
STRUCTURED_OUTPUT_COMPILE_SECONDS = declare(
    "structured_output_compile_seconds_total",
    _COUNTER,
    unit=Unit.SECONDS,
    help="Time spent compiling constraints beside the steps, for nothing too; not for those that "
    "were withdrawn",
)
STRUCTURED_OUTPUT_GRAMMARS = declare(
    "structured_output_cached_grammars",
    _GAUGE,
    unit=Unit.ENTRIES,
    help="Compiled constraints that are kept for later requests; 0 after the core's death",
    after_death=AfterDeath.RESET,
)
STRUCTURED_OUTPUT_CACHE_BYTES = declare(
    "structured_output_cache_bytes",
    _GAUGE,
    unit=Unit.BYTES,
    help="Memory that they take; 0 after the core's death",
    after_death=AfterDeath.RESET,
)
STRUCTURED_OUTPUT_ROWS = declare(
    "structured_output_sampled_rows_total",
    _COUNTER,
    unit=Unit.ENTRIES,
    help="Rows of steps that were sampled under the mask of a grammar",
)

STRUCTURED_OUTPUT_FORCED_TOKENS = declare(
    "structured_output_forced_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Tokens that were sampled where the grammar had left one text only, at least its first "
    "byte: what need not be sampled",
)


class StructuredOutputMetrics:
    """Counts structured outputs as of the last step, or the last failure behind it."""

    def __init__(self, families: Families) -> None:
        self._requests = families.counter(STRUCTURED_OUTPUT_REQUESTS)
        self._compiles = families.counter(STRUCTURED_OUTPUT_COMPILES)
        self._seconds = families.counter(STRUCTURED_OUTPUT_COMPILE_SECONDS)
        self._grammars = families.gauge(STRUCTURED_OUTPUT_GRAMMARS)
        self._bytes = families.gauge(STRUCTURED_OUTPUT_CACHE_BYTES)
        self._rows = families.counter(STRUCTURED_OUTPUT_ROWS)
        self._forced = families.counter(STRUCTURED_OUTPUT_FORCED_TOKENS)
        self._totals: GrammarTotals | None = None

    def observe_step(self, record: StepRecord) -> None:
        """Count one step of the core."""
        if record.num_structured:
            self._rows.add(record.num_structured)
        if record.grammars is not None:
            self._totals = record.grammars

    def observe_totals(self, totals: GrammarTotals) -> None:
        """Take over what no step tells of."""
        self._totals = totals

    def forget_cache(self) -> None:
        """Let the levels go, and keep the totals: the process that kept the grammars has died."""
        if self._totals is not None:
            self._totals = self._totals._replace(num_cached=0, num_bytes_cached=0)

    def take_levels(self) -> None:
        """Take the totals over, for a reader."""
        totals = self._totals
        if totals is None:
            return
        self._requests.raise_to(totals.num_hits, "hit")
        self._requests.raise_to(totals.num_misses, "miss")
        for outcome, num_constraints in zip(GrammarOutcome, totals.outcomes, strict=True):
            self._compiles.raise_to(num_constraints, outcome.label)
        self._seconds.raise_to(totals.compile_ns)
        self._forced.raise_to(totals.num_forced)
        self._grammars.set(totals.num_cached)
        self._bytes.set(totals.num_bytes_cached)
