"""From "which request is at which row, then and now" to the `BatchUpdate` of one step.

Knows rows and the identity of what they hold. Knows nothing of logits or sampling.
"""

from engine.types.sampling import SamplingParams
from engine.worker.logits_processor import (
    AddedRequest,
    BatchUpdate,
    MoveDirectionality,
    MovedRequest,
)

UNI = MoveDirectionality.UNIDIRECTIONAL
SWAP = MoveDirectionality.SWAP


class RowState:
    """One request in the batch; the object itself is the request's identity."""

    __slots__ = ("output_token_ids", "params", "prompt_token_ids")

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: list[int] | None,
        output_token_ids: list[int],
    ) -> None:
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids = output_token_ids


def batch_update_between(before: list[RowState], after: list[RowState]) -> BatchUpdate | None:
    """Return the update that turns one batch into another, None if they are the same.

    Any sequence of additions, removals and moves inside one step collapses to its net effect. New
    requests go to their own row if it is free at that time and to another free row otherwise; the
    moves then bring everything to its place.

    Args:
        before: the requests by row at the previous step.
        after: the requests by row now.
    """
    surviving = {id(request) for request in after}
    num_rows = max(len(before), len(after))
    rows: list[RowState | None] = [
        request if id(request) in surviving else None for request in before
    ]
    rows.extend([None] * (num_rows - len(before)))
    removed = {row for row, request in enumerate(before) if id(request) not in surviving}

    added = _place_new_requests(rows, before=before, after=after)
    removed.difference_update(row for row, *_ in added)
    moved = _arrange(rows, after=after)
    if not (removed or added or moved):
        return None
    return BatchUpdate(
        batch_size=len(after), removed=sorted(removed, reverse=True), added=added, moved=moved
    )


def _place_new_requests(
    rows: list[RowState | None], *, before: list[RowState], after: list[RowState]
) -> list[AddedRequest]:
    known = {id(request) for request in before}
    new = [(row, request) for row, request in enumerate(after) if id(request) not in known]
    displaced: list[RowState] = []
    placed: list[tuple[int, RowState]] = []
    for row, request in new:
        if rows[row] is None:
            rows[row] = request
            placed.append((row, request))
        else:
            displaced.append(request)
    free = (row for row, request in enumerate(rows) if request is None)
    # The generator reads the list while it fills, which is safe: rows behind it stay taken.
    for request in displaced:
        row = next(free)
        rows[row] = request
        placed.append((row, request))
    return [
        (row, request.params, request.prompt_token_ids, request.output_token_ids)
        for row, request in placed
    ]


def _arrange(rows: list[RowState | None], *, after: list[RowState]) -> list[MovedRequest]:
    row_of = {id(request): row for row, request in enumerate(rows) if request is not None}
    moved: list[MovedRequest] = []
    for destination, request in enumerate(after):
        source = row_of[id(request)]
        if source == destination:
            continue
        other = rows[destination]
        moved.append((source, destination, UNI if other is None else SWAP))
        rows[source], rows[destination] = other, request
        row_of[id(request)] = destination
        if other is not None:
            row_of[id(other)] = source
    return moved
