"""The order in which waiting requests are admitted, and who yields when blocks run out.

Every operation is O(1) or O(log n): nothing per step depends on the queue's length.
"""

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from engine.core.request import Request
from engine.core.waiting_totals import WaitingTotals


class RequestQueue(ABC):
    """Waiting requests in the order of one policy, and what they amount to."""

    def __init__(self) -> None:
        self.totals = WaitingTotals()

    def add(self, request: Request) -> None:
        """Queue a request that has just arrived."""
        self._add(request)
        self.totals.enter(request)

    def put_back(self, request: Request) -> None:
        """Queue a preempted request, before the ones that never ran."""
        self._put_back(request)
        self.totals.enter(request)

    def pop(self) -> Request:
        """Take out the request to admit next."""
        request = self._pop()
        self.totals.leave(request)
        return request

    def remove(self, request: Request) -> None:
        """Take out a request wherever it stands."""
        self._remove(request)
        self.totals.leave(request)

    @abstractmethod
    def peek(self) -> Request:
        """The request to admit next."""

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

    @abstractmethod
    def _add(self, request: Request) -> None: ...

    @abstractmethod
    def _put_back(self, request: Request) -> None: ...

    @abstractmethod
    def _pop(self) -> Request: ...

    @abstractmethod
    def _remove(self, request: Request) -> None: ...


class FCFSRequestQueue(RequestQueue):
    """First come, first served; the last one admitted yields first."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def in_order(self, running: list[Request]) -> list[Request]:
        return list(running)  # in the order of admission

    def victim(self, running: list[Request]) -> Request:
        return running[-1]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def _add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def _put_back(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def _pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def _remove(self, request: Request) -> None:
        del self._requests[request.request_id]


class PriorityRequestQueue(RequestQueue):
    """Lowest (priority, arrival) first; the highest one running yields first."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, int, int, Request]] = []
        self._waiting: set[int] = set()

    def peek(self) -> Request:
        self._drop_removed()
        return self._heap[0][-1]

    def in_order(self, running: list[Request]) -> list[Request]:
        return sorted(running, key=self._key)

    def victim(self, running: list[Request]) -> Request:
        return max(running, key=self._key)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in self._heap if entry[-1].num in self._waiting)

    def _add(self, request: Request) -> None:
        heapq.heappush(self._heap, (*self._key(request), request))
        self._waiting.add(request.num)

    _put_back = _add

    def _pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        self._waiting.remove(request.num)
        return request

    def _remove(self, request: Request) -> None:
        # The heap entry stays behind and is skipped when it reaches the top, or goes when such
        # entries are the most: constant cost per removal, on average.
        self._waiting.remove(request.num)
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if entry[-1].num in self._waiting]
            heapq.heapify(self._heap)

    def _drop_removed(self) -> None:
        while self._heap[0][-1].num not in self._waiting:
            heapq.heappop(self._heap)

    @staticmethod
    def _key(request: Request) -> tuple[int, int, int]:
        return request.priority, request.arrival_ns, request.num


def make_request_queue(policy: str) -> RequestQueue:
    """The queue for a `scheduling_policy`."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
