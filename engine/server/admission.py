"""Whether there is room for a request to wait: `--max-num-queued-reqs`, `--max-num-queued-tokens`.

What waits is what this frontend has sent to the core and no step has admitted yet, and what routes
have been promised room for. Knows no HTTP: what is refused is an error of the engine's tree.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from engine.api.async_llm import AsyncLLM
from engine.errors import PromptError, QueueFullError
from engine.server.config import ServerConfig

_LEAST_RETRY_S = 1
_MOST_RETRY_S = 60


class _Limit(NamedTuple):
    """One of the two settings."""

    flag: str
    noun: str
    measure: str
    """The counter's argument that it limits."""
    most: int


class Reservation:
    """Room in the queue for one HTTP request's sequences, until they are in it."""

    __slots__ = ("_admission", "_arrived", "num_requests", "num_tokens")

    def __init__(
        self, admission: "Admission", num_requests: int, arrived: Mapping[str, Any]
    ) -> None:
        self._admission = admission
        self._arrived = arrived
        self.num_requests = num_requests
        self.num_tokens = 0

    def add_tokens(self, num_tokens: int) -> None:
        """Ask for room for the prompts' tokens too, once their number is known.

        Args:
            num_tokens: of all prompts together, each as often as it has samples.

        Raises:
            QueueFullError: there is no room now.
            PromptError: there never would be.
        """
        self._admission.check_tokens(num_tokens, self._arrived)
        self.num_tokens += num_tokens
        self._admission.num_reserved_tokens += num_tokens

    def hand_over(self, num_requests: int, num_tokens: int) -> None:
        """Give back the room of so many that have been sent: the queue counts them now."""
        self.num_requests -= num_requests
        self.num_tokens -= num_tokens
        self._admission.num_reserved -= num_requests
        self._admission.num_reserved_tokens -= num_tokens


class Admission:
    """Decides for one frontend; all or nothing for the sequences of one HTTP request.

    with state.admission.reserve(num_prompts * n) as room:
        prompts = [tokenise(…), …]
        room.add_tokens(n * sum(len(prompt.token_ids) for prompt in prompts))
        for prompt in prompts:
            streams.append(await engine.submit(prompt, …))
            room.hand_over(n, n * len(prompt.token_ids))
    """

    def __init__(self, engine: AsyncLLM, config: ServerConfig) -> None:
        self._engine = engine
        self._max_requests = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens
        self.num_reserved = 0
        self.num_reserved_tokens = 0

    @contextmanager
    def reserve(self, num_requests: int, **arrived: Any) -> Iterator[Reservation]:
        """Keep room for so many sequences while the block prepares and sends them.

        Args:
            num_requests: prompts, each as often as it has samples.
            **arrived: who asks, for metrics and traces: see `LLMEngine.counting_rejections`.

        Raises:
            QueueFullError: there is no room now.
            PromptError: there never would be.
        """
        self.check_requests(num_requests, arrived)
        room = Reservation(self, num_requests, arrived)
        self.num_reserved += num_requests
        try:
            yield room
        finally:
            self.num_reserved -= room.num_requests
            self.num_reserved_tokens -= room.num_tokens

    def check_requests(self, num_requests: int, arrived: Mapping[str, Any]) -> None:
        """Refuse where so many more sequences would be too many."""
        if self._max_requests is not None:
            waiting = self._engine.llm_engine.queue.num_requests + self.num_reserved
            limit = _Limit("--max-num-queued-reqs", "requests", "num_requests", self._max_requests)
            self._check(limit, waiting, num_requests, arrived)

    def check_tokens(self, num_tokens: int, arrived: Mapping[str, Any]) -> None:
        """Refuse where so many more prompt tokens would be too many."""
        if self._max_tokens is not None:
            waiting = self._engine.llm_engine.queue.num_tokens + self.num_reserved_tokens
            limit = _Limit(
                "--max-num-queued-tokens", "prompt tokens", "num_tokens", self._max_tokens
            )
            self._check(limit, waiting, num_tokens, arrived)

    def _check(self, limit: _Limit, waiting: int, more: int, arrived: Mapping[str, Any]) -> None:
        """Refuse `more` where `waiting` and they are more than may wait."""
        excess = waiting + more - limit.most
        if excess <= 0:
            return
        engine = self._engine.llm_engine
        with engine.counting_rejections(**arrived):
            if more > limit.most:
                raise PromptError(
                    f"the request alone has {more} {limit.noun}, and at most {limit.most} may wait "
                    f"({limit.flag}): split it."
                )
            wait_s = engine.queue.seconds_until_gone(**{limit.measure: excess})
            retry_after_s = _MOST_RETRY_S if wait_s is None else math.ceil(wait_s)
            retry_after_s = min(max(retry_after_s, _LEAST_RETRY_S), _MOST_RETRY_S)
            raise QueueFullError(
                f"the queue is full: {waiting} {limit.noun} wait, with this request's {more} it "
                f"would be {waiting + more}, and at most {limit.most} may ({limit.flag}); try "
                f"again in {retry_after_s} s.",
                retry_after_s=retry_after_s,
            )
