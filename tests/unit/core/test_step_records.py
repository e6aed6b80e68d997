"""What step records say of queue, cache and blocks: worked examples, sums over runs, and the cost.

Random histories against a naive account are in tests/property.
"""

import random
import statistics
import time
from typing import Any

import pytest

from engine.core.block_history import SAMPLE_SIZE, BlockHistory
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.types.messages import FinishReason
from instrumentation import Admission, AdmissionStop, Preemption, PrefixMiss, StepRecord
from instrumentation.testing import FakeClock
from tests.fakes import FakeWorker, make_request, make_scheduler, run_step, sampling_params


class Engine:
    """A scheduler with block size 4, its worker and its clock, which stands still by itself."""

    def __init__(self, *, num_blocks: int = 64, **settings: Any) -> None:
        self.scheduler: Scheduler = make_scheduler(
            num_blocks=num_blocks, **({"max_model_len": 4 * num_blocks} | settings)
        )
        clock = self.scheduler._clock
        assert isinstance(clock, FakeClock)
        clock.tick_ns = 0
        self.clock = clock
        self.worker = FakeWorker(num_blocks, 4)
        self.num = 0

    def add(self, prompt: list[int], **fields: Any) -> Request:
        """Queue a request, which knows no end but `max_tokens`."""
        fields = {"ignore_eos": True, "num": self.num, "arrival_ns": self.num + 1} | fields
        caching = self.scheduler.kv_cache.enable_caching
        block_size = 4 if caching else None
        request = make_request(f"r{self.num}", prompt, block_size=block_size, **fields)
        self.num += 1
        self.scheduler.add_request(request)
        return request

    def step(self, *, after_ns: int = 0) -> StepRecord:
        """One step, some time later."""
        self.clock.advance(after_ns)
        done = run_step(self.scheduler, self.worker)
        assert done is not None
        return done[1]

    def serve(self, prompt: list[int], *, max_tokens: int = 1, **fields: Any) -> StepRecord:
        """Serve one request alone; returns the record of its first step."""
        self.add(prompt, max_tokens=max_tokens, **fields)
        first = self.step()
        while self.scheduler.has_unfinished_requests():
            self.step()
        return first


# -- the queue -------------------------------------------------------------------------------------


def test_the_queue_in_tokens_and_the_request_at_which_admission_stopped() -> None:
    engine = Engine(max_num_batched_tokens=10)
    for length in (6, 7, 20, 3):
        engine.add([1 + engine.num] * length, max_tokens=1)
    record = engine.step()
    assert record.admission_stop is AdmissionStop.TOKEN_BUDGET
    assert (record.admission_stop_request_num, record.admission_stop_num_tokens) == (2, 20)
    assert (record.num_waiting, record.num_waiting_tokens) == (2, 23)
    engine.scheduler.finish_requests(["r2"], FinishReason.ABORT)
    record = engine.step()
    assert (record.admission_stop_request_num, record.admission_stop_num_tokens) == (-1, 0)
    assert record.num_waiting_tokens == record.oldest_waiting_since_ns == 0


def test_the_oldest_waits_since_it_was_queued_and_runs_since_it_was_admitted() -> None:
    engine = Engine(max_num_seqs=1)
    start_ns = engine.clock.now_ns
    engine.add([1] * 3, max_tokens=2)
    engine.clock.advance(10)
    engine.add([2] * 3, max_tokens=3)
    engine.clock.advance(10)
    engine.add([3] * 3, max_tokens=1)
    record = engine.step(after_ns=10)
    assert record.oldest_waiting_since_ns == start_ns + 10
    assert record.oldest_running_since_ns == record.begin_ns == start_ns + 30
    engine.step(after_ns=10)
    record = engine.step(after_ns=10)
    assert record.oldest_waiting_since_ns == start_ns + 20
    assert record.oldest_running_since_ns == start_ns + 50
    engine.step(after_ns=10)
    assert engine.step(after_ns=10).oldest_running_since_ns == start_ns + 50


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_preempted_request_waits_since_its_preemption_behind_those_that_waited_longer(
    policy: str,
) -> None:
    engine = Engine(num_blocks=6, max_num_seqs=2, scheduling_policy=policy)
    engine.add([1] * 11, max_tokens=8)
    victim = engine.add([2] * 11, max_tokens=6)
    engine.step(after_ns=5)
    engine.clock.advance(5)
    later = engine.add([3] * 4, max_tokens=1)
    while not (record := engine.step(after_ns=5)).preempted:
        pass
    assert [p.request_num for p in record.preempted] == [victim.num]
    assert (record.num_waiting, record.num_waiting_preempted) == (2, 1)
    assert record.num_waiting_tokens == victim.num_tokens + later.num_tokens
    assert record.admission_stop is AdmissionStop.AFTER_PREEMPTION
    assert record.admission_stop_num_tokens == 0
    assert record.oldest_waiting_since_ns == later.times.queued_ns < record.begin_ns
    engine.scheduler.finish_requests([later.request_id], FinishReason.ABORT)
    preempted_ns = record.begin_ns
    assert engine.step(after_ns=5).oldest_waiting_since_ns == preempted_ns


