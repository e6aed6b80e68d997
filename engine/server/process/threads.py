"""The threads beside the event loop, and the end of a process in spite of them.

None of them can be made to stop: a template or a text that a client sent may keep one busy for
hours. Knows threads; knows no server.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from engine.log import get_logger

logger = get_logger(__name__)

_END_S = 1.0
"""How long threads get to end."""


class _Workers(ThreadPoolExecutor):
    """The loop's threads, whose end nobody waits for: one of them may compute for ever."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def event_loop() -> "asyncio.Runner":
    """An event loop of uvloop's making."""
    import uvloop

    def make_loop() -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        loop.set_default_executor(_Workers(thread_name_prefix="worker"))
        return loop

    return asyncio.Runner(loop_factory=make_loop)


def leave(code: int, *, others: Iterable[threading.Thread] = ()) -> int:
    """The exit code, for whoever ends the process next; ends it here where it would not end.

    The interpreter joins all threads.

    Args:
        others: threads that are not the server's; that they run on is no reason to end the process.
    """
    deadline = time.monotonic() + _END_S
    for thread in {*threading.enumerate()} - {threading.current_thread(), *others}:
        if not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("thread %s does not end; the process does", thread.name)
                logging.shutdown()
                os._exit(code)
    return code
