"""How long a test waits for what it is not about.

A limit that only keeps a broken test from hanging is `PATIENCE_S`: a machine that is slow, or busy
with other work, stays far below it. Where time is the point of a test, what must not be waited for
takes longer than that, or the limit is a multiple of something measured beside it.
"""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 180.0
SOON_S = 20.0
"""For what takes a moment, and a minute if it waits for a time-out of somebody's."""


def wait_until(condition: Callable[[], object], complaint: str = "it does not happen") -> None:
    """Poll a condition; fail with the complaint when patience is at an end."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{complaint} after {PATIENCE_S:g} s"
        time.sleep(0.02)


async def until(condition: Callable[[], object], complaint: str = "it does not happen") -> None:
    """The same in a coroutine."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{complaint} after {PATIENCE_S:g} s"
        await asyncio.sleep(0.005)
