"""Metrics of the KV pool: blocks by state, prefix cache, evictions, residency, preemptions.

Knows which field of a step record feeds which metric.
"""

from instrumentation.metrics.accumulators import Families
from instrumentation.metrics.info import (
    RESIDENCY_BUCKETS,
    SMALL_COUNT_BUCKETS,
    AfterDeath,
    MetricKind,
    Unit,
    declare,
)
from instrumentation.names import PrefixMiss
from instrumentation.record.step_records import StepRecord

BLOCK_STATES = ("used", "cached_free", "free")
ADMISSIONS = ("first", "preempted")

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

KV_BLOCKS = declare(
    "kv_blocks",
    _GAUGE,
    unit=Unit.BLOCKS,
    help="Blocks of the KV pool after the last step; the states add up to the pool. cached_free: "
    "held by nobody, contents can still be hit. All are free after the core's death",
    after_death=AfterDeath.RESET,
    state=BLOCK_STATES,
)
KV_UNFILLED_SLOTS = declare(
    "kv_unfilled_slots",
    _GAUGE,
    unit=Unit.TOKENS,
    help="Token slots that hold nothing in the last blocks of the requests of the last step; 0 "
    "after the core's death",
    after_death=AfterDeath.RESET,
)
KV_BLOCK_EVICTIONS = declare(
    "kv_block_evictions_total",
    _COUNTER,
    unit=Unit.BLOCKS,
    help="Cached blocks whose contents were given up to make room",
)
KV_BLOCK_LIFETIME = declare(
    "kv_block_lifetime_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="From allocation to eviction of cached blocks; at most 64 of each step",
    buckets=RESIDENCY_BUCKETS,
)
KV_BLOCK_IDLE = declare(
    "kv_block_idle_before_evict_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="From the last use to eviction of cached blocks; at most 64 of each step",
    buckets=RESIDENCY_BUCKETS,
)
KV_BLOCK_REUSE_GAP = declare(
    "kv_block_reuse_gap_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="From the last use of a cached free block to its next hit; at most 64 of each step",
    buckets=RESIDENCY_BUCKETS,
)
PREFIX_QUERY_TOKENS = declare(
    "prefix_cache_query_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Tokens looked up in the prefix cache at admission (not at attempts that failed), by "
    "whether the request was preempted before",
    admission=ADMISSIONS,
)
PREFIX_HIT_TOKENS = declare(
    "prefix_cache_hit_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Tokens found in the prefix cache, by whether the request was preempted before",
    admission=ADMISSIONS,
)
PREFIX_MISS_TOKENS = declare(
    "prefix_cache_miss_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Tokens of admitted requests that the prefix cache did not serve, by why it had no "
    "more: never_cached, evicted, partial_block (the prompt has no full block to serve), disabled "
    "(caching is off, or prompt logprobs want the whole prompt), none (all full blocks were there; "
    "the rest and the last token are always computed). Queries = hits + misses but those disabled",
    cause=tuple(miss.label for miss in PrefixMiss),
)
PREFIX_EVICTED_AGE = declare(
    "prefix_cache_miss_evicted_age_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Of misses by eviction: how long before the block had been evicted",
)
PREEMPTIONS = declare(
    "preemptions_total", _COUNTER, unit=Unit.REQUESTS, help="Running requests thrown out"
)
PREEMPTION_LOST_TOKENS = declare(
    "preemption_lost_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Computed tokens that preempted requests lost when they were thrown out",
)
PREEMPTION_LOST_BLOCKS = declare(
    "preemption_lost_blocks_total",
    _COUNTER,
    unit=Unit.BLOCKS,
    help="Blocks that preempted requests gave back",
)
PREEMPTION_RECOMPUTED_TOKENS = declare(
    "preemption_recomputed_tokens_total",
    _COUNTER,
    unit=Unit.TOKENS,
    help="Tokens that resumed requests had to compute a second time, since the prefix cache did "
    "not have them any more",
)
STEP_PREEMPTIONS = declare(
    "step_preemptions",
    _HISTOGRAM,
    unit=Unit.REQUESTS,
    help="Requests thrown out in one step, of steps that threw any out",
    buckets=SMALL_COUNT_BUCKETS,
)


class CacheMetrics:
    """Counts what steps did to the KV pool."""

    def __init__(self, families: Families) -> None:
        self._blocks = families.gauge(KV_BLOCKS)
        self._unfilled_slots = families.gauge(KV_UNFILLED_SLOTS)
        self._evictions = families.counter(KV_BLOCK_EVICTIONS)
        self._lifetime = families.histogram(KV_BLOCK_LIFETIME)
        self._idle = families.histogram(KV_BLOCK_IDLE)
        self._reuse_gap = families.histogram(KV_BLOCK_REUSE_GAP)
        self._queries = families.counter(PREFIX_QUERY_TOKENS)
        self._hits = families.counter(PREFIX_HIT_TOKENS)
        self._misses = families.counter(PREFIX_MISS_TOKENS)
        self._evicted_age = families.histogram(PREFIX_EVICTED_AGE)
        self._preemptions = families.counter(PREEMPTIONS)
        self._lost_tokens = families.counter(PREEMPTION_LOST_TOKENS)
        self._lost_blocks = families.counter(PREEMPTION_LOST_BLOCKS)
        self._recomputed_tokens = families.counter(PREEMPTION_RECOMPUTED_TOKENS)
        self._step_preemptions = families.histogram(STEP_PREEMPTIONS)

    def observe_step(self, record: StepRecord) -> None:
        """Count one step of the core."""
        if record.prefix_query_tokens or record.preempted_prefix_query_tokens or record.admissions:
            self._count_admissions(record)
        if record.num_evicted_blocks:
            self._evictions.add(record.num_evicted_blocks)
            self._lifetime.observe_many(record.evicted_lifetimes_ns)
            self._idle.observe_many(record.evicted_idle_ns)
        if record.reuse_gaps_ns:
            self._reuse_gap.observe_many(record.reuse_gaps_ns)
        if record.preempted:
            self._preemptions.add(len(record.preempted))
            self._step_preemptions.observe(len(record.preempted))
            self._lost_tokens.add(sum(one.tokens_lost for one in record.preempted))
            self._lost_blocks.add(sum(one.blocks_lost for one in record.preempted))
        if record.num_recompute_tokens:
            self._recomputed_tokens.add(record.num_recompute_tokens)

    def take_levels(self, record: StepRecord) -> None:
        """Bring the gauges up to date, for a reader."""
        for state, num_blocks in zip(BLOCK_STATES, record.blocks_at_end, strict=True):
            self._blocks.set(num_blocks, state)
        self._unfilled_slots.set(record.num_unfilled_slots)

    def _count_admissions(self, record: StepRecord) -> None:
        self._queries.add(record.prefix_query_tokens, "first")
        self._queries.add(record.preempted_prefix_query_tokens, "preempted")
        self._hits.add(record.prefix_hit_tokens, "first")
        self._hits.add(record.preempted_prefix_hit_tokens, "preempted")
        for admission in record.admissions:
            num_missed = admission.num_query_tokens - admission.num_hit_tokens
            self._misses.add(num_missed, PrefixMiss(admission.miss).label)
            if admission.evicted_age_ns >= 0:
                self._evicted_age.observe(admission.evicted_age_ns)
