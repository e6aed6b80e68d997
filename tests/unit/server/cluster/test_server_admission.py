"""How much may wait for the engine: what is counted, who is refused, and what they are told."""

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import PromptError, QueueFullError
from engine.frontend.queue_counter import QueueCounter
from engine.server.cluster.admission import Admission
from engine.server.cluster.queue_board import QueueBoard
from engine.server.config import ServerConfig
from engine.server.http.errors import as_api_error
from instrumentation import AdmissionStop, PrefixMiss, StepRecord
from instrumentation.record.step_records import Admission as Admitted

SECOND = 10**9
STEPS = itertools.count(1)


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1

    def __call__(self) -> int:
        return self.now_ns


def make_admission(
    *,
    max_num_seqs: int = 0,
    budget: int = 0,
    directory: Path | None = None,
    index: int = 1,
    **limits: Any,
) -> tuple[Admission, QueueCounter, Clock]:
    """One frontend's; of two, if there is a directory. No place is free unless it is said so."""
    clock = Clock()
    queue = QueueCounter(clock=clock)
    attachment = (
        None if directory is None else SimpleNamespace(directory=str(directory), client_index=index)
    )
    engine: Any = SimpleNamespace(
        attachment=attachment,
        config=SimpleNamespace(scheduler=SimpleNamespace(max_num_seqs=max_num_seqs)),
        llm_engine=SimpleNamespace(
            queue=queue,
            ready=SimpleNamespace(max_num_batched_tokens=budget),
        ),
    )
    count = {} if directory is None else {"api_server_count": 2}
    return Admission(engine, ServerConfig.from_kwargs(**limits, **count)), queue, clock


def step(num_running: int, stop: AdmissionStop = AdmissionStop.NONE, **fields: Any) -> StepRecord:
    """A step as far as the counter reads it."""
    return StepRecord(
        step=next(STEPS),
        begin_ns=1,
        end_ns=2,
        num_running=num_running,
        admission_stop=stop,
        **fields,
    )


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
    for number in range(11):
        queue.add(number, 100)
    for number in range(10):  # one a second
        clock.now_ns += SECOND
        queue.remove([number])
    assert queue.seconds_until_gone(num_requests=3) == pytest.approx(3)
    assert queue.seconds_until_gone(num_tokens=500) == pytest.approx(5)
    clock.now_ns += 10 * SECOND  # nothing leaves: it takes longer than it looked
    assert queue.seconds_until_gone(num_requests=3) == pytest.approx(6)
    clock.now_ns += 60 * SECOND
    assert queue.seconds_until_gone(num_requests=3) >= 3 * 60


def test_time_in_which_nothing_waits_does_not_count() -> None:
    """Ten a second leave; the engine is idle for an hour before, between and after."""
    clock = Clock()
    queue = QueueCounter(clock=clock)
    for burst in range(4):
        clock.now_ns += 3600 * SECOND
        for number in range(10):
            queue.add(100 * burst + number, 100)
        for number in range(10):
            clock.now_ns += SECOND // 10
            queue.remove([100 * burst + number])
    clock.now_ns += 3600 * SECOND
    assert queue.seconds_until_gone(num_requests=20) == pytest.approx(2)
    assert queue.seconds_until_gone(num_tokens=1000) == pytest.approx(1)


def test_where_nothing_has_left_the_time_grows_from_nothing() -> None:
    clock = Clock()
    clock.now_ns = 3600 * SECOND
    queue = QueueCounter(clock=clock)
    queue.add(1, 50)
    queue.add(2, 7)
    assert queue.seconds_until_gone(num_requests=4) == 0
    clock.now_ns += 3 * SECOND
    assert queue.seconds_until_gone(num_requests=4) == pytest.approx(12)
    assert queue.seconds_until_gone(num_tokens=100) == pytest.approx(6)  # the next one's are 50


