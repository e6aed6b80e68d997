"""Any decoder of Transformers, run on flat batches with our paged attention.

Knows Transformers' attention registry and how its classes split into decoder and head. Does not
know any architecture: what the attention calls look like is found out by a probe at load time,
which also refuses what a flat batch would get wrong without a word.

Importing this file imports transformers.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.layer import Attention
from engine.checkpoint.architecture import ModelConfig
from engine.checkpoint.locate import ModelSource
from engine.errors import CheckpointError, UnsupportedModelError
from engine.layers.linear import Linear, can_pack
from engine.models.base import CausalLM
from engine.models.weights import safetensors_files

ATTENTION_NAME = "isinglass"

# Keyword arguments of the attention call that change nothing here: dropout is off, the layout
# comes from our metadata, and positions are already in the queries and keys.
_HARMLESS_ARGUMENTS = frozenset(
    {
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        "position_embeddings",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)


def has_transformers_decoder(config: ModelConfig) -> bool:
    """Whether the installed Transformers has this class as a causal language model."""
    names: set[str] = set()
    for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        names.update([value] if isinstance(value, str) else value)
    return config.architecture in names and hasattr(transformers, config.architecture)


class TransformersForCausalLM(CausalLM):
    """A model class of Transformers behind the engine's interface."""

    def __init__(self, model: transformers.PreTrainedModel, *, backend: AttentionBackend) -> None:
        super().__init__()
        self.model = model
        self.decoder = model.base_model
        self.head = _head_only(model)
        self.attention_layers = _probe(model, backend)

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
            raise UnsupportedModelError(
                f"{config.architecture} of Transformers {transformers.__version__} does not use "
                "its attention registry, so the engine cannot give it a paged cache."
            )
        model = _from_pretrained(model_type, source, dtype).to(device).eval()
        pack_linear_maps(model)
        return cls(model, backend=backend)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `CausalLM`."""
        return _run_decoder(self.decoder, input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM`."""
        return self.head(inputs_embeds=hidden[None], use_cache=False).logits[0].float()


def _from_pretrained(
    model_type: type[transformers.PreTrainedModel], source: ModelSource, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    safetensors_files(source.path)  # names missing files better than Transformers does
    transformers.AttentionInterface.register(ATTENTION_NAME, _attend)
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
    return model


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


def _run_decoder(
    decoder: nn.Module, input_ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    output = decoder(
        input_ids=input_ids[None], position_ids=positions[None], use_cache=False, return_dict=True
    )
    return output.last_hidden_state[0]


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
    head._modules[model.base_model_prefix] = _GivenHidden()
    return head


class _Call(NamedTuple):
    """One attention call seen by the probe."""

    query: torch.Tensor  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor
    scale: float
    window: int | None
    extras: tuple[str, ...]
    module: nn.Module


class _Recorder:
    """Answers attention calls with zeros and keeps what they asked."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def __call__(self, module: nn.Module, call: _Call) -> torch.Tensor:
        self.calls.append(call)
        heads = call.query.transpose(1, 2)  # [1, num_tokens, num_heads, head_dim]
        return heads.new_zeros(*heads.shape[:3], call.value.shape[-1])


class _PagedCall:
    """Answers the attention calls of one module from the paged cache."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention

    def __call__(self, module: nn.Module, call: _Call) -> torch.Tensor:
        # Multi-head latent attention has shorter values than keys; the cache has one size.
        head_dim, value_dim = call.key.shape[-1], call.value.shape[-1]
        value = nn.functional.pad(call.value, (0, head_dim - value_dim))
        parts = [part[0].transpose(0, 1).flatten(1) for part in (call.query, call.key, value)]
        output = self.attention(torch.cat(parts, dim=1))
        return output.view(1, len(output), -1, head_dim)[..., :value_dim]


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """What Transformers' layers call instead of their own attention."""
    extras = tuple(
        name
        for name, argument in arguments.items()
        if name not in _HARMLESS_ARGUMENTS and argument is not None and argument is not False
    )
    if attention_mask is not None:
        extras += ("attention_mask",)
    if not getattr(module, "is_causal", True):
        extras += ("tokens to come (it is not causal)",)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    call = _Call(query, key, value, scale, arguments.get("sliding_window"), extras, module)
    answer: Callable[[nn.Module, _Call], torch.Tensor] = module.__dict__["isinglass_attention"]
    return answer(module, call), None


def _probe(model: transformers.PreTrainedModel, backend: AttentionBackend) -> list[Attention]:
    """Run two tokens in both orders, learn the attention calls, and install ours.

    With attention answered by zeros, a token's queries, keys and hidden state may depend on the
    token and its position alone; a model that mixes tokens elsewhere (convolutions, recurrences)
    or ignores the given positions betrays itself, since its results do not swap with the tokens.
    """
    tokens, positions = torch.tensor([0, 1]), torch.tensor([0, 1])
    device = next(model.parameters()).device
    runs = []
    for order in (torch.tensor([0, 1]), torch.tensor([1, 0])):
        recorder = _Recorder()
        for module in model.modules():
            object.__setattr__(module, "isinglass_attention", recorder)
        try:
            hidden = _run_decoder(
                model.base_model, tokens[order].to(device), positions[order].to(device)
            )
        except Exception as error:  # a class of Transformers may raise anything
            raise UnsupportedModelError(
                f"{type(model).__name__}: its decoder cannot run on a flat batch ({error})."
            ) from error
        runs.append((hidden, recorder.calls))
    _refuse_unsuited(type(model).__name__, runs[0], runs[1])
    layers = []
    for index, call in enumerate(runs[0][1]):
        shape = AttentionShape(
            call.query.shape[1], call.key.shape[1], call.key.shape[-1], call.scale, call.window
        )
        layers.append(Attention(shape, index, backend=backend))
        object.__setattr__(call.module, "isinglass_attention", _PagedCall(layers[-1]))
    return layers


def _refuse_unsuited(
    name: str,
    forwards: tuple[torch.Tensor, list[_Call]],
    backwards: tuple[torch.Tensor, list[_Call]],
) -> None:
    hidden, calls = forwards
    swapped, swapped_calls = backwards
    extras = sorted({extra for call in calls for extra in call.extras})
    if extras:
        raise UnsupportedModelError(
            f"{name}: its attention needs {', '.join(extras)}, which the engine does not offer."
        )
    if not calls or len({id(call.module) for call in calls}) != len(calls):
        raise UnsupportedModelError(f"{name}: not every layer makes exactly one attention call.")
    pairs = [(hidden, swapped.flip(0))]
    for one, other in zip(calls, swapped_calls, strict=True):
        pairs += [(one.query, other.query.flip(2)), (one.key, other.key.flip(2))]
    if not all(torch.allclose(one, other, rtol=0.05, atol=0.05) for one, other in pairs):
        raise UnsupportedModelError(
            f"{name}: tokens depend on each other outside of attention, or positions are not "
            "taken from position_ids; such models cannot run in flat batches."
        )
