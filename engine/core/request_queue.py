"""The order in which waiting requests are admitted, and who yields when blocks run out.

Every operation is O(1) or O(log n): nothing per step depends on the queue's length.
"""

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from engine.core.request import Request


class RequestQueue(ABC):
    """Waiting requests in the order of one policy."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a request that has just arrived."""

    @abstractmethod
    def put_back(self, request: Request) -> None:
        """Queue a preempted request, before the ones that never ran."""

    @abstractmethod
    def peek(self) -> Request:
        """The request to admit next."""

    @abstractmethod
    def pop(self) -> Request:
        """Take out the request to admit next."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take out a request wherever it stands."""

    @abstractmethod
    def in_order(self, running: list[Request]) -> list[Request]:
        """A copy of the running requests, those first that are served first."""

    @abstractmethod
    def victim(self, running: list[Request]) -> Request:
        """Whom to preempt among the running requests."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no promised order (tests and reports)."""


class FCFSRequestQueue(RequestQueue):
    """First come, first served; the last one admitted yields first."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def in_order(self, running: list[Request]) -> list[Request]:
        return list(running)  # in the order of admission

    def victim(self, running: list[Request]) -> Request:
        return running[-1]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityRequestQueue(RequestQueue):
    """Lowest (priority, arrival) first; the highest one running yields first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Request]] = []
        self._waiting: set[int] = set()

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (*self._key(request), request))
        self._waiting.add(request.num)

    put_back = add

    def peek(self) -> Request:
        self._drop_removed()
        return self._heap[0][-1]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        self._waiting.remove(request.num)
        return request

    def remove(self, request: Request) -> None:
        # The heap entry stays behind and is skipped when it reaches the top, or goes when such
        # entries are the most: constant cost per removal, on average.
        self._waiting.remove(request.num)
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if entry[-1].num in self._waiting]
            heapq.heapify(self._heap)

    def in_order(self, running: list[Request]) -> list[Request]:
        return sorted(running, key=self._key)

    def victim(self, running: list[Request]) -> Request:
        return max(running, key=self._key)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in self._heap if entry[-1].num in self._waiting)

    def _drop_removed(self) -> None:
        while self._heap[0][-1].num not in self._waiting:
            heapq.heappop(self._heap)

    @staticmethod
    def _key(request: Request) -> tuple[int, int, int]:
        return request.priority, request.arrival_ns, request.num


def make_request_queue(policy: str) -> RequestQueue:
    """The queue for a `scheduling_policy`."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
