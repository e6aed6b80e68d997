"""Calls between steps: made at once when nobody steps, else by whoever does."""

import signal
import threading
import time

import pytest

from engine.api.between_steps import BetweenSteps
from engine.errors import IsinglassError
from tests.waiting import PATIENCE_S, wait_until


def test_a_free_engine_is_called_in_the_callers_own_thread() -> None:
    between = BetweenSteps()
    assert between.call(threading.get_ident) == threading.get_ident()
    with pytest.raises(KeyError, match="no such thing"):
        between.call(lambda: {}["no such thing"])


def test_a_call_while_another_thread_steps_is_made_by_that_thread() -> None:
    between = BetweenSteps()
    is_stepping, may_end = threading.Event(), threading.Event()

    def step() -> None:
        with between.generating():
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
    between = BetweenSteps()
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
    between = BetweenSteps()
    with between.generating():
        with pytest.raises(IsinglassError, match="another thread"):
            between.call(lambda: 1)
        with pytest.raises(IsinglassError, match="another thread"), between.generating():
            pass
        other = threading.Thread(target=lambda: results.append(between.call(threading.get_ident)))
        results: list[int] = []
        other.start()
        while not results:
            between.run_pending()  # it still knows who generates
            time.sleep(0.001)
        other.join()
    assert results == [threading.get_ident()]
    assert between.call(lambda: 1) == 1


def test_nor_can_the_thread_that_is_in_a_call() -> None:
    between = BetweenSteps()

    def handle() -> None:
        for use in (lambda: between.call(int), lambda: between.generating().__enter__()):
            with pytest.raises(IsinglassError, match="another thread"):
                use()

    between.call(handle)
    with between.generating():
        pass


def test_a_call_that_was_interrupted_is_not_made_later() -> None:
    between = BetweenSteps()
    is_held, may_go_on, made = threading.Event(), threading.Event(), []

    def hold() -> None:
        with between.generating():
            is_held.set()
            assert may_go_on.wait(PATIENCE_S)
            between.run_pending()

    def interrupt() -> None:
        while not between._pending:
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)  # the main thread handles it

    holder, interrupter = threading.Thread(target=hold), threading.Thread(target=interrupt)
    holder.start()
    assert is_held.wait(PATIENCE_S)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        between.call(lambda: made.append(1))
    interrupter.join()
    may_go_on.set()
    holder.join()
    assert not made
    assert between.call(lambda: 7) == 7
    assert not made


def test_an_interrupt_ends_the_thread_that_it_meets_and_no_other() -> None:
    between = BetweenSteps()
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
        wait_until(lambda: between._pending)
        with pytest.raises(KeyboardInterrupt):
            between.run_pending()
    thread.join()
    assert isinstance(caught[0], IsinglassError)