def test_what_is_free_is_what_the_last_step_has_left() -> None:
    queue = QueueCounter()
    assert (queue.num_free_places(8), queue.num_free_tokens(100)) == (8, 100)
    queue.add(1, 10)
    queue.add(2, 10)
    admitted = PrefixMiss.NEVER_CACHED
    queue.observe_step(
        step(
            3,
            AdmissionStop.TOKEN_BUDGET,
            token_budget_left=7,
            admissions=(Admitted(1, 10, 0, False, admitted), Admitted(9, 5, 0, False, admitted)),
        )
    )
    assert queue.num_requests == 1
    assert (queue.num_free_places(8), queue.num_free_tokens(100)) == (5, 7)
    assert queue.num_free_places(2) == 0
    queue.observe_step(step(3, finished=(1,)))
    assert queue.num_free_places(8) == 6
    for stop in (AdmissionStop.KV_BLOCKS, AdmissionStop.AFTER_PREEMPTION):
        queue.observe_step(step(3, stop, token_budget_left=7))
        assert (queue.num_free_places(8), queue.num_free_tokens(100)) == (0, 0)
        queue.observe_idle()
        assert (queue.num_free_places(8), queue.num_free_tokens(100)) == (8, 100)


# -- the decision ----------------------------------------------------------------------------------


def test_without_limits_everything_is_let_in() -> None:
    admission, queue, _ = make_admission()
    queue.add(1, 10**9)
    with admission.reserve(10**6) as room:
        room.add_tokens(10**12)


def test_requests_are_let_in_up_to_the_limit_and_all_or_nothing() -> None:
    admission, queue, _ = make_admission(max_num_queued_reqs=4)
    for number in range(2):
        queue.add(number, 10)
    full = pytest.raises(QueueFullError, match=r"4 requests wait.* 1 it would be 5.* 4 may")
    with admission.reserve(2), full:
        admission.reserve(1).__enter__()
    with admission.reserve(1), admission.reserve(1):
        pass
    with pytest.raises(QueueFullError):
        admission.reserve(3).__enter__()
    assert (admission.num_reserved, queue.num_requests) == (0, 2)
    queue.remove([0])
    with admission.reserve(3):
        pass


def test_tokens_are_let_in_up_to_the_limit() -> None:
    admission, queue, _ = make_admission(max_num_queued_tokens=1000)
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
    admission, _, _ = make_admission(**{limit: 3})
    with pytest.raises(PromptError, match="alone has 4") as caught, admission.reserve(4) as room:
        room.add_tokens(4)
    assert as_api_error(caught.value).status == 400


def test_a_burst_that_fits_into_the_free_places_waits_for_nobody() -> None:
    admission, queue, _ = make_admission(max_num_seqs=8, budget=100, max_num_queued_reqs=2)
    for number in range(10):  # one by one, before any step has begun
        with admission.reserve(1):
            queue.add(number, 10)
    with pytest.raises(QueueFullError, match=r"2 requests wait.* 1 it would be 3.* 2 may"):
        admission.reserve(1).__enter__()
    queue.remove(range(3))
    queue.observe_step(step(3))
    assert admission.num_reserved == 0
    with pytest.raises(QueueFullError):  # three run, seven wait, five of them for a moment
        admission.reserve(1).__enter__()
    queue.remove(range(3, 8))
    queue.observe_step(step(8, AdmissionStop.MAX_NUM_SEQS))
    with pytest.raises(QueueFullError, match="2 requests wait"):
        admission.reserve(1).__enter__()
    queue.observe_step(step(4, AdmissionStop.KV_BLOCKS))  # four places, and no blocks for them
    with pytest.raises(QueueFullError, match="2 requests wait"):
        admission.reserve(1).__enter__()
    queue.observe_step(step(4))
    with admission.reserve(4):
        pass
    with pytest.raises(PromptError, match="an idle engine takes 8 in at once"):
        admission.reserve(11).__enter__()


def test_prompt_tokens_wait_beyond_what_the_next_step_has_room_for() -> None:
    admission, queue, _ = make_admission(max_num_seqs=8, budget=100, max_num_queued_tokens=50)
    with admission.reserve(1) as room:
        room.add_tokens(150)
        with pytest.raises(QueueFullError, match=r"50 prompt tokens wait.* 1 it would be 51"):
            room.add_tokens(1)
    with pytest.raises(PromptError, match="alone has 151"), admission.reserve(1) as room:
        room.add_tokens(151)
    queue.observe_step(step(1, token_budget_left=20))
    with admission.reserve(1) as room:
        room.add_tokens(70)
    queue.observe_step(step(8, token_budget_left=20))  # no place for anybody
    with admission.reserve(1) as room, pytest.raises(QueueFullError):
        room.add_tokens(51)


# -- several frontends -----------------------------------------------------------------------------


