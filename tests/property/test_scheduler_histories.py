"""Random histories of the scheduler: both policies, small pools, chunks, salts, two depths."""

import os
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.types.sampling import SamplingParams
from tests.fakes import EOS, sampling_params
from tests.support.scheduler_harness import SchedulerHarness, Settings

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "60"))

configurations = st.builds(
    Settings,
    num_blocks=st.integers(2, 12),
    block_size=st.sampled_from((1, 2, 4)),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 24),
    enable_caching=st.booleans(),
    enable_chunked_prefill=st.booleans(),
    long_prefill_token_threshold=st.sampled_from((0, 0, 1, 3, 7)),
    scheduling_policy=st.sampled_from(("fcfs", "priority")),
    depth=st.sampled_from((1, 2)),
)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Token ids that often begin alike."""
    shared = [1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 2, 2, 3, 3]
    begin = shared[: draw(st.integers(0, len(shared)))]
    return begin + draw(st.lists(st.integers(1, 3), min_size=not begin, max_size=8))


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    """Limits and stops."""
    max_tokens = draw(st.sampled_from((None, 1, 2, 5, 12)))
    fields: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": draw(st.booleans())}
    if max_tokens != 1 and draw(st.booleans()):
        fields["min_tokens"] = 2
    if draw(st.booleans()):
        fields["stop_token_ids"] = [4]
    if draw(st.integers(0, 9)) == 0:
        fields["prompt_logprobs"] = 1
    return sampling_params(**fields)


class SchedulerHistory(RuleBasedStateMachine):
    """Arrivals, steps and aborts in any order; then everything ends."""

    @initialize(configuration=configurations)
    def start(self, configuration: Settings) -> None:
        self.harness = SchedulerHarness(configuration)

    @rule(
        prompt=prompts(),
        params=parameters(),
        priority=st.integers(-2, 2),
        salt=st.sampled_from((None, None, None, "a", "b")),
    )
    def add(
        self, prompt: list[int], params: SamplingParams, priority: int, salt: str | None
    ) -> None:
        self.harness.add(prompt, params, priority=priority, cache_salt=salt)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.harness.step()

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(data.draw(st.sampled_from(sorted(self.harness.live))))

    @precondition(lambda self: not self.harness.live and not self.harness.in_flight)
    @rule()
    def reset_cache_when_idle(self) -> None:
        assert self.harness.scheduler.kv_cache.reset_prefix_cache()
        assert self.harness.scheduler.kv_cache.pool.num_cached_free_blocks == 0

    @precondition(lambda self: self.harness.scheduler.running)
    @rule()
    def reset_cache_is_refused_when_busy(self) -> None:
        assert not self.harness.scheduler.kv_cache.reset_prefix_cache()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


TestSchedulerHistory = SchedulerHistory.TestCase
TestSchedulerHistory.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    configuration=configurations,
    load=st.lists(st.tuples(prompts(), parameters(), st.integers(-1, 1)), min_size=3, max_size=9),
)
def test_busy_pools_preempt_and_still_finish_everybody(
    data: st.DataObject,
    configuration: Settings,
    load: list[tuple[list[int], SamplingParams, int]],
    policy: str,
    depth: int,
) -> None:
    configuration.scheduling_policy, configuration.depth = policy, depth
    harness = SchedulerHarness(configuration)
    for prompt, params, priority in load:
        harness.add(prompt, params, priority=priority)
        for _ in range(data.draw(st.integers(0, 2))):
            harness.step()
    harness.drain()
    assert all(s.reason in ("stop", "length") for s in harness.shadows.values())
    tokens_in_steps = sum(record.num_sampled_tokens for record in harness.records)
    assert tokens_in_steps == sum(len(s.output) for s in harness.shadows.values())
    if policy == "fcfs":
        assert harness.first_admissions == list(harness.shadows)
    preemptions = sum(record.num_preempted for record in harness.records)
    preemptions += harness.num_preemptions_to_tell
    assert preemptions == sum(s.num_preemptions for s in harness.shadows.values())


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_histories_do_reach_preemption_hits_and_stops(policy: str, depth: int) -> None:
    """The strategies above are worth nothing if small pools never run dry."""
    harness = SchedulerHarness(
        Settings(
            num_blocks=9,
            block_size=2,
            max_num_seqs=4,
            max_num_batched_tokens=9,
            enable_caching=True,
            enable_chunked_prefill=True,
            long_prefill_token_threshold=3,
            scheduling_policy=policy,
            depth=depth,
        )
    )
    params = sampling_params(max_tokens=8, ignore_eos=True)
    for index in range(8):
        harness.add([1, 2, 3, 4, 1 + index % 3], params, priority=-index)
        harness.step()
    harness.drain()
    assert any(record.num_preempted for record in harness.records)
    assert any(record.prefix_hit_tokens for record in harness.records)
    assert any(record.preempted_prefix_query_tokens for record in harness.records)
    stops = {record.admission_stop.name for record in harness.records}
    assert {"AFTER_PREEMPTION", "KV_BLOCKS"} <= stops
    assert EOS not in params.all_stop_token_ids


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), configuration=configurations)
def test_later_arrivals_that_outrank_prefills_never_leave_unfilled_blocks_in_the_cache(
    data: st.DataObject, configuration: Settings, depth: int
) -> None:
    """A victim that was scheduled in the very step that preempts it computes nothing after all."""
    configuration.scheduling_policy, configuration.depth = "priority", depth
    configuration.enable_caching = configuration.enable_chunked_prefill = True
    configuration.max_num_seqs = 4
    configuration.max_num_batched_tokens = data.draw(st.integers(6, 16))
    configuration.long_prefill_token_threshold = data.draw(st.sampled_from((2, 4, 6)))
    harness = SchedulerHarness(configuration)
    pool_tokens = configuration.num_blocks * configuration.block_size
    for index in range(data.draw(st.integers(1, 3))):
        # A long prompt of low rank, cut into chunks, and short ones that overtake it.
        harness.add([1 + index] * pool_tokens, sampling_params(max_tokens=2), priority=1)
        for _ in range(data.draw(st.integers(1, 3))):
            harness.step()
        for _ in range(data.draw(st.integers(1, 3))):
            prompt = [5 + index] * data.draw(st.integers(1, 6))
            params = sampling_params(max_tokens=data.draw(st.integers(2, 5)), ignore_eos=True)
            harness.add(prompt, params, priority=-index)
            for _ in range(data.draw(st.integers(0, 2))):
                harness.step()
    harness.drain()
