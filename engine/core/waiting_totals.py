"""What all waiting requests amount to, kept up to date with every arrival and departure.

Knows sums and the order in which waits began; knows no policy. Reading costs the same for one
request and for a hundred thousand.
"""

from collections import OrderedDict

from engine.core.request import Request, RequestStatus


class WaitingTotals:
    """Tokens to compute, requests that ran before, and the longest wait."""

    __slots__ = ("_since_ns", "num_preempted", "num_tokens")

    def __init__(self) -> None:
        self.num_tokens = 0
        """Known tokens that are still to be computed; of a preempted request, all."""
        self.num_preempted = 0
        # A wait that begins later is entered later, so the first entry is the longest one. No
        # plain dict: finding its first entry walks over all that were deleted in front of it.
        self._since_ns: OrderedDict[str, int] = OrderedDict()

    @property
    def oldest_since_ns(self) -> int:
        """Since when the request waits that has waited longest, 0 with none."""
        return next(iter(self._since_ns.values()), 0)

    def enter(self, request: Request) -> None:
        """A request begins to wait."""
        self.num_tokens += request.num_uncomputed_tokens
        self.num_preempted += request.status is RequestStatus.PREEMPTED
        self._since_ns[request.request_id] = request.since_ns

    def leave(self, request: Request) -> None:
        """A request's wait ends; it must look as it did while it waited."""
        self.num_tokens -= request.num_uncomputed_tokens
        self.num_preempted -= request.status is RequestStatus.PREEMPTED
        del self._since_ns[request.request_id]

    def grow(self, num_tokens: int) -> None:
        """A request that waits has got tokens, out of a step from before its preemption."""
        self.num_tokens += num_tokens
