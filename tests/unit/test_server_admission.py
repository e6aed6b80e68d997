"""How much may wait for the engine: what is counted, who is refused, and what they are told."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import PromptError, QueueFullError
from engine.frontend.queue_counter import QueueCounter
from engine.server.admission import Admission
from engine.server.config import ServerConfig
from engine.server.errors import as_api_error

SECOND = 10**9


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1

    def __call__(self) -> int:
        return self.now_ns


class Rejections:
    """Stands for the engine's own counter of rejections."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def __call__(self, **arrived: Any) -> Iterator[None]:
        self.arrived = arrived
        try:
            yield
        except Exception as error:
            self.names.append(type(error).__name__)
            raise


def make_admission(**limits: Any) -> tuple[Admission, QueueCounter, Clock, Rejections]:
    clock, rejections = Clock(), Rejections()
    queue = QueueCounter(clock=clock)
    engine: Any = SimpleNamespace(
        llm_engine=SimpleNamespace(queue=queue, counting_rejections=rejections)
    )
    return Admission(engine, ServerConfig.from_kwargs(**limits)), queue, clock, rejections


# -- the counter -----------------------------------------------------------------------------------


def test_the_counter_agrees_with_a_set() -> None:
    """Random histories: requests leave by admission, by ending, twice, or unknown."""
    generator = random.Random(7)
    queue, naive = QueueCounter(), dict[int, int]()
    for number in range(5000):
        if generator.random() < 0.5:
            naive[number] = generator.randint(1, 5000)
            queue.add(number, naive[number])
        leaving = [generator.randint(0, number + 3) for _ in range(generator.randint(0, 4))]
        queue.remove(leaving)
        for one in leaving:
            naive.pop(one, None)
        assert (queue.num_requests, queue.num_tokens) == (len(naive), sum(naive.values()))


def test_the_time_until_there_is_room_follows_the_rate_of_late() -> None:
    clock = Clock()
    queue = QueueCounter(clock=clock)
    assert queue.seconds_until_gone(num_requests=1) is None
    for number in range(11):
        queue.add(number, 100)
    for number in range(10):  # one a second
        clock.now_ns += SECOND
        queue.remove([number])
    assert queue.seconds_until_gone(num_requests=3) == pytest.approx(3 * 9 / 10)
    assert queue.seconds_until_gone(num_tokens=500) == pytest.approx(5 * 9 / 10)
    clock.now_ns += 9 * SECOND  # nothing leaves: it takes longer than it looked
    assert queue.seconds_until_gone(num_requests=3) == pytest.approx(3 * 18 / 10)
    clock.now_ns += 60 * SECOND
    assert queue.seconds_until_gone(num_requests=3) is None


# -- the decision ----------------------------------------------------------------------------------


def test_without_limits_everything_is_let_in() -> None:
    admission, queue, _, rejections = make_admission()
    queue.add(1, 10**9)
    with admission.reserve(10**6) as room:
        room.add_tokens(10**12)
    assert not rejections.names


def test_requests_are_let_in_up_to_the_limit_and_all_or_nothing() -> None:
    admission, queue, _, rejections = make_admission(max_num_queued_reqs=4)
    for number in range(2):
        queue.add(number, 10)
    full = pytest.raises(QueueFullError, match=r"4 requests wait.* 1 it would be 5.* 4 may")
    with admission.reserve(2), full:
        admission.reserve(1).__enter__()
    with admission.reserve(1), admission.reserve(1):
        pass
    with pytest.raises(QueueFullError):
        admission.reserve(3, request_id="who").__enter__()
    assert rejections.arrived == {"request_id": "who"}
    assert (admission.num_reserved, queue.num_requests) == (0, 2)
    assert rejections.names == ["QueueFullError"] * 2
    queue.remove([0])
    with admission.reserve(3):
        pass


def test_tokens_are_let_in_up_to_the_limit() -> None:
    admission, queue, _, _ = make_admission(max_num_queued_tokens=1000)
    queue.add(1, 600)
    with admission.reserve(1) as room:
        room.add_tokens(300)
        with admission.reserve(1) as other:
            other.add_tokens(100)
            assert admission.num_reserved_tokens == 400
        with (
            pytest.raises(QueueFullError, match=r"prompt tokens wait.*--max-num-queued-tokens"),
            admission.reserve(1) as other,
        ):
            other.add_tokens(101)
        assert admission.num_reserved_tokens == 300
    assert admission.num_reserved_tokens == 0


@pytest.mark.parametrize("limit", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_what_never_fits_is_told_not_to_come_back(limit: str) -> None:
    admission, _, _, rejections = make_admission(**{limit: 3})
    with pytest.raises(PromptError, match="alone has 4") as caught, admission.reserve(4) as room:
        room.add_tokens(4)
    assert as_api_error(caught.value).status == 400
    assert rejections.names == ["PromptError"]


def test_a_block_that_fails_gives_its_room_back() -> None:
    admission, _, _, _ = make_admission(max_num_queued_reqs=4, max_num_queued_tokens=10)

    def fail() -> None:
        with admission.reserve(4) as room:
            room.add_tokens(10)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (admission.num_reserved, admission.num_reserved_tokens) == (0, 0)


@pytest.mark.parametrize(("per_s", "expected"), [(None, 60), (0.01, 60), (0.5, 4), (1000, 1)])
def test_the_answer_says_when_to_come_back(per_s: float | None, expected: int) -> None:
    admission, queue, clock, _ = make_admission(max_num_queued_reqs=10)
    for number in range(20):
        queue.add(number, 1)
    if per_s is not None:
        for number in range(10):
            queue.remove([number])
            clock.now_ns += round(SECOND / per_s)
        queue.remove([])
    for number in range(30, 30 + 10 - queue.num_requests):
        queue.add(number, 1)
    with pytest.raises(QueueFullError) as caught:
        admission.reserve(2).__enter__()
    answer = as_api_error(caught.value)
    assert (answer.status, answer.code) == (429, "queue_full")
    if per_s is None:
        assert queue.num_requests == 20  # nothing has left, so that nothing is known
    assert answer.headers["Retry-After"] == str(caught.value.retry_after_s)
    assert caught.value.retry_after_s == expected
