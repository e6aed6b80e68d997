"""Packed products against float32, on every fill of rows, columns and tiles."""

import pytest
import torch

from engine.native.library import PANEL_COLUMNS, ROW_BLOCK, load_library
from tests.support.native_support import needs_native

pytestmark = needs_native


def multiply(x: torch.Tensor, weight: torch.Tensor, num_threads: int = 2) -> torch.Tensor:
    """`x @ weight.T` by the kernels; rows that pad `x` hold NaN."""
    library = load_library()
    num_rows, inner = x.shape
    columns = len(weight)
    panels = torch.empty(-(-columns // PANEL_COLUMNS) * PANEL_COLUMNS * inner, dtype=torch.bfloat16)
    library.isinglass_pack(weight.data_ptr(), columns, inner, panels.data_ptr())
    padded = torch.full((-(-num_rows // ROW_BLOCK) * ROW_BLOCK, inner), float("nan")).bfloat16()
    padded[:num_rows] = x
    out = torch.full((num_rows, columns), float("nan"))
    library.isinglass_multiply(
        padded.data_ptr(),
        num_rows,
        inner,
        panels.data_ptr(),
        columns,
        out.data_ptr(),
        num_threads,
    )
    return out


@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 31, 33, 64, 100, 2050])
@pytest.mark.parametrize(("inner", "columns"), [(32, 32), (96, 50), (576, 17), (1536, 96)])
def test_equals_float32(num_rows: int, inner: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(num_rows + inner)
    x = torch.randn(num_rows, inner, generator=generator).bfloat16()
    weight = torch.randn(columns, inner, generator=generator).bfloat16()
    expected = x.double() @ weight.double().T
    # Products of bfloat16 are exact in float32; only sums round.
    torch.testing.assert_close(multiply(x, weight).double(), expected, rtol=1e-4, atol=1e-3)


def test_a_row_does_not_depend_on_the_others() -> None:
    """To the bit, whether alone or among many, by one thread or five."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(70, 160, generator=generator).bfloat16()
    weight = torch.randn(70, 160, generator=generator).bfloat16()
    together = multiply(x, weight, num_threads=5)
    for row in (0, 15, 16, 40, 69):
        alone = multiply(x[row : row + 1].contiguous(), weight, num_threads=1)
        assert torch.equal(alone[0], together[row])
