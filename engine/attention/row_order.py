"""Rows of a flat batch in an order that suits a backend, and the way back.

Knows indices. Does not know why a backend wants another order.
"""

import numpy as np
import torch


class RowOrder:
    """Some rows of the flat batch, in an order of the backend's own.

    The one place that knows both directions: `take` brings rows into the order, `put_back` returns
    results to where their rows came from. Whether the order is the batch's own, so that nothing
    has to be moved, is read off the rows and never claimed by whoever made them.

    Args:
        rows: row of the flat batch at each place, int [num_places]; no row twice.
        num_tokens: rows of the flat batch.
    """

    __slots__ = ("_index", "_num_places")

    def __init__(self, rows: np.ndarray, num_tokens: int) -> None:
        is_identity = np.array_equal(rows, np.arange(num_tokens))
        self._num_places = len(rows)
        self._index = (
            None if is_identity else torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
        )

    def __len__(self) -> int:
        return self._num_places

    def take(self, batch: torch.Tensor) -> torch.Tensor:
        """The rows in this order, `[num_places, n]`; the batch itself where that is its order."""
        return batch if self._index is None else batch.index_select(0, self._index)

    def results_for(self, batch: torch.Tensor) -> torch.Tensor:
        """Memory for results in this order: the batch itself, or as many rows of their own."""
        return batch if self._index is None else batch.new_empty(len(self), batch.shape[1])

    def put_back(self, results: torch.Tensor, batch: torch.Tensor) -> None:
        """Write results, `[num_places, n]` in this order, to the rows that they belong to."""
        if self._index is None:
            assert results is batch
        else:
            batch.index_copy_(0, self._index, results)
