"""Any decoder of Transformers, run on flat batches with our paged attention.

Knows Transformers' attention registry and how its classes split into decoder and head. Does not
know any architecture: what the attention calls look like is found out by a probe at load time,
which also refuses what a flat batch would get wrong without a word.

Importing this file imports transformers.
"""

import copy
import re
from collections.abc import Iterable
from typing import Any, Self

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.layer import Attention
from engine.checkpoint.locate import ModelSource
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError, UnsupportedModelError
from engine.layers.linear import Linear, can_pack
from engine.log import get_logger
from engine.models.base import CausalLM
from engine.models.transformers_attention import (
    ATTENTION_NAME,
    AttentionCall,
    register_attention,
    set_answer,
)
from engine.models.transformers_probe import (
    decoder_name,
    find_attention_calls,
    find_decoder,
    run_decoder,
)
from engine.models.weights import refuse_not_finite, refuse_quantised, stored_types

logger = get_logger(__name__)

# Buffers of older versions that any version makes anew: frequencies, masks, positions.
_HARMLESS_ENDS = (
    "inv_freq",
    "attn.bias",
    "attention.bias",
    "masked_bias",
    "causal_mask",
    "version",
)


def has_transformers_decoder(config: ModelConfig) -> bool:
    """Whether the installed Transformers has this class as a causal language model."""
    names: set[str] = set()
    for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        names.update([value] if isinstance(value, str) else value)
    return config.architecture in names and hasattr(transformers, config.architecture)


class TransformersForCausalLM(CausalLM):
    """A model class of Transformers behind the engine's interface."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        calls: list[AttentionCall],
        backend: AttentionBackend,
    ) -> None:
        super().__init__()
        self.model = model
        self.decoder = find_decoder(model)
        self.head = _head_only(model)
        self.attention_layers = _install_attention(calls, backend)

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
        model_type = getattr(transformers, config.architecture)
        if not getattr(model_type, "_supports_attention_backend", False):
            reason = (
                "does not use its attention registry, so the engine cannot give it a paged cache"
            )
            if getattr(model_type, "_is_stateful", False):
                reason = (
                    "keeps a state from token to token besides attention's (a state-space or "
                    "recurrent model, or a hybrid of one with attention), which the engine does not"
                )
            raise UnsupportedModelError(
                f"{config.architecture} of Transformers {transformers.__version__} {reason}."
            )
        model = _from_pretrained(model_type, source, dtype).to(device).eval()
        pack_linear_maps(model)
        calls = find_attention_calls(model, config.max_position_embeddings)
        return cls(model, calls, backend)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `CausalLM`."""
        return run_decoder(self.decoder, input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM`."""
        return self.head(inputs_embeds=hidden[None], use_cache=False).logits[0].float()


def _from_pretrained(
    model_type: type[transformers.PreTrainedModel], source: ModelSource, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    types = stored_types(source)  # names missing and damaged files better than Transformers does
    refuse_quantised(types, str(source.path))
    register_attention()
    try:
        model, info = model_type.from_pretrained(
            source.path,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    # Transformers and safetensors raise errors of many types here, all about the files.
    except Exception as error:
        raise CheckpointError(f"cannot load {source.path}: {error}") from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        if info.get(kind):
            raise CheckpointError(
                f"{source.path}: {kind.replace('_', ' ')}: {sorted(map(str, info[kind]))[:5]}"
            )
    for name, parameter in model.named_parameters():
        refuse_not_finite(name, parameter, str(source.path))
    _warn_of_left_out(model, types, source)
    return model


def _warn_of_left_out(
    model: transformers.PreTrainedModel, names: Iterable[str], source: ModelSource
) -> None:
    """Name the tensors that Transformers' class drops without a word."""
    own = list(model.state_dict())
    patterns = [
        re.compile(pattern)
        for pattern in model._keys_to_ignore_on_load_unexpected or ()
        # One class serves models of several depths: where the layer is there, it is loaded.
        if not any(re.search(pattern, name) for name in own)
    ]
    left_out = [
        name
        for name in names
        if any(pattern.search(name) for pattern in patterns) and not name.endswith(_HARMLESS_ENDS)
    ]
    if left_out:
        logger.warning(
            "%s: %d of the tensors are left out, as Transformers' %s does: %s",
            source.path,
            len(left_out),
            type(model).__name__,
            ", ".join(sorted(left_out)[:5]) + (", ..." if len(left_out) > 5 else ""),
        )


def pack_linear_maps(model: nn.Module) -> None:
    """Replace Transformers' linear maps by packed ones where that is faster."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is not nn.Linear or not can_pack(child.weight):
                continue
            packed = Linear(
                child.in_features,
                child.out_features,
                bias=child.bias is not None,
                dtype=child.weight.dtype,
                device=torch.device("meta"),
            )
            packed.weight = nn.Parameter(child.weight, requires_grad=False)
            if child.bias is not None:
                packed.bias = nn.Parameter(child.bias, requires_grad=False)
            packed.pack()
            setattr(module, name, packed)


class _DecoderOutput(BaseModelOutputWithPast):
    """A decoder's output in which everything but the hidden states is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenHidden(nn.Module):
    """Stands in for the decoder and returns hidden states that it is given."""

    @property
    def decoder(self) -> Self:
        """OPT's head calls `model.decoder`."""
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _DecoderOutput:
        return _DecoderOutput(last_hidden_state=inputs_embeds)


def _head_only(model: transformers.PreTrainedModel) -> nn.Module:
    """The model with a decoder that does nothing: its own way from hidden states to logits.

    Classes scale or cap their logits in `forward`, so the head's matrix alone is not enough.
    """
    head = copy.copy(model)
    head._modules = dict(model._modules)
    head._modules[decoder_name(model)] = _GivenHidden()
    return head


class _PagedAnswer:
    """Answers the attention calls of one module from the paged cache."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
    ) -> torch.Tensor:
        # Multi-head latent attention has keys and values of different sizes; the cache has one.
        # Zeros at the end of queries and keys leave their products as they are.
        size, value_dim = self.attention.head_dim, value.shape[-1]
        parts = [
            nn.functional.pad(part, (0, size - part.shape[-1]))[0].transpose(0, 1).flatten(1)
            for part in (query, key, value)
        ]
        output = self.attention(torch.cat(parts, dim=1))
        return output.view(1, len(output), -1, size)[..., :value_dim]


def _install_attention(calls: list[AttentionCall], backend: AttentionBackend) -> list[Attention]:
    """A paged attention layer for each call, in its module's place."""
    layers = []
    for index, call in enumerate(calls):
        shape = AttentionShape(
            call.query.shape[1],
            call.key.shape[1],
            max(call.key.shape[-1], call.value.shape[-1]),
            call.scale,
            call.window,
        )
        layers.append(Attention(shape, index, backend=backend))
        set_answer(call.module, _PagedAnswer(layers[-1]))
    return layers
