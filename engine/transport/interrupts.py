"""Ctrl-C at a safe moment: a message must not be sent, received or taken in by halves.

pyzmq sends and receives the frames of a message one by one in Python, so an interrupt between two
of them would leave the socket in the middle of a message, for good.
"""

import contextlib
import signal
import threading
from collections.abc import Collection, Iterator
from typing import Any


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold SIGINT back until the block is done, then handle it as it would have been.

    Only the main thread runs signal handlers, so in any other one this does nothing. The block
    must be short and must not wait. Blocks may be nested.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # ignored, or the system's own: no Python code would interrupt us
        yield
        return
    held: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])


@contextlib.contextmanager
def children_outlive_sigterm() -> Iterator[None]:
    """Processes that this thread starts meanwhile take no SIGTERM.

    Service managers send it to all processes of a service at once, and shells to those of a job; a
    server's core has to go on then until the last answer is complete. It ends with its parent.
    """
    with children_begin_blocking({signal.SIGTERM}):
        yield


@contextlib.contextmanager
def children_begin_blocking(numbers: Collection[int]) -> Iterator[None]:
    """Processes that this thread starts meanwhile begin with these signals blocked.

    The mask lives on in them, and in every thread that begins before they say otherwise. So such
    a signal waits until they are ready for it, however early it comes.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
