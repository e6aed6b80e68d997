"""Whether there is room for a request to wait: `--max-num-queued-reqs`, `--max-num-queued-tokens`.

What waits is what has been sent to the core and no step has admitted yet, and what routes have been
promised room for, less what the engine can take in at its next step: a burst that fits into its
free places waits for nobody. Of several frontends, all count. Knows no HTTP: what is refused is an
error of the engine's tree.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from engine.api.async_llm import AsyncLLM
from engine.errors import PromptError, QueueFullError
from engine.frontend.queue_counter import QueueCounter
from engine.server.cluster.queue_board import QueueBoard
from engine.server.config import ServerConfig

_LEAST_RETRY_S = 1
_MOST_RETRY_S = 60


class _Limit(NamedTuple):
    """One of the two settings, and how things stand.

    A request is refused where `waiting` and its own, less `free`, are more than `most`: what the
    next step takes in waits for nobody.
    """

    flag: str
    noun: str
    measure: str
    """What is counted, as an argument of `QueueCounter.seconds_until_gone`."""
    most: int
    """So many may wait."""
    waiting: int
    """So many are before this request, at all frontends."""
    own: int
    """So many of them are this frontend's."""
    free: int
    """So many the engine takes in at its next step."""
    most_free: int
    """So many an idle engine would take in at its next step."""


class Reservation:
    """Room in the queue for one HTTP request's sequences, until they are in it."""

    __slots__ = ("_admission", "num_requests", "num_tokens")

    def __init__(self, admission: "Admission", num_requests: int) -> None:
        self._admission = admission
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
        self._admission.check_tokens(num_tokens)
        self.num_tokens += num_tokens
        self._admission.keep(num_tokens=num_tokens)

    def hand_over(self, num_requests: int, num_tokens: int) -> None:
        """Give back the room of so many that have been sent: the queue counts them now."""
        self.num_requests -= num_requests
        self.num_tokens -= num_tokens
        self._admission.keep(-num_requests, num_tokens=-num_tokens)


class Admission:
    """Decides on requests; all or nothing for the sequences of one HTTP request.

    with state.admission.reserve(num_prompts * n) as room:
        prompts = [tokenise(…), …]
        room.add_tokens(n * sum(len(prompt.token_ids) for prompt in prompts))
        for prompt in prompts:
            streams.append(await engine.submit(prompt, …))
            room.hand_over(n, n * len(prompt.token_ids))

    Attributes:
        num_reserved: sequences that have been promised room, and are not yet sent.
        num_reserved_tokens: tokens of their prompts, as far as they are known.
    """

    def __init__(self, engine: AsyncLLM, config: ServerConfig) -> None:
        self._engine = engine
        self._max_requests = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens
        self.num_reserved = 0
        self.num_reserved_tokens = 0
        attachment = engine.attachment
        self._index = 0 if attachment is None else attachment.client_index
        self._num_frontends = 1 if attachment is None else config.api_server_count
        self._board: QueueBoard | None = None
        if attachment is not None and config.limits_queue:
            self._board = QueueBoard(attachment.directory, self._num_frontends)
            self._row = self._board.row(self._index)

    @contextmanager
    def reserve(self, num_requests: int, *, param: str | None = None) -> Iterator[Reservation]:
        """Keep room for so many sequences while the block prepares and sends them.

        Args:
            num_requests: prompts, each as often as it has samples.
            param: the field that alone makes them so many, where one does.

        Raises:
            QueueFullError: there is no room now.
            PromptError: there never would be.
        """
        self.check_requests(num_requests, param=param)
        room = Reservation(self, num_requests)
        self.keep(num_requests)
        try:
            yield room
        finally:
            self.keep(-room.num_requests, num_tokens=-room.num_tokens)

    def keep(self, num_requests: int = 0, *, num_tokens: int = 0) -> None:
        """So much more, or less, has been promised room."""
        self.num_reserved += num_requests
        self.num_reserved_tokens += num_tokens
        if self._board is not None:
            self._row[2], self._row[3] = self.num_reserved, self.num_reserved_tokens

    def check_requests(self, num_requests: int, *, param: str | None = None) -> None:
        """Refuse where so many more sequences would be too many."""
        if self._max_requests is not None:
            queue, (elsewhere, _) = self._look()
            limit = _Limit(
                "--max-num-queued-reqs",
                "requests",
                "num_requests",
                self._max_requests,
                waiting=queue.num_requests + self.num_reserved + elsewhere,
                own=queue.num_requests + self.num_reserved,
                free=queue.num_free_places(self._max_num_seqs),
                most_free=self._max_num_seqs,
            )
            self._check(limit, num_requests, param=param)

    def check_tokens(self, num_tokens: int) -> None:
        """Refuse where so many more prompt tokens would be too many."""
        if self._max_tokens is not None:
            queue, (_, elsewhere) = self._look()
            budget = self._engine.llm_engine.ready.max_num_batched_tokens
            has_place = queue.num_free_places(self._max_num_seqs) > 0
            limit = _Limit(
                "--max-num-queued-tokens",
                "prompt tokens",
                "num_tokens",
                self._max_tokens,
                waiting=queue.num_tokens + self.num_reserved_tokens + elsewhere,
                own=queue.num_tokens + self.num_reserved_tokens,
                free=queue.num_free_tokens(budget) if has_place else 0,
                most_free=budget,
            )
            self._check(limit, num_tokens)

    def _look(self) -> tuple[QueueCounter, tuple[int, int]]:
        """What waits here, and sequences and tokens that wait at other frontends."""
        queue = self._engine.llm_engine.queue
        if self._board is None:
            return queue, (0, 0)
        if queue.shown is None:
            queue.shown = self._row
        # What a step that we have not heard of yet admits may leave another's row meanwhile: look
        # at what runs since afterwards, lest it counts nowhere.
        elsewhere = self._board.others(self._index)
        queue.learn(*self._board.newest())
        return queue, elsewhere

    @property
    def _max_num_seqs(self) -> int:
        return self._engine.config.scheduler.max_num_seqs

    def _check(self, limit: _Limit, more: int, *, param: str | None = None) -> None:
        """Refuse `more` where with those before them more would wait than may."""
        excess = limit.waiting + more - limit.free - limit.most
        if excess <= 0:
            return
        if more > limit.most + limit.most_free:
            cause = "" if param is None else f" ({param}={more})"
            raise PromptError(
                f"the request alone has {more} {limit.noun}{cause}; at most {limit.most} may wait "
                f"({limit.flag}), and an idle engine takes {limit.most_free} in at once: split it.",
                param=param,
            )
        retry_after_s = self._retry_after_s(limit, excess)
        waiting = max(0, limit.waiting - limit.free)
        raise QueueFullError(
            f"the queue is full: {waiting} {limit.noun} wait, with this request's {more} it would "
            f"be {limit.most + excess}, and at most {limit.most} may ({limit.flag}); try again in "
            f"{retry_after_s} s.",
            retry_after_s=retry_after_s,
        )

    def _retry_after_s(self, limit: _Limit, excess: int) -> int:
        """When so much of what waits will have left, within what a client can be told."""
        # The rate is known of what this frontend sends; the engine takes all in turn.
        share = limit.own / limit.waiting if limit.own else 1 / self._num_frontends
        wait_s = self._engine.llm_engine.queue.seconds_until_gone(**{limit.measure: excess * share})
        return min(max(math.ceil(wait_s), _LEAST_RETRY_S), _MOST_RETRY_S)
