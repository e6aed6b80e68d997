"""Ctrl-C is held back while a message is handled, and never lost."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from engine.transport.async_mp_client import AsyncMPClient
from engine.transport.interrupts import deferred_interrupts
from engine.transport.mp_client import SyncMPClient


@pytest.fixture(autouse=True)
def _interrupts_raise() -> Iterator[None]:
    """Also where a shell has started us in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_when_the_block_is_done() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012 - the block is the test
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass  # bytecodes at which the handler would have run
        reached.append("end")
    assert reached == ["end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nested_blocks_hold_it_back_to_the_outermost_end() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012 - the block is the test
        with deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        reached.append("inner done")
    assert reached == ["inner done"]


def test_a_handler_of_the_users_own_is_called_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        handler = signal.getsignal(signal.SIGINT)
        with deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            assert not seen
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_left_alone() -> None:
    done = []

    def work() -> None:
        with deferred_interrupts():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_a_client_on_an_event_loop_leaves_signals_alone() -> None:
    """Two changes of the handler for each message would cost more than sending it."""
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler)
    with SyncMPClient.uninterrupted():
        assert signal.getsignal(signal.SIGINT) is not handler
    with AsyncMPClient.uninterrupted():
        assert signal.getsignal(signal.SIGINT) is handler
