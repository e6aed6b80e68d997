"""The pre-norm decoder that the Llama and Qwen families share.

Knows the data flow of one layer: norm, attention, residual, norm, gated MLP, residual. What
differs between the families (biases, norms of queries and keys) is in their own files.
"""

from dataclasses import replace
from typing import Self, cast

import torch
from torch import nn

from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.layer import Attention
from engine.checkpoint.locate import ModelSource
from engine.checkpoint.model_config import ModelConfig
from engine.layers.embedding import Embedding
from engine.layers.linear import GatedLinear, Linear, can_pack, pack_weight, packed_linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding, RotaryTable, rotate
from engine.log import get_logger
from engine.models.base import CausalLM
from engine.models.weights import copy_weights, iterate_weights, refuse_quantised, stored_types

logger = get_logger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IGNORED = ("rotary_emb.inv_freq",)
"""Ends of names that a checkpoint may bring and that say nothing the configuration does not."""
_DYNAMIC_ROPE = (
    "rope_type 'dynamic': beyond %d tokens each token is turned as if the text ended with it, so "
    "that its key stays right in the cache. Transformers turns all tokens of a prompt by the "
    "prompt's length, so longer prompts may give other tokens there."
)


class SelfAttention(nn.Module):
    """Projections, rotary positions and attention of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        *,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=config.layer_windows[layer_index],
        )
        self.attention = Attention(shape, layer_index, backend=backend)
        self.num_turned_heads = shape.num_heads + shape.num_kv_heads
        self.sizes = (shape.query_size, shape.kv_size, shape.kv_size)
        self.qkv = Linear(
            config.hidden_size,
            sum(self.sizes),
            bias=config.attention_bias,
            dtype=dtype,
            device=device,
        )
        self.output = Linear(
            shape.query_size,
            config.hidden_size,
            bias=config.attention_output_bias,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: torch.Tensor, table: RotaryTable, residual: torch.Tensor) -> torch.Tensor:
        """Attend and add the residual: `[num_tokens, hidden_size]` each."""
        qkv = self.qkv(x)
        heads = qkv.view(len(qkv), -1, self.attention.head_dim)
        turned = heads[:, : self.num_turned_heads]  # queries and keys
        rotate(self.normalise(turned), table, out=turned)
        return self.output(self.attention(qkv), residual)

    def normalise(self, heads: torch.Tensor) -> torch.Tensor:
        """Norm queries and keys, `[num_tokens, heads, head_dim]`, where a family does so."""
        return heads

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Slices of the fused maps by the checkpoint's names."""
        slots = _split_rows(self.qkv, self.sizes, ("q_proj", "k_proj", "v_proj"))
        return slots | _split_rows(self.output, (self.output.out_size,), ("o_proj",))


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))` with gate and up in one map."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden_size, size = config.hidden_size, config.intermediate_size
        self.gate_up = GatedLinear(
            hidden_size, size, config.hidden_act, bias=config.mlp_bias, dtype=dtype, device=device
        )
        self.down = Linear(size, hidden_size, bias=config.mlp_bias, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Apply the MLP and add the residual: `[num_tokens, hidden_size]` each."""
        return self.down(self.gate_up(x), residual)

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Slices of the fused maps by the checkpoint's names."""
        halves = (self.gate_up.size, self.gate_up.size)
        slots = _split_rows(self.gate_up, halves, ("gate_proj", "up_proj"))
        return slots | _split_rows(self.down, (self.down.out_size,), ("down_proj",))


class DecoderLayer(nn.Module):
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(
        self,
        config: ModelConfig,
        attention: SelfAttention,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.self_attention = attention
        self.mlp_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(config, dtype=dtype, device=device)

    def forward(self, hidden: torch.Tensor, table: RotaryTable) -> torch.Tensor:
        """One layer, `[num_tokens, hidden_size]` in and out."""
        hidden = self.self_attention(self.input_norm(hidden), table, hidden)
        return self.mlp(self.mlp_norm(hidden), hidden)

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """The layer's tensors by the checkpoint's names, without the layer's own prefix."""
        slots = {
            "input_layernorm.weight": self.input_norm.weight.data,
            "post_attention_layernorm.weight": self.mlp_norm.weight.data,
        }
        for prefix, module in (("self_attn", self.self_attention), ("mlp", self.mlp)):
            for name, slot in module.weight_slots().items():
                slots[f"{prefix}.{name}"] = slot
        return slots


class FusedDecoder(nn.Module):
    """All layers of a decoder in one call; whoever has loaded the model may attach one."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As `DecoderForCausalLM.forward`."""
        raise NotImplementedError

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `DecoderForCausalLM.compute_logits`."""
        raise NotImplementedError


class DecoderForCausalLM(CausalLM):
    """Embedding, layers, final norm, head. Families set `attention_class`."""

    attention_class: type[SelfAttention] = SelfAttention

    def __init__(
        self,
        config: ModelConfig,
        *,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.is_tied = config.tie_word_embeddings
        self.embedding = Embedding(config.vocab_size, size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(
            config.head_dim,
            config.rope_theta,
            scaling=config.rope_scaling,
            dtype=dtype,
            device=device,
        )
        layers = []
        for index in range(config.num_layers):
            attention = self.attention_class(
                config, index, backend=backend, dtype=dtype, device=device
            )
            layers.append(DecoderLayer(config, attention, dtype=dtype, device=device))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)
        self.head: Linear | None = None
        if not self.is_tied:
            self.head = Linear(size, config.vocab_size, bias=False, dtype=dtype, device=device)
        self.packed_head: torch.Tensor | None = None
        self.native: FusedDecoder | None = None
        self.attention_layers = [layer.self_attention.attention for layer in layers]

    @classmethod
    def load(
        cls,
        source: ModelSource,
        config: ModelConfig,
        *,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """See `CausalLM`."""
        origin = str(source.path)
        if config.rope_scaling is not None and config.rope_scaling["rope_type"] == "dynamic":
            logger.warning(_DYNAMIC_ROPE, config.rope_scaling["original_max_position_embeddings"])
        types = {} if source.is_gguf else stored_types(source)
        refuse_quantised(types, origin)
        # A GGUF file's configuration is tied exactly if the file has no head.
        has_both = config.tie_word_embeddings and {_EMBEDDING, _HEAD} <= types.keys()
        model = cls(
            replace(config, tie_word_embeddings=config.tie_word_embeddings and not has_both),
            backend=backend,
            dtype=dtype,
            device=device,
        )
        slots = model.weight_slots()
        if model.is_tied and _HEAD in types:
            slots[_HEAD] = slots.pop(_EMBEDDING)  # one matrix, under its other name
        copy_weights(iterate_weights(source, config), slots, ignored=_IGNORED, origin=origin)
        if has_both:
            model.tie_equal_head(origin)
        return model

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers under their own type, which `nn.ModuleList` forgets."""
        return cast(list[DecoderLayer], list(self.layers))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `CausalLM`."""
        if self.native is not None:
            return self.native(input_ids, positions)
        hidden = self.embedding(input_ids)
        table = self.rotary(positions)
        for layer in self.layers:
            hidden = layer(hidden, table)
        return self.norm(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM`."""
        if self.native is not None:
            return self.native.compute_logits(hidden)
        if self.head is not None:
            return self.head(hidden).float()
        if self.packed_head is not None:
            return packed_linear(hidden, self.packed_head, None).float()
        return nn.functional.linear(hidden, self.embedding.weight).float()

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Every tensor the checkpoint must bring, by its name there, as a view to copy into."""
        slots = {
            _EMBEDDING: self.embedding.weight.data,
            "model.norm.weight": self.norm.weight.data,
        }
        if self.head is not None:
            slots[_HEAD] = self.head.weight.data
        for index, layer in enumerate(self.decoder_layers):
            for name, slot in layer.weight_slots().items():
                slots[f"model.layers.{index}.{name}"] = slot
        return slots

    def tie_equal_head(self, origin: str) -> None:
        """Drop a head that repeats the embedding; one that differs stays, as in Transformers."""
        assert self.head is not None
        if torch.equal(self.head.weight, self.embedding.weight):
            self.head, self.is_tied = None, True
            return
        logger.warning(
            "%s: tie_word_embeddings is true, but %s is there and differs from the embedding. It "
            "is used; set tie_word_embeddings to false in config.json to say so.",
            origin,
            _HEAD,
        )

    def pack_weights(self) -> None:
        """Pack the linear maps, once all weights are in place."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        # The table must stay dense for look-ups, so a packed head is a second copy of it, paid
        # for with speed in every step.
        if self.is_tied and can_pack(self.embedding.weight):
            self.packed_head = pack_weight(self.embedding.weight)


def _split_rows(
    linear: Linear, sizes: tuple[int, ...], names: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Views of a fused map's rows, one per name, weights and biases."""
    slots = {}
    for name, piece in zip(names, linear.weight.data.split(sizes), strict=True):
        slots[f"{name}.weight"] = piece
    if linear.bias is not None:
        for name, piece in zip(names, linear.bias.data.split(sizes), strict=True):
            slots[f"{name}.bias"] = piece
    return slots
