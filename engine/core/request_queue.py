"""The order in which waiting requests are admitted, and who yields when blocks run out.

Every operation is O(1) or O(log n): nothing per step depends on the queue's length.
"""

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from engine.core.request import Request, RequestStatus
from engine.core.waiting_totals import WaitingTotals


class RequestQueue(ABC):
    """Waiting requests in the order of one policy, and what they amount to.

    Those that are deferred stand aside: they are in no order until they are released, and then
    where they would be if they had never been deferred.
    """

    def __init__(self) -> None:
        self.totals = WaitingTotals()
        self.num_deferred_tokens = 0
        self._deferred: dict[str, Request] = {}

    @property
    def num_deferred(self) -> int:
        """Requests that may not be admitted yet."""
        return len(self._deferred)

    @property
    def has_ready(self) -> bool:
        """Whether there is a request to admit."""
        return len(self) > len(self._deferred)

    def defer(self, request: Request) -> None:
        """Take in a request that has just arrived and that lacks something other than room."""
        self._deferred[request.request_id] = request
        self.num_deferred_tokens += request.num_uncomputed_tokens
        self.totals.enter(request)

    def release(self, request: Request) -> None:
        """Let a deferred request take its place."""
        self._undefer(request)
        self._release(request)

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
        if request.request_id in self._deferred:
            self._undefer(request)
        else:
            self._remove(request)
        self.totals.leave(request)

    def _undefer(self, request: Request) -> None:
        del self._deferred[request.request_id]
        self.num_deferred_tokens -= request.num_uncomputed_tokens

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
    def _release(self, request: Request) -> None: ...

    @abstractmethod
    def _pop(self) -> Request: ...

    @abstractmethod
    def _remove(self, request: Request) -> None: ...


class FCFSRequestQueue(RequestQueue):
    """First come, first served; the last one admitted yields first."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: OrderedDict[str, Request] = OrderedDict()
        # Those that were deferred, by arrival.
        self._late: list[tuple[int, int, Request]] = []
        self._is_late: set[int] = set()

    def peek(self) -> Request:
        late = self._first_late()
        if not self._requests:
            assert late is not None
            return late
        first = next(iter(self._requests.values()))
        # Preempted requests stand before all that never ran.
        if late is None or first.status is RequestStatus.PREEMPTED:
            return first
        return late if self._key(late) < self._key(first) else first

    def in_order(self, running: list[Request]) -> list[Request]:
        return list(running)  # in the order of admission

    def victim(self, running: list[Request]) -> Request:
        return running[-1]

    def __len__(self) -> int:
        return len(self._requests) + len(self._is_late) + len(self._deferred)

    def __iter__(self) -> Iterator[Request]:
        yield from self._requests.values()
        yield from (entry[-1] for entry in self._late if entry[-1].num in self._is_late)
        yield from self._deferred.values()

    def _add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def _put_back(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def _release(self, request: Request) -> None:
        heapq.heappush(self._late, (*self._key(request), request))
        self._is_late.add(request.num)

    def _pop(self) -> Request:
        request = self.peek()
        self._remove(request)
        return request

    def _remove(self, request: Request) -> None:
        if self._requests.pop(request.request_id, None) is not None:
            return
        # As in the other queue, the heap entry stays behind for a while.
        self._is_late.remove(request.num)
        if len(self._late) > 2 * len(self._is_late) + 64:
            self._late = [entry for entry in self._late if entry[-1].num in self._is_late]
            heapq.heapify(self._late)

    def _first_late(self) -> Request | None:
        while self._late and self._late[0][-1].num not in self._is_late:
            heapq.heappop(self._late)
        return self._late[0][-1] if self._late else None

    @staticmethod
    def _key(request: Request) -> tuple[int, int]:
        return request.times.queued_ns, request.num


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
        return len(self._waiting) + len(self._deferred)

    def __iter__(self) -> Iterator[Request]:
        yield from (entry[-1] for entry in self._heap if entry[-1].num in self._waiting)
        yield from self._deferred.values()

    def _add(self, request: Request) -> None:
        heapq.heappush(self._heap, (*self._key(request), request))
        self._waiting.add(request.num)

    _put_back = _release = _add

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
