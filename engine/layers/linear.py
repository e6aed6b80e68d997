"""Linear maps, packed for the CPU's matrix units where that is faster.

Knows oneDNN's packed weight format through PyTorch's `mkldnn` operators. Does not know which
projections of a model share one map: models slice `weight` and `bias` themselves.

Measured with two AMX cores on whole models: bfloat16 packed weights win up to several hundred
rows and lose a little above; float32 packed weights lose at one row, so they stay dense.
"""

import torch
from torch import nn
from torch.nn import functional

_PACKED_DTYPES = (torch.bfloat16,)


class Linear(nn.Module):
    """`x @ weight.T + bias`, `[num_rows, in_size]` to `[num_rows, out_size]`.

    Weights are dense until `pack` is called, which happens once they are loaded.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.in_size, self.out_size = in_size, out_size
        self.weight = nn.Parameter(
            torch.empty(out_size, in_size, dtype=dtype, device=device), requires_grad=False
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(
                torch.empty(out_size, dtype=dtype, device=device), requires_grad=False
            )
        self.is_packed = False

    def pack(self) -> None:
        """Replace the dense weight by a packed one, if that is faster for its type and device."""
        if can_pack(self.weight):
            packed = pack_weight(self.weight)
            self.weight = nn.Parameter(packed, requires_grad=False)
            self.is_packed = True

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Map the rows; add `residual`, `[num_rows, out_size]`, in the same pass if given."""
        if not self.is_packed:
            output = functional.linear(x, self.weight, self.bias)
            return output if residual is None else output.add_(residual)
        if residual is None:
            return packed_linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")

    def extra_repr(self) -> str:
        """Sizes and format, for printing the model."""
        kind = "packed" if self.is_packed else "dense"
        return f"{self.in_size} -> {self.out_size}, bias={self.bias is not None}, {kind}"


def can_pack(weight: torch.Tensor) -> bool:
    """Whether a packed copy of this dense weight is faster to multiply by."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _PACKED_DTYPES
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a dense `[out_size, in_size]` weight in oneDNN's blocked layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())


def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply `[num_rows, in_size]` by a weight from `pack_weight`."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
