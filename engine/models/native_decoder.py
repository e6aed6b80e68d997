"""Runs a decoder of ours in the native kernels: all layers of a step in one call.

Takes over the weights of a `DecoderForCausalLM` that has just been loaded, packed for the matrix
unit; the model's linear maps, and its embedding if that is the head, are left without. Knows the
kernels' structures and what they do not support. The kernels do what the modules do, with fewer
roundings to bfloat16 between.
"""

import ctypes
import mmap

import torch
from torch import nn

from engine.attention.forward_context import get_forward_context
from engine.attention.native import native_shape, unsupported_shape
from engine.checkpoint.model_config import ModelConfig
from engine.layers.linear import GatedLinear, Linear
from engine.layers.memory import return_freed_memory
from engine.models.decoder import DecoderForCausalLM, DecoderLayer, FusedDecoder
from engine.native.library import (
    PANEL_COLUMNS,
    ROW_BLOCK,
    Layer,
    Model,
    Step,
    Workspace,
    load_library,
)

_SIZE_MULTIPLE = 32  # of inner dimensions: what a tile spans
_ACTIVATIONS = ("silu", "swish")


def unsupported(config: ModelConfig, dtype: torch.dtype, block_size: int) -> str | None:
    """Why the kernels cannot run a model of ours with this configuration, or None."""
    if dtype != torch.bfloat16:
        return f"dtype {str(dtype).removeprefix('torch.')} is not bfloat16"
    if config.hidden_act not in _ACTIVATIONS:
        return f"activation {config.hidden_act!r} is not {' or '.join(_ACTIVATIONS)}"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % _SIZE_MULTIPLE:
            return f"{name} {getattr(config, name)} is not a multiple of {_SIZE_MULTIPLE}"
    return unsupported_shape(config.num_heads, config.num_kv_heads, config.head_dim, block_size)


