"""Where texts are processed for an event loop: what is long, and that nobody waits for it."""

import asyncio
import threading
from typing import Any

import pytest

from engine.api.text_threads import TextThreads, is_long
from engine.text.tokenizer import LONG_TEXT
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([], False),
        (["a" * LONG_TEXT], False),
        (["a" * (LONG_TEXT + 1)], True),
        (["a" * (LONG_TEXT // 2), "b" * (LONG_TEXT // 2 + 1)], True),
        ([{"prompt": "a" * (LONG_TEXT + 1)}], True),
        ([{"prompt": "a" * (LONG_TEXT + 1), "prompt_token_ids": [1, 2]}], False),
        ([{"prompt": "a" * (LONG_TEXT + 1), "add_special_tokens": False}], True),
        ([[1] * LONG_TEXT], False),
        ([[1] * (4 * LONG_TEXT + 4)], True),
        ([{"prompt_token_ids": [1] * (4 * LONG_TEXT + 4)}], True),
        ([5, None, {}], False),
    ],
)
def test_long_is_what_takes_an_event_loop_too_long(prompts: list[Any], expected: bool) -> None:
    assert is_long(*prompts) is expected


def test_the_loop_goes_on_and_gets_what_came_of_it() -> None:
    async def run() -> None:
        threads = TextThreads()
        gate, names = threading.Event(), []

        def slow() -> int:
            names.append(threading.current_thread().name)
            assert gate.wait(PATIENCE_S)
            return 7

        def wrong() -> None:
            raise ValueError("the text is wrong")

        calls = [asyncio.create_task(threads.call(slow)) for _ in range(3)]
        with pytest.raises(ValueError, match="the text is wrong"):  # meanwhile, in another thread
            await asyncio.wait_for(threads.call(wrong), PATIENCE_S)
        assert not any(call.done() for call in calls)
        gate.set()
        assert await asyncio.gather(*calls) == [7, 7, 7]
        assert {name.rpartition("_")[0] for name in names} == {"tokenizer"}
        threads.close()

    asyncio.run(run())


def test_an_end_waits_for_nobody_and_loses_nothing() -> None:
    async def run() -> None:
        threads, gate = TextThreads(), threading.Event()
        call = asyncio.create_task(threads.call(lambda: gate.wait(PATIENCE_S)))
        await asyncio.sleep(0)
        threads.close()
        assert not call.done()
        with pytest.raises(RuntimeError):
            await threads.call(int)
        gate.set()
        assert await call is True

    asyncio.run(run())
