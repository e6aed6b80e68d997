"""Linear maps, packed for the CPU's matrix units where that is faster.

Knows oneDNN's packed weight format and fused steps through PyTorch's `mkldnn` operators. Does not
know which projections of a model share one map: models slice `weight` and `bias` themselves.

Measured with two AMX cores on whole models: bfloat16 packed weights win up to several hundred
rows and lose a little above; float32 packed weights lose at one row, so they stay dense.
"""

import torch
from torch import nn
from torch.nn import functional

from engine.layers.activation import activation

_PACKED_DTYPES = (torch.bfloat16,)
# Transformers' name of an activation -> oneDNN's name, scalars and algorithm.
_FUSED_ACTIVATIONS: dict[str, tuple[str, list[float], str]] = {
    "silu": ("swish", [], ""),
    "swish": ("swish", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_new": ("gelu", [], "tanh"),
    "gelu_pytorch_tanh": ("gelu", [], "tanh"),
    "relu": ("relu", [], ""),
}


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


class GatedLinear(Linear):
    """`activation(x @ gate.T) * (x @ up.T)`, `[num_rows, in_size]` to `[num_rows, size]`.

    Dense, gate and up are the halves of one map. Packed, they are two, since oneDNN applies the
    activation and the product while a tile is at hand (two AMX cores: 8 to 11 % less for an MLP of
    64 to 2048 rows, the same for one row).

    Raises:
        UnsupportedModelError: an activation of an unknown name.
    """

    def __init__(
        self,
        in_size: int,
        size: int,
        activation_name: str,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_size, 2 * size, bias=bias, dtype=dtype, device=device)
        self.size = size
        self.activation = activation(activation_name)
        self.fused_activation = _FUSED_ACTIVATIONS.get(activation_name)
        self.up_weight: nn.Parameter | None = None
        self.up_bias: nn.Parameter | None = None

    def pack(self) -> None:
        """See `Linear`; an activation that oneDNN does not know keeps gate and up in one map."""
        if self.fused_activation is None or not can_pack(self.weight):
            super().pack()
            return
        gate, up = (pack_weight(half) for half in self.weight.split(self.size))
        self.weight = nn.Parameter(gate, requires_grad=False)
        self.up_weight = nn.Parameter(up, requires_grad=False)
        if self.bias is not None:
            gate_bias, up_bias = self.bias.split(self.size)
            self.bias = nn.Parameter(gate_bias, requires_grad=False)
            self.up_bias = nn.Parameter(up_bias, requires_grad=False)
        self.is_packed = True

    # It shares a map's weights; nobody who adds a residual takes it for one.
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Map the rows."""
        if self.up_weight is None:
            both = super().forward(x)  # [num_rows, 2 * size]
            return self.activation(both[:, : self.size]).mul_(both[:, self.size :])
        assert self.fused_activation is not None, "only such a map is packed in two"
        pointwise = torch.ops.mkldnn._linear_pointwise
        gate = pointwise(x, self.weight, self.bias, *self.fused_activation)
        return pointwise.binary(x, gate, self.up_weight, self.up_bias, "mul")


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
