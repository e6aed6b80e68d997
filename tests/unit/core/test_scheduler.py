"""Scheduler: the worked examples, the budgets, priority, preemption, aborts, and what it costs."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.types.messages import FinishReason
from instrumentation import AdmissionStop, Event, format_step_label
from instrumentation.testing import Recorder
from tests.fakes import (
    FakeWorker,
    make_request,
    make_scheduler,
    reference_output,
    run_step,
    sampling_params,
)


class Traffic:
    """A scheduler with its worker, and numbered requests for it."""

    def __init__(self, *, num_blocks: int = 4096, block_size: int = 16, **settings: Any) -> None:
        self.scheduler = make_scheduler(num_blocks=num_blocks, block_size=block_size, **settings)
        self.worker = FakeWorker(num_blocks, block_size)
        self.block_size = block_size
        self.num = 0

    def add(self, prompt: list[int] | int, **fields: Any) -> Request:
        """Queue a request; a number stands for a prompt of that length, unlike all others."""
        if isinstance(prompt, int):
            prompt = [self.num + 1] * prompt
        fields = {"ignore_eos": True, "num": self.num, "arrival_ns": self.num + 1} | fields
        request = make_request(f"r{self.num}", prompt, block_size=self.block_size, **fields)
        self.num += 1
        self.scheduler.add_request(request)
        return request

    def step(self) -> tuple[Any, Any, Any]:
        """One synchronous step."""
        done = run_step(self.scheduler, self.worker)
        assert done is not None
        return done

    def finish_all(self) -> None:
        """Run until nothing is left."""
        while self.scheduler.has_unfinished_requests():
            self.step()


def spread(total: int, parts: int) -> list[int]:
    """`total` cut into `parts` unequal lengths."""
    lengths = [total // parts + (index - parts // 2) * 7 for index in range(parts)]
    lengths[-1] += total - sum(lengths)
    return lengths


# -- the worked examples ---------------------------------------------------------------------------

PRODUCTION = {
    "max_num_batched_tokens": 16_384,
    "max_num_seqs": 1_024,
    "enable_chunked_prefill": False,
    "max_model_len": 16_384,
}


def test_eighteen_requests_fit_and_the_nineteenth_is_refused() -> None:
    traffic = Traffic(**PRODUCTION)
    admitted = [traffic.add(length) for length in spread(16_117, 18)]
    refused, behind = traffic.add(900), traffic.add(10)

    plan, record, _ = traffic.step()

    assert list(plan.num_scheduled_tokens) == [request.request_id for request in admitted]
    assert plan.total_num_scheduled_tokens == 16_117
    assert record.token_budget_left == 267
    assert record.admission_stop is AdmissionStop.CHUNKED_PREFILL_OFF
    assert record.admission_stop_request_num == refused.num
    # The one behind it would fit into what is left, but nobody is passed over.
    assert behind.status is RequestStatus.WAITING
    assert format_step_label(plan.label) == "execute_context_18(16117)_generation_0(0)"


def test_the_mixed_step_of_the_trace() -> None:
    traffic = Traffic(**PRODUCTION)
    for length in spread(16_117, 18):
        traffic.add(length)
    traffic.add(900)
    for length in spread(13_747 - 900, 13):
        traffic.add(length)
    traffic.step()

    plan, record, _ = traffic.step()

    assert format_step_label(plan.label) == "execute_context_14(13747)_generation_18(18)"
    assert record.label == plan.label
    assert record.token_budget_left == 16_384 - 13_747 - 18
    assert record.admission_stop is AdmissionStop.NONE
    assert len(record.scheduled) == 2 * 32
    assert len(record.first_tokens) == 14


def test_eight_hundred_cached_tokens_leave_two_hundred() -> None:
    traffic = Traffic(max_num_batched_tokens=2_048, max_model_len=2_048)
    prompt = [index % 11 + 1 for index in range(1_000)]
    traffic.add([*prompt[:800], 5, 5, 5], max_tokens=1)
    traffic.finish_all()
    request = traffic.add(prompt)

    plan, record, outputs = traffic.step()

    assert plan.num_scheduled_tokens == {request.request_id: 200}
    assert plan.scheduled_new_reqs[0].num_computed_tokens == 800
    assert (record.prefix_query_tokens, record.prefix_hit_tokens) == (1_000, 800)
    assert outputs[0].outputs[0].num_cached_tokens == 800


@pytest.mark.parametrize(("block_size", "left"), [(1, 1), (16, 16)])
def test_a_full_hit_still_computes_the_last_token(block_size: int, left: int) -> None:
    traffic = Traffic(block_size=block_size)
    prompt = [index % 7 + 1 for index in range(64)]
    traffic.add(prompt, max_tokens=2)
    traffic.finish_all()
    request = traffic.add(prompt)
    plan, _, outputs = traffic.step()
    assert plan.num_scheduled_tokens == {request.request_id: left}
    expected, _ = reference_output(prompt, request.sampling_params, 512)
    assert outputs[0].outputs[0].new_token_ids == expected[:1]


def test_a_prompt_is_cut_to_the_budget_that_is_left() -> None:
    traffic = Traffic(max_num_batched_tokens=100)
    first, second, third = traffic.add(60), traffic.add(130), traffic.add(5)
    plan, record, _ = traffic.step()
    assert plan.num_scheduled_tokens == {first.request_id: 60, second.request_id: 40}
    assert record.admission_stop is AdmissionStop.TOKEN_BUDGET
    assert record.admission_stop_request_num == third.num
    assert record.first_tokens == (first.num,)
    plan, _, _ = traffic.step()
    assert plan.num_scheduled_tokens == {
        first.request_id: 1,
        second.request_id: 90,
        third.request_id: 5,
    }
    assert format_step_label(plan.label) == "execute_context_2(95)_generation_1(1)"


def test_the_threshold_bounds_one_prompt_in_one_step() -> None:
    traffic = Traffic(max_num_batched_tokens=100, long_prefill_token_threshold=30)
    long, short = traffic.add(70), traffic.add(20)
    plan, _, _ = traffic.step()
    assert plan.num_scheduled_tokens == {long.request_id: 30, short.request_id: 20}
    plan, _, _ = traffic.step()
    assert plan.num_scheduled_tokens == {long.request_id: 30, short.request_id: 1}
    plan, _, _ = traffic.step()
    assert plan.num_scheduled_tokens == {long.request_id: 10, short.request_id: 1}


def test_the_sequence_budget_stops_admission() -> None:
    traffic = Traffic(max_num_seqs=3)
    requests = [traffic.add(4, max_tokens=2) for _ in range(5)]
    plan, record, _ = traffic.step()
    assert len(plan.num_scheduled_tokens) == 3
    assert record.admission_stop is AdmissionStop.MAX_NUM_SEQS
    assert record.admission_stop_request_num == requests[3].num
    assert (record.num_running, record.num_waiting) == (3, 2)
    traffic.finish_all()


def test_too_few_blocks_stop_admission() -> None:
    traffic = Traffic(num_blocks=8, block_size=4, max_model_len=32)
    traffic.add(20, max_tokens=4)
    refused = traffic.add(16, max_tokens=1)
    _, record, _ = traffic.step()
    assert record.admission_stop is AdmissionStop.KV_BLOCKS
    assert record.admission_stop_request_num == refused.num
    traffic.finish_all()


def test_salt_separates_prefixes() -> None:
    traffic = Traffic(block_size=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    traffic.add(prompt, cache_salt="a", max_tokens=1)
    traffic.finish_all()
    hits = []
    for salt in (None, "b", "a"):
        traffic.add(prompt, cache_salt=salt, max_tokens=1)
        _, record, _ = traffic.step()
        hits.append(record.prefix_hit_tokens)
    assert hits == [0, 0, 8]


def test_without_caching_nothing_is_looked_up() -> None:
    traffic = Traffic(block_size=4, enable_caching=False)
    for _ in range(2):
        traffic.add([1] * 9, max_tokens=1)
        _, record, _ = traffic.step()
        assert (record.prefix_query_tokens, record.prefix_hit_tokens) == (0, 0)
        assert record.num_blocks_cached_free == 0


# -- preemption ------------------------------------------------------------------------------------


def test_the_last_one_yields_and_recomputes_from_its_cached_prefix() -> None:
    recorder = Recorder()
    traffic = Traffic(num_blocks=6, block_size=4, max_model_len=24, obs=recorder)
    first, second = traffic.add(11, max_tokens=8), traffic.add(10, max_tokens=6)
    records = []
    while traffic.scheduler.has_unfinished_requests():
        records.append(traffic.step()[1])
    hit = next(r for r in records if r.preempted)
    assert [p.request_num for p in hit.preempted] == [second.num]
    assert hit.preempted[0].blocks_lost == 3
    assert 10 <= hit.preempted[0].tokens_lost <= 12
    assert hit.admission_stop is AdmissionStop.AFTER_PREEMPTION
    assert first.num_preemptions == 0
    for request in (first, second):
        expected, _ = reference_output(request.prompt_token_ids, request.sampling_params, 24)
        assert request.output_token_ids == expected
    kinds = [event.kind for event in recorder.events]
    assert kinds.count(Event.PREEMPT) == kinds.count(Event.RESUME) == second.num_preemptions
    assert sum(r.preempted_prefix_query_tokens for r in records) > 0
    assert all(begin < end for begin, end in second.times.preemptions)


def test_a_preempted_request_tells_its_times_with_its_next_tokens() -> None:
    """A stop string may end it in the frontend, which then has no later output to learn from."""
    traffic = Traffic(num_blocks=6, block_size=4, max_model_len=24)
    traffic.add(11, max_tokens=8)
    second = traffic.add(10, max_tokens=6)
    after = []
    while traffic.scheduler.has_unfinished_requests():
        _, _, packages = traffic.step()
        for package in packages.values():
            after += [o for o in package.outputs if o.request_id == second.request_id]
    assert second.num_preemptions > 0
    assert len(after) == 6
    resumed = [o for o in after if o.times is not None and not o.finished][1:]
    assert resumed, "no output between the resumption and the end carries times"


def test_a_victim_is_never_part_of_the_step_that_preempts_it() -> None:
    traffic = Traffic(
        num_blocks=7,
        block_size=2,
        max_model_len=14,
        max_num_batched_tokens=8,
        long_prefill_token_threshold=4,
        scheduling_policy="priority",
    )
    low = traffic.add(12, priority=1, max_tokens=1)
    traffic.step()
    high = traffic.add(2, priority=0, max_tokens=2)
    traffic.step()
    # The low one was admitted first, but the high one is planned first and needs its blocks.
    plan, record, _ = traffic.step()
    assert plan.num_scheduled_tokens == {high.request_id: 1}
    assert [p.request_num for p in record.preempted] == [low.num]
    assert record.token_budget_left == 7
    assert low.request_id in plan.finished_req_ids
    assert not plan.scheduled_new_reqs
    # What it was about to compute was never computed, so nobody may find it in the cache.
    plan, record, _ = traffic.step()
    assert plan.num_scheduled_tokens == {low.request_id: 4}
    assert record.preempted_prefix_hit_tokens == 8
    traffic.finish_all()
    expected, _ = reference_output([1] * 12, low.sampling_params, 14)
    assert low.output_token_ids == expected


# -- priority --------------------------------------------------------------------------------------


def test_priority_then_arrival_decides_who_is_admitted() -> None:
    traffic = Traffic(max_num_seqs=1, scheduling_policy="priority")
    ranks = [3, -1, 3, 0, -1]
    requests = [traffic.add(4, priority=rank, max_tokens=1) for rank in ranks]
    order = []
    while traffic.scheduler.has_unfinished_requests():
        order += list(traffic.step()[0].num_scheduled_tokens)
    assert order == [requests[index].request_id for index in (1, 4, 3, 0, 2)]


def test_the_lowest_rank_that_came_last_is_the_victim() -> None:
    traffic = Traffic(num_blocks=9, block_size=4, max_model_len=36, scheduling_policy="priority")
    requests = [traffic.add(12, priority=rank, max_tokens=4) for rank in (5, 0, 5)]
    _, _, _ = traffic.step()
    plan, record, _ = traffic.step()
    assert [p.request_num for p in record.preempted] == [requests[2].num]
    assert set(plan.num_scheduled_tokens) == {requests[0].request_id, requests[1].request_id}
    traffic.finish_all()


# -- aborts ----------------------------------------------------------------------------------------


def test_abort_while_waiting_running_preempted_and_finished() -> None:
    traffic = Traffic(num_blocks=6, block_size=4, max_model_len=24)
    scheduler = traffic.scheduler
    running, preempted = traffic.add(11, max_tokens=8), traffic.add(10, max_tokens=6)
    while preempted.status is not RequestStatus.PREEMPTED:
        traffic.step()
    waiting, finished = traffic.add(4), traffic.add(4)
    for request in (waiting, preempted, running):
        state = request.status
        assert scheduler.finish_requests([request.request_id], FinishReason.ABORT) == [request]
        assert request.is_finished
        assert request.finish_reason is FinishReason.ABORT, state
        scheduler.check_integrity()
    traffic.finish_all()
    assert finished.is_finished
    assert scheduler.finish_requests([finished.request_id], FinishReason.ABORT) == []
    scheduler.kv_cache.check_idle()


def test_abort_of_a_request_in_flight_voids_its_result() -> None:
    traffic = Traffic()
    gone, kept = traffic.add(8), traffic.add(8)
    planned = traffic.scheduler.schedule()
    assert planned is not None
    plan, record = planned
    result = traffic.worker.execute(plan)
    traffic.scheduler.finish_requests([gone.request_id], FinishReason.ABORT)
    packages = traffic.scheduler.update_from_output(plan, result, record)
    assert [o.request_id for o in packages[0].outputs] == [kept.request_id]
    assert record.num_sampled_tokens == 1
    assert record.finished == ()
    plan, _, _ = traffic.step()
    assert plan.finished_req_ids == [gone.request_id]


def test_an_id_named_twice_in_one_abort_is_aborted_once() -> None:
    traffic = Traffic()
    request = traffic.add(8)
    ids = [request.request_id, request.request_id]
    assert traffic.scheduler.finish_requests(ids, FinishReason.ABORT) == [request]
    assert not traffic.scheduler.has_unfinished_requests()


def test_an_id_can_be_used_again_right_after_an_abort() -> None:
    traffic = Traffic(block_size=4)
    first = traffic.add([1, 2, 3, 4, 5])
    traffic.step()
    traffic.scheduler.finish_requests([first.request_id], FinishReason.ABORT)
    again = make_request(first.request_id, [6, 7, 8], num=7, max_tokens=2, ignore_eos=True)
    traffic.scheduler.add_request(again)
    plan, _, _ = traffic.step()
    assert plan.finished_req_ids == [first.request_id]
    assert [new.prompt_token_ids for new in plan.scheduled_new_reqs] == [[6, 7, 8]]
    traffic.finish_all()
    expected, _ = reference_output([6, 7, 8], again.sampling_params, 512)
    assert again.output_token_ids == expected


def test_an_id_in_use_is_refused() -> None:
    traffic = Traffic()
    request = traffic.add(8)
    with pytest.raises(AssertionError, match="already queued"):
        traffic.scheduler.add_request(request)


# -- async: step N + 1 is planned before the result of step N is in --------------------------------


def test_the_next_step_is_planned_without_knowing_the_token() -> None:
    traffic = Traffic(block_size=4)
    request = traffic.add(8, max_tokens=3)
    scheduler, worker = traffic.scheduler, traffic.worker
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None
    assert second is not None
    assert second[0].num_scheduled_tokens == {request.request_id: 1}
    assert second[0].scheduled_cached_reqs[0].num_computed_tokens == 8
    assert format_step_label(second[0].label) == "execute_context_0(0)_generation_1(1)"
    assert request.num_output_placeholders == 2
    results = [worker.execute(plan) for plan, _ in (first, second)]
    scheduler.update_from_output(first[0], results[0], first[1])
    assert request.num_output_placeholders == 1
    scheduler.update_from_output(second[0], results[1], second[1])
    assert request.num_output_placeholders == 0
    assert first[1].first_tokens == (request.num,)
    assert second[1].first_tokens == ()
    traffic.finish_all()


def test_no_token_is_planned_behind_max_tokens_or_the_context() -> None:
    for fields, max_model_len in (({"max_tokens": 1}, 512), ({"max_tokens": None}, 9)):
        traffic = Traffic(block_size=4, max_model_len=max_model_len)
        traffic.add(8, **fields)
        planned = traffic.scheduler.schedule()
        assert planned is not None
        assert traffic.scheduler.schedule() is None
        plan, record = planned
        result = traffic.worker.execute(plan)
        outputs = traffic.scheduler.update_from_output(plan, result, record)
        assert outputs[0].outputs[0].finish_reason is FinishReason.LENGTH
        assert not traffic.scheduler.has_unfinished_requests()


def test_a_token_planned_behind_the_end_is_void() -> None:
    traffic = Traffic(block_size=4)
    prompt = [3, 1, 2]
    params = sampling_params(max_tokens=50)
    expected, reason = reference_output(prompt, params, 512)
    assert reason == "stop"
    request = traffic.add(prompt, params=params)
    in_flight: list[Any] = []
    tokens: list[int] = []
    while traffic.scheduler.has_unfinished_requests() or in_flight:
        planned = traffic.scheduler.schedule() if len(in_flight) < 2 else None
        if planned is not None:
            in_flight.append((*planned, traffic.worker.execute(planned[0])))
            if len(in_flight) < 2:
                continue
        plan, record, result = in_flight.pop(0)
        packages = traffic.scheduler.update_from_output(plan, result, record)
        tokens += [t for p in packages.values() for o in p.outputs for t in o.new_token_ids]
    assert tokens == expected
    assert request.is_finished
    traffic.scheduler.kv_cache.check_idle()


def test_each_client_gets_its_own_package() -> None:
    traffic = Traffic()
    for client_index in (0, 2):
        traffic.add(4).client_index = client_index
    _, _, packages = traffic.step()
    assert {index: len(p.outputs) for index, p in packages.items()} == {0: 1, 2: 1}
    assert all(p.timestamp_ns > 0 for p in packages.values())


def test_blocks_at_the_end_of_the_step_are_those_after_finished_ones_left() -> None:
    traffic = Traffic(block_size=4, num_blocks=32)
    traffic.add(8, max_tokens=1)
    traffic.add(3, max_tokens=9)
    _, record, _ = traffic.step()
    assert record.num_blocks_used == 3
    pool = traffic.scheduler.kv_cache.pool
    used, cached_free = pool.num_used_blocks, pool.num_cached_free_blocks
    assert (used, cached_free) == (1, 2)
    assert record.blocks_at_end == (used, cached_free, 32 - used - cached_free)


# -- cost ------------------------------------------------------------------------------------------


class CountingRequest(Request):
    """Counts every look at any of its kind."""

    __slots__ = ()
    num_looks = 0

    def __getattribute__(self, name: str) -> Any:
        CountingRequest.num_looks += 1
        return super().__getattribute__(name)


def count_calls(action: Callable[[], object]) -> int:
    """Calls of Python and C functions that the action makes."""
    num_calls = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_nothing_in_a_step_depends_on_the_length_of_the_queue(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fakes.Request", CountingRequest)
    looks, calls = [], []
    for num_waiting in (200, 100_000):
        traffic = Traffic(num_blocks=64, block_size=4, max_num_seqs=4, scheduling_policy=policy)
        params = sampling_params(max_tokens=3, ignore_eos=True)
        for index in range(num_waiting):
            traffic.add([1, 2, 3], params=params, priority=index % 5)
        queue: Any = traffic.scheduler.waiting
        monkeypatch.setattr(type(queue), "__iter__", _refuse_to_iterate)
        CountingRequest.num_looks = 0
        for _ in range(6):  # admissions, decodes, ends and admissions again
            calls.append(count_calls(lambda: _scheduler_step(traffic.scheduler, traffic.worker)))
        looks.append(CountingRequest.num_looks)
        victims = [f"r{index}" for index in range(50, 60)]
        aborting = lambda: traffic.scheduler.finish_requests(victims, FinishReason.ABORT)  # noqa: E731
        calls.append(count_calls(aborting))
        assert len(traffic.scheduler.waiting) >= num_waiting - 30
    assert looks[0] == looks[1] > 0
    assert calls[:7] == calls[7:]


def _scheduler_step(scheduler: Scheduler, worker: FakeWorker) -> None:
    planned = scheduler.schedule()
    assert planned is not None
    plan, record = planned
    scheduler.update_from_output(plan, worker.execute(plan), record)


def _refuse_to_iterate(queue: object) -> Any:
    raise AssertionError("a step walks through the waiting queue")
