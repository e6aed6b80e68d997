"""Where texts are processed for an event loop: short ones at once, long ones beside it.

Knows what is as long as a long text. Does not know what is done with a text.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.frontend.input_processor import Prompt
from engine.text.tokenizer import LONG_TEXT

_NUM_THREADS = 4
_IDS_PER_CHARACTER = 4
"""Token ids that are checked in the time that one character of text takes."""

Result = TypeVar("Result")


class TextThreads:
    """A few threads, which serve nothing else: one huge text must not hold all others up."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    async def call(self, function: Callable[[], Result]) -> Result:
        """Call a function there, and return what it returns; the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def close(self) -> None:
        """Take no more; what has been asked for is still done."""
        self._executor.shutdown(wait=False)


def is_long(*prompts: Prompt) -> bool:
    """Whether it takes so long to tokenize or check these that an event loop should not wait."""
    return sum(map(_length, prompts)) > LONG_TEXT


def _length(prompt: Prompt) -> int:
    """Characters to tokenize, or what checking token ids amounts to."""
    if isinstance(prompt, Mapping):
        ids = prompt.get("prompt_token_ids")
        prompt = prompt.get("prompt", "") if ids is None else ids
    if isinstance(prompt, str):
        return len(prompt)
    return len(prompt) // _IDS_PER_CHARACTER if isinstance(prompt, Sequence) else 0