def test_limits_hold_for_all_frontends_together(tmp_path: Path) -> None:
    made = [
        make_admission(
            max_num_seqs=2,
            budget=10,
            directory=tmp_path,
            index=index,
            max_num_queued_reqs=4,
            max_num_queued_tokens=90,
        )
        for index in (1, 2)
    ]
    (one, queue_one, _), (two, queue_two, _) = made
    with one.reserve(3) as room:
        room.add_tokens(30)
        with two.reserve(3) as other:
            other.add_tokens(70)
            for admission in (one, two):
                with pytest.raises(QueueFullError, match=r"4 requests wait.* 1 it would be 5"):
                    admission.reserve(1).__enter__()
            for number in range(3):  # sent: they count as before
                queue_two.add(number, 20)
                other.hand_over(1, 20)
            with pytest.raises(QueueFullError, match="90 prompt tokens wait"):
                room.add_tokens(1)
        with pytest.raises(QueueFullError):
            one.reserve(1).__enter__()
        queue_two.remove([0, 1])
        with one.reserve(2):
            pass
    assert (one.num_reserved, two.num_reserved) == (0, 0)
    assert queue_one.num_requests == 0


def test_what_a_step_admits_counts_though_only_another_frontend_has_heard_of_it(
    tmp_path: Path,
) -> None:
    settings = {"max_num_seqs": 4, "budget": 100, "directory": tmp_path}
    limits = {"max_num_queued_reqs": 4, "max_num_queued_tokens": 50}
    one, queue_one, _ = make_admission(**settings, **limits)
    two, queue_two, _ = make_admission(**settings, **limits, index=2)
    for admission in (one, two):
        admission.check_requests(1)  # both look
    for number in range(8):
        queue_one.add(number, 10)

    def refuses(admission: Admission) -> bool:
        try:
            admission.check_requests(1)
        except QueueFullError:
            return True
        return False

    assert refuses(two)
    admitted = [Admitted(number, 10, 0, False, PrefixMiss.NONE) for number in range(4)]
    done = step(4, AdmissionStop.MAX_NUM_SEQS, token_budget_left=60, admissions=admitted)
    queue_one.observe_step(done)
    assert QueueBoard(str(tmp_path), 2).others(2) == (4, 40)
    assert refuses(two)
    with pytest.raises(QueueFullError):
        two.check_tokens(11)
    # It hears of an earlier step only now, and then of this one.
    queue_two.observe_step(StepRecord(step=done.step - 1, begin_ns=1, end_ns=2))
    queue_two.observe_idle()
    assert refuses(two)
    queue_two.observe_step(done)
    assert refuses(two)
    queue_two.observe_idle()  # and two hears first that all have ended
    queue_one.remove(range(4, 8))
    assert not refuses(one)
    with one.reserve(8):
        assert refuses(two)


def test_the_answer_counts_on_what_leaves_at_all_frontends(tmp_path: Path) -> None:
    """Each sees ten a second leave; thirty of forty have to, of which it has half."""
    one, queue, clock = make_admission(directory=tmp_path, max_num_queued_reqs=10)
    two, other, _ = make_admission(directory=tmp_path, index=2, max_num_queued_reqs=10)
    for admission in (one, two):
        admission._look()  # which has it shown
    for number in range(30):
        queue.add(number, 1)
    for number in range(20):
        other.add(number, 1)
    for number in range(10):
        clock.now_ns += SECOND // 10
        queue.remove([number])
    with pytest.raises(QueueFullError) as caught:
        one.reserve(10).__enter__()
    assert caught.value.retry_after_s == 2  # 40 too many, 20 of them its own


def test_a_block_that_fails_gives_its_room_back() -> None:
    admission, _, _ = make_admission(max_num_queued_reqs=4, max_num_queued_tokens=10)

    def fail() -> None:
        with admission.reserve(4) as room:
            room.add_tokens(10)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (admission.num_reserved, admission.num_reserved_tokens) == (0, 0)


@pytest.mark.parametrize(("per_s", "expected"), [(None, 1), (0.01, 60), (0.5, 4), (1000, 1)])
def test_the_answer_says_when_to_come_back(per_s: float | None, expected: int) -> None:
    admission, queue, clock = make_admission(max_num_queued_reqs=10)
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
        assert queue.num_requests == 20  # nothing has left, nor has had the time to
    assert answer.headers["Retry-After"] == str(caught.value.retry_after_s)
    assert caught.value.retry_after_s == expected