class NativeDecoder(FusedDecoder):
    """The weights of a decoder, packed, and its forward pass.

    A module so that its memory is counted with the model's.

    Args:
        model: loaded, in bfloat16 on the CPU; it loses its weights.
        config: what it was built from, which must pass `unsupported`.
    """

    def __init__(self, model: DecoderForCausalLM, config: ModelConfig) -> None:
        super().__init__()
        self._library = load_library()
        self._vocab_size = config.vocab_size
        self._pack(model, config)
        self._layers = (Layer * config.num_layers)(
            *(self._layer(index, layer) for index, layer in enumerate(model.decoder_layers))
        )
        shape = native_shape(model.attention_layers[0].shape)
        self._model = Model(
            shape=shape,
            eps=config.rms_norm_eps,
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            layers=self._layers,
            final_norm=self._address("norm"),
            embedding=None if model.is_tied else model.embedding.weight.data_ptr(),
            head=self._address("head"),
        )
        self._rotary = model.rotary
        self._workspace = _Workspace(config)
        return_freed_memory()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `CausalLM`."""
        num_tokens, hidden_size = len(input_ids), self._model.hidden
        assert num_tokens == 0 or 0 <= int(input_ids.min()) <= int(input_ids.max()) < (
            self._vocab_size
        ), "a token id is outside of the vocabulary"
        assert input_ids.is_contiguous()
        assert input_ids.dtype == torch.int64
        context = get_forward_context()
        cosine, sine = self._rotary.cosine_sine(positions)
        output = torch.empty(num_tokens, hidden_size, dtype=torch.bfloat16)
        caches = context.kv_caches
        step = Step(
            batch=context.metadata.batch,
            memory=Workspace(**self._workspace.reserve(num_tokens)),
            token_ids=input_ids.data_ptr(),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            caches=(ctypes.c_void_p * len(caches))(*(cache.data_ptr() for cache in caches)),
            output=output.data_ptr(),
        )
        self._library.isinglass_forward(
            ctypes.byref(self._model), ctypes.byref(step), torch.get_num_threads()
        )
        return output

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM`."""
        num_rows, hidden_size = hidden.shape
        padded = hidden.new_empty(_round_up(num_rows, ROW_BLOCK), hidden_size)
        padded[:num_rows] = hidden
        logits = torch.empty(num_rows, self._vocab_size)
        self._library.isinglass_multiply(
            padded.data_ptr(),
            num_rows,
            hidden_size,
            self._model.head,
            self._vocab_size,
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        return logits

    def _pack(self, model: DecoderForCausalLM, config: ModelConfig) -> None:
        """Move every weight into one arena, taking it from its module."""
        linears: dict[str, Linear] = {}
        for index, layer in enumerate(model.decoder_layers):
            attention, mlp = layer.self_attention, layer.mlp
            linears[f"{index}_qkv"], linears[f"{index}_output"] = attention.qkv, attention.output
            linears[f"{index}_gate_up"], linears[f"{index}_down"] = mlp.gate_up, mlp.down
        if model.head is not None:
            linears["head"] = model.head
        sizes = {name: _panel_elements(linear.weight) for name, linear in linears.items()}
        if model.is_tied:
            sizes["head"] = _panel_elements(model.embedding.weight)
        self._arena = _huge_pages(sum(sizes.values()))
        self._panels = dict(zip(sizes, self._arena.split(list(sizes.values())), strict=True))
        self._vectors = nn.ParameterDict()  # norms and biases, float32
        self._keep("norm", model.norm.weight)
        for name, linear in linears.items():
            weight: torch.Tensor = linear.weight
            bias: torch.Tensor | None = linear.bias
            if isinstance(linear, GatedLinear):
                weight = _interleave(weight)
                bias = None if bias is None else _interleave(bias)
            self._pack_weight(name, weight)
            if bias is not None:
                padding = _round_up(len(bias), PANEL_COLUMNS) - len(bias)
                self._keep(f"{name}_bias", nn.functional.pad(bias, (0, padding)))
            linear.weight, linear.bias = _nothing(), None
        if model.is_tied:
            # The kernels read the embedding out of the packed head: one copy serves both.
            self._pack_weight("head", model.embedding.weight)
            model.embedding.weight = _nothing()

    def _pack_weight(self, name: str, weight: torch.Tensor) -> None:
        weight = weight.contiguous()
        self._library.isinglass_pack(
            weight.data_ptr(), *weight.shape, self._panels[name].data_ptr()
        )

    def _layer(self, index: int, layer: DecoderLayer) -> Layer:
        attention = layer.self_attention
        norms = {"input_norm": layer.input_norm, "mlp_norm": layer.mlp_norm}
        for name in ("query_norm", "key_norm"):
            if hasattr(attention, name):
                norms[name] = getattr(attention, name)
        for name, norm in norms.items():
            self._keep(f"{index}_{name}", norm.weight)
        names = (*norms, "qkv", "output", "gate_up", "down")
        names += ("qkv_bias", "output_bias", "gate_up_bias", "down_bias")
        addresses = {name: self._address(f"{index}_{name}") for name in names}
        return Layer(**addresses, window=attention.attention.window or 0)

    def _keep(self, name: str, vector: torch.Tensor) -> None:
        self._vectors[name] = nn.Parameter(vector.float(), requires_grad=False)

    def _address(self, name: str) -> int | None:
        tensor = self._panels[name] if name in self._panels else self._vectors.get(name)
        return None if tensor is None else tensor.data_ptr()


class _Workspace:
    """Memory of a step's activations; grows to the largest step and holds nothing between."""

    def __init__(self, config: ModelConfig) -> None:
        query_size = config.num_heads * config.head_dim
        self._sizes = {
            "hidden": config.hidden_size,
            "normed": config.hidden_size,
            "qkv": query_size + 2 * config.num_kv_heads * config.head_dim,
            "attended": query_size,
            "gated": config.intermediate_size,
        }
        self._buffer = torch.empty(0, dtype=torch.bfloat16)

    def reserve(self, num_tokens: int) -> dict[str, int]:
        """Addresses of each part's rows."""
        num_rows = _round_up(num_tokens, ROW_BLOCK)
        num_elements = num_rows * sum(self._sizes.values())
        if num_elements > len(self._buffer):
            self._buffer = torch.empty(num_elements, dtype=torch.bfloat16)
        addresses, address = {}, self._buffer.data_ptr()
        for name, size in self._sizes.items():
            addresses[name] = address
            address += num_rows * size * self._buffer.element_size()
        return addresses


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _panel_elements(weight: torch.Tensor) -> int:
    return _round_up(weight.shape[0], PANEL_COLUMNS) * weight.shape[1]


def _interleave(both: torch.Tensor) -> torch.Tensor:
    """Rows of gate and up, `[2 * size, ...]`, so that a panel holds 16 of each."""
    halves = both.view(2, -1, PANEL_COLUMNS // 2, *both.shape[1:])
    return halves.transpose(0, 1).reshape(both.shape)


def _nothing() -> nn.Parameter:
    return nn.Parameter(torch.empty(0), requires_grad=False)


def _huge_pages(num_elements: int) -> torch.Tensor:
    """Memory for bfloat16 in pages of 2 MiB where the system has them: fewer address look-ups."""
    memory = mmap.mmap(-1, num_elements * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.bfloat16)