def test_tokens_that_reach_a_request_after_its_preemption_count_as_waiting() -> None:
    """With two steps in flight, the second preempts a request that the first is sampling for."""
    engine = Engine(num_blocks=6)
    engine.add([1] * 11, max_tokens=8)
    victim = engine.add([2] * 11, max_tokens=6)
    scheduler, in_flight = engine.scheduler, []
    while not victim.num_preemptions:
        planned = scheduler.schedule()
        assert planned is not None
        in_flight.append((*planned, engine.worker.execute(planned[0])))
        if len(in_flight) == 2 and not victim.num_preemptions:
            plan, record, result = in_flight.pop(0)
            scheduler.update_from_output(plan, result, record)
    record = in_flight[-1][1]
    num_tokens = victim.num_tokens
    assert record.num_waiting_tokens == num_tokens
    plan, record, result = in_flight.pop(0)
    scheduler.update_from_output(plan, result, record)
    assert scheduler.waiting.totals.num_tokens == victim.num_tokens == num_tokens + 1


# -- preemption ------------------------------------------------------------------------------------


def test_a_preemption_names_the_request_that_it_made_room_for() -> None:
    engine = Engine(num_blocks=9, scheduling_policy="priority")
    low = engine.add([1] * 12, priority=5, max_tokens=9)
    high = engine.add([2] * 12, priority=0, max_tokens=9)
    late = engine.add([3] * 12, priority=5, max_tokens=9)
    engine.step()
    record = engine.step()
    # All three stand at a border, no block is left, and the ranks decide who gets the late one's.
    assert record.preempted == (Preemption(late.num, 3, 12, high.num),)
    assert low.num_preemptions == 0


def test_one_that_finds_nobody_below_itself_goes_for_itself() -> None:
    engine = Engine(num_blocks=6)
    first = engine.add([1] * 11, max_tokens=9)
    second = engine.add([2] * 12, max_tokens=9)
    engine.step()
    record = engine.step()
    assert record.preempted == (Preemption(second.num, 3, 12, second.num),)
    assert first.num_preemptions == 0


@pytest.mark.parametrize("enable_caching", [False, True])
def test_recomputed_tokens_are_those_lost_and_not_found_again(enable_caching: bool) -> None:
    engine = Engine(num_blocks=6, enable_caching=enable_caching)
    engine.add([1] * 11, max_tokens=5)
    victim = engine.add([2] * 12, max_tokens=3)
    records = [engine.step()]
    while engine.scheduler.has_unfinished_requests():
        records.append(engine.step())
    lost = [p.tokens_lost for r in records for p in r.preempted]
    resumed = [a for r in records for a in r.admissions if a.is_resumed]
    assert lost == [12]
    assert [a.request_num for a in resumed] == [victim.num]
    expected = 12 - resumed[0].num_hit_tokens
    assert sum(r.num_recompute_tokens for r in records) == expected
    assert (expected == 12) is not enable_caching


