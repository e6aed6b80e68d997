"""The attention calls of Transformers' layers: how they reach the engine, and what they ask for.

Knows Transformers' registries of attention and of masks. Does not know any architecture, nor the
paged cache: whoever wants a module's calls answered says by what.

Importing this file imports transformers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

ATTENTION_NAME = "isinglass"
PROBE_NAME = "isinglass_probe"

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
# What the commonest other arguments stand for.
_MEANINGS = {
    "block_indices": "an indexer that picks blocks of keys (block_indices)",
    "indices": "an indexer that picks keys (indices)",
    "s_aux": "attention sinks (s_aux)",
    "softcap": "a soft cap on scores (softcap)",
}


class AttentionCall(NamedTuple):
    """One attention call, as a layer of Transformers makes it."""

    module: nn.Module
    query: torch.Tensor  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor  # [1, num_kv_heads, num_tokens, value_dim]
    scale: float
    window: int | None
    extras: tuple[str, ...]
    """What the call asks for besides causal attention."""


def register_attention() -> None:
    """Make `ATTENTION_NAME` an attention implementation of Transformers."""
    transformers.AttentionInterface.register(ATTENTION_NAME, attend)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """What Transformers' layers call instead of their own attention."""
    answer: Callable[..., torch.Tensor] = module.__dict__["isinglass_attention"]
    return answer(module, query, key, value, attention_mask, scaling, arguments), None


def set_answer(module: nn.Module, answer: Callable[..., torch.Tensor]) -> None:
    """Let `answer` serve the module's attention calls; it is no part of the module's state."""
    object.__setattr__(module, "isinglass_attention", answer)


class CallRecorder:
    """Keeps what attention calls ask, and lets each token attend to itself alone."""

    def __init__(self, max_position: int) -> None:
        self.max_position = max_position
        self.calls: list[AttentionCall] = []
        self._masks: list[tuple[torch.Tensor, int | None, bool]] = []

    @contextmanager
    def with_masks(self, model: transformers.PreTrainedModel) -> Iterator[None]:
        """Let the model make masks, which it leaves out for `ATTENTION_NAME`."""
        transformers.AttentionMaskInterface.register(PROBE_NAME, self.make_mask)
        transformers.AttentionInterface.register(PROBE_NAME, attend)
        model.set_attn_implementation(PROBE_NAME)
        try:
            yield
        finally:
            model.set_attn_implementation(ATTENTION_NAME)

    def take_calls(self) -> list[AttentionCall]:
        """What was recorded since the last time."""
        calls, self.calls = self.calls, []
        return calls

    def make_mask(
        self, *, q_length: int, kv_length: int, mask_function: Any, device: Any, **_: Any
    ) -> torch.Tensor:
        """A mask to hand to the layers, remembered with the window that it stands for."""
        mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
        self._masks.append((mask, *_window_of(mask_function, self.max_position, device)))
        return mask

    def answer(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        extras = [
            _MEANINGS.get(name, name)
            for name, argument in arguments.items()
            if name not in _HARMLESS_ARGUMENTS and argument is not None and argument is not False
        ]
        window = arguments.get("sliding_window")
        if mask is not None:
            known = [(window, fits) for one, window, fits in self._masks if one is mask]
            window, is_window = known[0] if known else (None, False)
            if not is_window:
                extras.append("a mask that is neither causal nor a sliding window")
        if not getattr(module, "is_causal", True):
            extras.append("tokens to come (it is not causal)")
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        if window is not None and window >= self.max_position:
            window = None
        self.calls.append(AttentionCall(module, query, key, value, scale, window, tuple(extras)))
        heads = torch.arange(query.shape[1], device=value.device) % value.shape[1]
        return value[:, heads].transpose(1, 2).contiguous()


def _window_of(mask_function: Any, max_position: int, device: Any) -> tuple[int | None, bool]:
    """The sliding window that a mask function of Transformers draws, and whether it draws one.

    Looks at whole rows up to the longest sequence, so no window is too wide to be seen.
    """
    keys = torch.arange(max_position, device=device)

    def row(query: int) -> torch.Tensor:
        zero = keys.new_zeros(())
        return mask_function(zero, zero, zero + query, keys).expand(max_position)

    try:
        window = int(row(max_position - 1).sum())
        for query in {0, window - 1, window, max_position // 2, max_position - 1}:
            query = min(query, max_position - 1)
            if not torch.equal(row(query), (keys <= query) & (keys > query - window)):
                return None, False
    except Exception:  # made for the probe's few tokens, so it depends on more than positions
        return None, False
    return (window if window < max_position else None), True
