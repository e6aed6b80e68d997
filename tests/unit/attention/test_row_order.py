"""Rows brought into another order come back to where they were."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.row_order import RowOrder


@given(st.permutations(range(9)), st.integers(0, 9))
def test_results_return_to_the_rows_they_came_from(places: list[int], num_places: int) -> None:
    rows = np.array(places[:num_places], np.int32)
    batch = torch.arange(18.0).view(9, 2)
    order = RowOrder(rows, len(batch))
    assert len(order) == num_places
    taken = order.take(batch)
    assert torch.equal(taken, batch[rows])
    output = torch.full_like(batch, -1)
    results = order.results_for(output)
    results.copy_(taken * 10)
    order.put_back(results, output)
    expected = torch.full_like(batch, -1)
    expected[rows] = batch[rows] * 10
    assert torch.equal(output, expected)


def test_the_batchs_own_order_moves_nothing() -> None:
    batch = torch.zeros(4, 2)
    order = RowOrder(np.arange(4), 4)
    assert order.take(batch) is batch
    assert order.results_for(batch) is batch
    assert RowOrder(np.array([0, 1]), 4).take(batch) is not batch
    assert RowOrder(np.array([1, 0, 2, 3]), 4).results_for(batch) is not batch
