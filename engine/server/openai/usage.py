"""Counting the tokens of one HTTP request for its `usage`.

Knows outputs of the engine, whole or as deltas. Prompts count once, however many outputs each has.
"""

from typing import Any

from engine.types.outputs import RequestOutput


class Usage:
    """Token counts of all prompts of one HTTP request."""

    __slots__ = ("_seen", "cached_tokens", "completion_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._seen: set[int] = set()

    def add_prompt(self, number: int, output: RequestOutput) -> None:
        """Count a prompt; only its first output counts."""
        if number not in self._seen:
            self._seen.add(number)
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens

    def json(self) -> dict[str, Any]:
        """As the answer has it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