@pytest.mark.parametrize("seed", range(6))
def test_without_a_cache_every_token_is_computed_once_or_counted_as_recomputed(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(num_blocks=8, enable_caching=False, max_num_batched_tokens=rng.randint(4, 20))
    requests = [
        engine.add([n + 1] * rng.randint(1, 20), max_tokens=rng.randint(1, 12)) for n in range(8)
    ]
    records = []
    while engine.scheduler.has_unfinished_requests():
        records.append(engine.step())
    computed_once = sum(request.num_tokens - 1 for request in requests)
    num_recomputed = sum(record.num_recompute_tokens for record in records)
    assert sum(record.num_scheduled_tokens for record in records) == computed_once + num_recomputed
    assert num_recomputed == sum(p.tokens_lost for record in records for p in record.preempted) > 0


# -- the prefix cache ------------------------------------------------------------------------------

PROMPT = list(range(1, 14))  # three full blocks and the token that is always computed


def admission(engine: Engine, prompt: list[int], **fields: Any) -> Admission:
    (admitted,) = engine.serve(prompt, **fields).admissions
    assert admitted.num_query_tokens == len(prompt)
    assert not admitted.is_resumed
    return admitted


def test_nothing_is_missing_where_all_full_blocks_were_found() -> None:
    engine = Engine()
    assert admission(engine, PROMPT).miss is PrefixMiss.NEVER_CACHED
    for length, num_hit in ((13, 12), (12, 8), (11, 8), (5, 4)):
        admitted = admission(engine, PROMPT[:length])
        assert (admitted.miss, admitted.num_hit_tokens) == (PrefixMiss.NONE, num_hit)
        assert admitted.evicted_age_ns == -1


def test_a_request_without_a_full_block_to_serve_has_a_partial_one() -> None:
    engine = Engine()
    engine.serve(PROMPT)
    for length in range(1, 5):
        assert admission(engine, PROMPT[:length]).miss is PrefixMiss.PARTIAL_BLOCK


def test_what_differs_or_is_salted_was_never_cached() -> None:
    engine = Engine()
    engine.serve(PROMPT)
    admitted = admission(engine, [*PROMPT[:6], 99, *PROMPT[6:]])
    assert (admitted.miss, admitted.num_hit_tokens) == (PrefixMiss.NEVER_CACHED, 4)
    assert admission(engine, PROMPT, cache_salt="x").miss is PrefixMiss.NEVER_CACHED


def test_without_caching_or_with_prompt_logprobs_the_cache_is_disabled() -> None:
    engine = Engine(enable_caching=False)
    for _ in range(2):
        assert admission(engine, PROMPT).miss is PrefixMiss.DISABLED
    engine = Engine()
    engine.serve(PROMPT)
    record = engine.serve(PROMPT, prompt_logprobs=1)
    assert [a.miss for a in record.admissions] == [PrefixMiss.DISABLED]
    assert record.prefix_query_tokens == record.prefix_hit_tokens == 0


def test_an_evicted_block_is_missed_as_such_with_its_age() -> None:
    engine = Engine(num_blocks=4)
    engine.serve(PROMPT)
    engine.clock.advance(100)
    evicted_ns = engine.clock.now_ns
    record = engine.serve([50] * 8)  # takes the empty block, and of PROMPT the last full one
    assert record.num_evicted_blocks == 1
    engine.clock.advance(1_000)
    admitted = admission(engine, PROMPT)
    assert (admitted.miss, admitted.num_hit_tokens) == (PrefixMiss.EVICTED, 8)
    assert admitted.evicted_age_ns == engine.clock.now_ns - evicted_ns == 1_000
    # It is back now; evicted once more, its age is that of the second time.
    engine.clock.advance(500)
    engine.serve([60] * 8)
    engine.clock.advance(7)
    assert admission(engine, PROMPT).evicted_age_ns == 7


def test_a_reset_makes_evicted_prefixes_look_never_cached() -> None:
    engine = Engine(num_blocks=4)
    engine.serve(PROMPT)
    engine.serve([50] * 13)
    assert engine.scheduler.kv_cache.reset_prefix_cache()
    assert admission(engine, PROMPT).miss is PrefixMiss.NEVER_CACHED


def test_ghosts_are_bounded_and_the_oldest_are_dropped() -> None:
    for num_blocks, bound in ((1, 1_024), (256, 1_024), (257, 1_028), (40_000, 1 << 17)):
        history = BlockHistory(num_blocks)
        hashes = [number.to_bytes(4, "little") for number in range(bound + 10)]
        for number, block_hash in enumerate(hashes):
            history.now_ns = number
            history.evict(0, block_hash)
            if number == bound - 1:
                history.evict(0, hashes[0])  # evicted again, it is the newest
        assert len(history._ghosts) == bound
        known = [history.evicted_age_ns(block_hash) is not None for block_hash in hashes]
        assert known == [True] + [False] * 10 + [True] * (bound - 1)


# -- blocks ----------------------------------------------------------------------------------------


def test_unfilled_slots_are_those_of_the_last_blocks() -> None:
    engine = Engine(max_num_batched_tokens=20)
    for length in (8, 5, 9):
        engine.add([1 + engine.num] * length, max_tokens=9)
    assert engine.step().num_unfilled_slots == 0 + 3 + 1  # the third is cut to seven tokens
    assert engine.step().num_unfilled_slots == 3 + 2 + 3


def test_ages_of_evicted_and_of_reused_blocks() -> None:
    engine = Engine(num_blocks=4)
    engine.add([*PROMPT[:9]], max_tokens=2)  # three blocks, the first two of them full
    engine.step()
    engine.step(after_ns=30)  # ends it, 30 ns after its blocks were taken
    engine.clock.advance(5)
    record = engine.serve(PROMPT[:6])
    assert record.reuse_gaps_ns == (5,)
    engine.clock.advance(8)
    record = engine.serve([70] * 16)
    assert record.num_evicted_blocks == 2
    # First the second block, which nobody used since; then the first one, used again by the hit.
    assert record.evicted_lifetimes_ns == (43, 43)
    assert record.evicted_idle_ns == (13, 8)
    assert record.reuse_gaps_ns == ()


def test_an_abort_is_the_last_use_of_what_it_lets_go() -> None:
    engine = Engine()
    gone = engine.add(PROMPT, max_tokens=9)
    engine.step()
    engine.clock.advance(20)
    engine.scheduler.finish_requests([gone.request_id], FinishReason.ABORT)
    engine.clock.advance(3)
    assert engine.serve(PROMPT).reuse_gaps_ns == (3, 3, 3)


def test_of_many_blocks_a_step_records_an_even_sample() -> None:
    for num_blocks in (1, 63, 64, 65, 128, 129, 1_000):
        history = BlockHistory(num_blocks)
        history.used_ns = list(range(num_blocks))
        history.now_ns = num_blocks
        for block_id in range(num_blocks):
            history.evict(block_id, block_id.to_bytes(4, "little"))
            history.reuse_gaps_ns.append(block_id)
        times = history.take()
        stride = -(-num_blocks // SAMPLE_SIZE)
        assert times.reuse_gaps_ns == tuple(range(0, num_blocks, stride))
        assert times.evicted_idle_ns == tuple(range(num_blocks, 0, -stride))
        assert times.evicted_lifetimes_ns == (num_blocks,) * len(times.evicted_idle_ns)
        assert (
            SAMPLE_SIZE // 2 < len(times.reuse_gaps_ns) <= SAMPLE_SIZE or num_blocks < SAMPLE_SIZE
        )
        assert history.take() == ((), (), ())


# -- cost ------------------------------------------------------------------------------------------


def test_a_hundred_thousand_waiting_requests_do_not_slow_a_step_down() -> None:
    """test_scheduler.py counts the operations, for both policies; this is the clock's own word."""
    params = sampling_params(max_tokens=2, ignore_eos=True)
    medians = []
    for num_waiting in (100, 100_000):
        engine = Engine(num_blocks=64, max_num_seqs=4)
        for _ in range(num_waiting):
            engine.add([1, 2, 3], params=params)
        durations = []
        for _ in range(40):
            began_ns = time.perf_counter_ns()
            planned = engine.scheduler.schedule()
            durations.append(time.perf_counter_ns() - began_ns)
            assert planned is not None
            plan, record = planned
            engine.scheduler.update_from_output(plan, engine.worker.execute(plan), record)
            assert record.num_waiting_tokens == 3 * record.num_waiting
        medians.append(statistics.median(durations))
    assert medians[1] < 3 * medians[0], medians
