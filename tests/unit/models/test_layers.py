"""Layers against formulas written out, in float32 or with bfloat16's rounding allowed for."""

import platform

import pytest
import torch

from engine.errors import UnsupportedModelError
from engine.layers.activation import ACTIVATIONS, activation
from engine.layers.linear import GatedLinear, Linear, can_pack
from engine.layers.memory import keep_freed_memory
from engine.layers.norm import MIN_ELEMENTS_OWN_STEPS, RMSNorm
from engine.layers.rotary import RotaryEmbedding, inverse_frequencies, rotate

pytestmark = pytest.mark.usefixtures("several_threads")

CPU = torch.device("cpu")
# One unit in the last place of bfloat16, relative.
BFLOAT16_STEP = 2**-7


@pytest.mark.parametrize("num_rows", [1, 7, MIN_ELEMENTS_OWN_STEPS // 96 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_of_few_and_many_rows(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    norm = RMSNorm(96, 1e-5, dtype=dtype, device=CPU)
    norm.weight.copy_(torch.randn(96))
    x = (torch.randn(num_rows, 96) * 3).to(dtype)
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = expected * norm.weight.double()
    tolerance = 1e-6 if dtype == torch.float32 else 2 * BFLOAT16_STEP
    torch.testing.assert_close(norm(x).double(), expected, rtol=tolerance, atol=1e-5)
    assert norm(x).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_packed_linear_with_bias_and_residual(
    dtype: torch.dtype, bias: bool, num_rows: int
) -> None:
    torch.manual_seed(0)
    linear = Linear(48, 80, bias=bias, dtype=dtype, device=CPU)
    linear.weight.copy_(torch.randn(80, 48))
    if linear.bias is not None:
        linear.bias.copy_(torch.randn(80))
    x, residual = torch.randn(num_rows, 48).to(dtype), torch.randn(num_rows, 80).to(dtype)
    expected = x.double() @ linear.weight.double().T
    if linear.bias is not None:
        expected += linear.bias.double()
    packs = can_pack(linear.weight)
    linear.pack()
    assert linear.is_packed == packs
    # float32 must stay dense: packed it is slower at one row.
    assert not (packs and dtype == torch.float32)
    before = residual.clone()
    atol = 1e-4 if dtype == torch.float32 else 16 * BFLOAT16_STEP
    torch.testing.assert_close(linear(x).double(), expected, rtol=BFLOAT16_STEP, atol=atol)
    added = linear(x, residual)
    torch.testing.assert_close(
        added.double(), expected + residual.double(), rtol=BFLOAT16_STEP, atol=atol
    )
    assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gated_linear_dense_and_packed(dtype: torch.dtype, bias: bool, name: str) -> None:
    torch.manual_seed(0)
    linear = GatedLinear(48, 80, name, bias=bias, dtype=dtype, device=CPU)
    linear.weight.copy_(torch.randn(160, 48) / 7)
    both = torch.zeros(160) if linear.bias is None else linear.bias.copy_(torch.randn(160))
    x = torch.randn(33, 48).to(dtype)
    gate, up = (x.double() @ linear.weight.double().T + both.double()).split(80, dim=-1)
    expected = activation(name)(gate) * up
    atol = 1e-4 if dtype == torch.float32 else 8 * BFLOAT16_STEP
    rtol = 1e-5 if dtype == torch.float32 else 4 * BFLOAT16_STEP
    torch.testing.assert_close(linear(x).double(), expected, rtol=rtol, atol=atol)
    packs = can_pack(linear.weight)
    linear.pack()
    assert linear.is_packed == packs
    torch.testing.assert_close(linear(x).double(), expected, rtol=rtol, atol=atol)


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    torch.manual_seed(0)
    rotary = RotaryEmbedding(32, 100.0, scaling=None, dtype=torch.float32, device=CPU)
    query, key = torch.randn(1, 4, 32), torch.randn(1, 4, 32)
    products = []
    for start in (0, 5, 400):
        turned_query = rotate(query, rotary(torch.tensor([start + 9])))
        turned_key = rotate(key, rotary(torch.tensor([start])))
        torch.testing.assert_close(turned_query.norm(dim=-1), query.norm(dim=-1))
        products.append((turned_query * turned_key).sum(-1))
    torch.testing.assert_close(products[0], products[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(products[0], products[2], rtol=1e-4, atol=1e-3)
    still = rotate(query, rotary(torch.tensor([0])))
    torch.testing.assert_close(still, query)
    assert not torch.allclose(products[0], (query * key).sum(-1), atol=0.1)


def test_rotating_in_place_gives_the_same() -> None:
    torch.manual_seed(0)
    rotary = RotaryEmbedding(16, 1000.0, scaling=None, dtype=torch.float32, device=CPU)
    table = rotary(torch.arange(6))
    heads = torch.randn(6, 5, 16)
    expected = rotate(heads, table)
    view = heads[:, :4]
    rotate(view, table, out=view)
    torch.testing.assert_close(heads[:, :4], expected[:, :4], rtol=0, atol=0)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=", ".join(ACTIVATIONS)):
        activation("quick_gelu")
    with pytest.raises(UnsupportedModelError, match=r"longrope.*yarn"):
        inverse_frequencies(16, 100.0, {"rope_type": "longrope"})


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_glibc_keeps_freed_memory() -> None:
    assert keep_freed_memory()
