"""Waiting queues: order, putting back, removal, victims; compared with a sorted list."""

import random

import pytest

from engine.core.request import Request, RequestStatus
from engine.core.request_queue import (
    FCFSRequestQueue,
    PriorityRequestQueue,
    make_request_queue,
)
from tests.fakes import make_request, sampling_params

PARAMS = sampling_params()


def request(
    num: int, *, priority: int = 0, arrival_ns: int | None = None, num_tokens: int = 1
) -> Request:
    return make_request(
        f"r{num}",
        [1] * num_tokens,
        num=num,
        priority=priority,
        arrival_ns=num if arrival_ns is None else arrival_ns,
        params=PARAMS,
    )


def test_policy_names_choose_the_queue() -> None:
    assert isinstance(make_request_queue("fcfs"), FCFSRequestQueue)
    assert isinstance(make_request_queue("priority"), PriorityRequestQueue)


def test_fcfs_keeps_arrival_order_also_for_those_put_back() -> None:
    queue = FCFSRequestQueue()
    requests = [request(num) for num in range(6)]
    for one in requests:
        queue.add(one)
    running = [queue.pop() for _ in range(4)]
    assert queue.victim(running) is requests[3]
    # Preempted from the end, they stand in their old order before those that never ran.
    queue.put_back(running.pop())
    queue.put_back(running.pop())
    assert queue.peek() is requests[2]
    assert [queue.pop().num for _ in range(len(queue))] == [2, 3, 4, 5]


def test_priority_orders_by_rank_then_arrival_then_number() -> None:
    queue = PriorityRequestQueue()
    keys = [(2, 5), (0, 9), (0, 3), (-1, 9), (0, 3)]
    requests = [
        request(num, priority=priority, arrival_ns=arrival)
        for num, (priority, arrival) in enumerate(keys)
    ]
    for one in requests:
        queue.add(one)
    assert queue.victim(requests) is requests[0]
    assert [queue.pop().num for _ in range(5)] == [3, 2, 4, 1, 0]
    assert len(queue) == 0


def test_the_victim_is_the_last_of_the_lowest_rank() -> None:
    queue = PriorityRequestQueue()
    running = [request(0, priority=1), request(1, priority=1), request(2, priority=0)]
    assert queue.victim(running) is running[1]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(5))
def test_random_histories_equal_a_sorted_list(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    queue = make_request_queue(policy)
    waiting: list[Request] = []
    out: list[Request] = []

    def key(one: Request) -> tuple[int, ...]:
        return (one.priority, one.num) if policy == "priority" else (one.num,)

    for num in range(600):
        choice = rng.random()
        if choice < 0.5 or not waiting:
            one = request(num, priority=rng.randrange(4))
            queue.add(one)
            waiting.append(one)
        elif choice < 0.65:
            one = waiting.pop(rng.randrange(len(waiting)))
            queue.remove(one)
        elif choice < 0.85 or not out:
            out.append(queue.pop())
            waiting.remove(out[-1])
        else:
            # FCFS puts back only what stood before all that wait.
            out.sort(key=key)
            one = out.pop() if policy == "fcfs" else out.pop(rng.randrange(len(out)))
            queue.put_back(one)
            waiting.append(one)
            if policy == "fcfs":
                out.clear()
        waiting.sort(key=key)
        assert len(queue) == len(waiting)
        assert sorted(queue, key=key) == waiting
        if waiting:
            assert queue.peek() is waiting[0]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(5))
def test_the_totals_equal_those_of_a_walk_over_the_queue(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    queue = make_request_queue(policy)
    out: list[Request] = []
    for now_ns in range(1, 600):
        waiting = list(queue)
        choice = rng.random()
        if choice < 0.4 or not waiting:
            one = request(now_ns, priority=rng.randrange(4), num_tokens=rng.randint(1, 9))
            one.times.queued_ns = now_ns
            queue.add(one)
        elif choice < 0.5:
            queue.remove(rng.choice(waiting))
        elif choice < 0.6:
            one = rng.choice(waiting)
            num_new = rng.randint(1, 3)
            one.append_output([1] * num_new)
            queue.totals.grow(num_new)
        elif choice < 0.8 or not out:
            out.append(queue.pop())
        else:
            one = out.pop()
            one.status = RequestStatus.PREEMPTED
            one.times.preemptions.append((now_ns, 0))
            queue.put_back(one)
        waiting, totals = list(queue), queue.totals
        assert totals.num_tokens == sum(one.num_tokens for one in waiting)
        preempted = [one for one in waiting if one.times.preemptions]
        assert totals.num_preempted == len(preempted)
        since = [one.times.preemptions[-1][0] for one in preempted]
        since += [one.times.queued_ns for one in waiting if not one.times.preemptions]
        assert totals.oldest_since_ns == min(since, default=0)


def test_removed_requests_do_not_pile_up_behind_one_that_waits() -> None:
    queue = PriorityRequestQueue()
    queue.add(request(0, priority=-1))
    for num in range(1, 5_000):
        one = request(num)
        queue.add(one)
        queue.remove(one)
    assert len(queue) == 1
    assert len(queue._heap) < 500, "requests that were aborted while they waited are kept"


def test_an_id_that_is_used_again_does_not_bring_back_the_one_before() -> None:
    queue = FCFSRequestQueue()
    first, second, other = request(0), request(1), request(2)
    second.request_id = first.request_id
    for one in (first, other):
        queue.defer(one)
        one.status = RequestStatus.WAITING
        queue.release(one)
    queue.remove(first)
    queue.defer(second)
    queue.release(second)
    assert len(queue) == len(list(queue)) == 2
    assert [queue.pop() for _ in range(2)] == [second, other]
