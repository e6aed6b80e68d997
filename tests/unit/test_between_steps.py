"""Calls between steps: made at once when nobody steps, else by whoever does."""

import threading
import time

import pytest

from engine.api.between_steps import BetweenSteps
from engine.errors import IsinglassError


def test_a_free_engine_is_called_in_the_callers_own_thread() -> None:
    between = BetweenSteps(threading.RLock())
    assert between.call(threading.get_ident) == threading.get_ident()
    with pytest.raises(KeyError, match="no such thing"):
        between.call(lambda: {}["no such thing"])


def test_a_call_while_another_thread_steps_is_made_by_that_thread() -> None:
    lock = threading.RLock()
    between = BetweenSteps(lock)
    is_stepping, may_end = threading.Event(), threading.Event()

    def step() -> None:
        with lock:
            is_stepping.set()
            while not may_end.is_set():
                between.run_pending()
                time.sleep(0.001)

    stepper = threading.Thread(target=step)
    stepper.start()
    is_stepping.wait()
    try:
        assert {between.call(threading.get_ident) for _ in range(5)} == {stepper.ident}
        with pytest.raises(ZeroDivisionError):
            between.call(lambda: 1 // 0)
        assert stepper.is_alive(), "an error is for the one who asked"
    finally:
        may_end.set()
        stepper.join()


def test_calls_of_many_threads_are_made_one_at_a_time() -> None:
    between = BetweenSteps(threading.RLock())
    num_inside, results = 0, []

    def work(number: int) -> int:
        nonlocal num_inside
        num_inside += 1
        time.sleep(0.001)
        assert num_inside == 1
        num_inside -= 1
        return number

    threads = [
        threading.Thread(target=lambda n=n: results.append(between.call(lambda: work(n))))
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(20))


def test_the_thread_that_generates_cannot_call_from_a_signal_handler() -> None:
    between = BetweenSteps(threading.RLock())
    with between.generating(), pytest.raises(IsinglassError, match="another thread"):
        between.call(lambda: 1)
    assert between.call(lambda: 1) == 1


def test_an_interrupt_ends_the_thread_that_it_meets_and_no_other() -> None:
    between = BetweenSteps(threading.RLock())
    caught: list[BaseException] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    def ask() -> None:
        try:
            between.call(interrupted)
        except BaseException as error:
            caught.append(error)

    with between.generating():
        thread = threading.Thread(target=ask)
        thread.start()
        deadline = time.monotonic() + 10
        while not between._pending and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(KeyboardInterrupt):
            between.run_pending()
    thread.join()
    assert isinstance(caught[0], IsinglassError)
