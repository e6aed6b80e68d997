"""What a decoder of Transformers asks of attention, found out by running it on a few tokens.

Knows how a decoder is told from its head and what a flat batch needs of it. Attention is answered
in a way that keeps tokens apart, so that whatever else carries something from one token to another
shows. Does not know any architecture, nor the paged cache.

Importing this file imports transformers.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn

from engine.errors import UnsupportedModelError
from engine.models.transformers_attention import AttentionCall, CallRecorder, set_answer

NUM_TOKENS = 4
_NUM_NATURAL = 2  # of them stand at their own places in both runs, see `_spread_positions`
_POISONED = 2  # tokens before and behind it must not notice
_ORDER = (2, 3, 1, 0)  # every token to another place
# How far a token's own results may move, relative to their size, when it stands in another place
# of the batch. Positions or neighbours that count where they should not move them by about 1.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}
_COARSE_ROUNDING = 0.05


def find_attention_calls(
    model: transformers.PreTrainedModel, max_position: int
) -> list[AttentionCall]:
    """The attention calls of one forward pass, in order, one per layer.

    Args:
        model: loaded with `attn_implementation=ATTENTION_NAME`, packed or not.
        max_position: as many tokens as a request may have; a wider window is none.

    Raises:
        UnsupportedModelError: the model asks for something that the engine does not offer, or a
            flat batch of several requests would mix them.
    """
    name = type(model).__name__
    token_ids = _token_ids(model)
    positions = _spread_positions(max_position)
    order = torch.tensor(_ORDER)
    recorder, leak = CallRecorder(max_position), _Leak()
    for module in model.modules():
        set_answer(module, recorder.answer)
    with recorder.with_masks(model):
        natural = _run(model, recorder, token_ids, None)
    calls = recorder.take_calls()
    _refuse_extras(name, calls)
    with leak.watched(model, _POISONED):
        spread = _run(model, recorder, token_ids, positions)
    with leak.watched(model, _ORDER.index(_POISONED)):
        moved = _run(model, recorder, token_ids[order], positions[order])
    if leak.where is not None:
        raise UnsupportedModelError(
            f"{name}: tokens depend on each other outside of attention, through {leak.where} "
            "(a convolution or a recurrence, say); such models cannot run in flat batches."
        )
    _refuse_uneven(name, calls)
    tolerance = _ROUNDING.get(natural[0].dtype, _COARSE_ROUNDING)
    rows = [row for row in range(NUM_TOKENS) if row != _POISONED]
    if _differ(natural, spread, tolerance, rows=list(range(_NUM_NATURAL))):
        raise UnsupportedModelError(
            f"{name}: it does not count positions from 0 in steps of 1, as the engine does."
        )
    moved = [part[:, order.argsort()] for part in moved]
    if _differ(spread, moved, tolerance, rows=rows):
        raise UnsupportedModelError(
            f"{name}: positions are not taken from position_ids, or tokens depend on their "
            "neighbours outside of attention; such models cannot run in flat batches."
        )
    return calls


def decoder_name(model: transformers.PreTrainedModel) -> str:
    """Under which name the model holds its decoder, that is all of it but the head.

    Raises:
        UnsupportedModelError: nothing in it is a decoder by itself.
    """
    parts = {
        name: part
        for name, part in model.named_children()
        if isinstance(part, transformers.PreTrainedModel)
    }
    if model.base_model_prefix in parts or len(parts) != 1:
        name = model.base_model_prefix
    else:
        name = next(iter(parts))
    if name not in parts:
        raise UnsupportedModelError(
            f"{type(model).__name__}: its decoder cannot be told from its head."
        )
    return name


def find_decoder(model: transformers.PreTrainedModel) -> nn.Module:
    """The model without its head."""
    return model.get_submodule(decoder_name(model))


def run_decoder(
    decoder: nn.Module, input_ids: torch.Tensor, positions: torch.Tensor | None
) -> torch.Tensor:
    """Final hidden states of a flat batch, `[num_tokens, hidden_size]`.

    Without positions the decoder counts them as it does for a single prompt.
    """
    given = {} if positions is None else {"position_ids": positions[None]}
    output = decoder(input_ids=input_ids[None], use_cache=False, return_dict=True, **given)
    return output.last_hidden_state[0]


class _Leak:
    """Makes one token's embedding NaN: what is computed from it, however little, is NaN too.

    Attributes:
        where: the class of the module in which the token first reached another one.
    """

    def __init__(self) -> None:
        self.where: str | None = None

    @contextmanager
    def watched(self, model: transformers.PreTrainedModel, row: int) -> Iterator[None]:
        """Poison the token in this row of a run, and look out for it in the others."""

        def poison(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            output = output.clone()
            output[..., row, :] = torch.nan
            return output

        def look(module: nn.Module, inputs: Any, named_inputs: dict[str, Any], output: Any) -> None:
            if self.where is not None or not _has_leak(output, row):
                return
            # The innermost module that gets clean rows and returns others is the first to end.
            if not any(_has_leak(given, row) for given in (*inputs, *named_inputs.values())):
                self.where = type(module).__name__

        hooks = [
            module.register_forward_hook(look, with_kwargs=True)
            for module in find_decoder(model).modules()
        ]
        hooks.append(model.get_input_embeddings().register_forward_hook(poison))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _has_leak(value: Any, poisoned_row: int) -> bool:
    """Whether NaN is anywhere but in the poisoned token's row, `[1, num_tokens, ...]`."""
    if isinstance(value, tuple | list):
        value = value[0] if value else None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    if value.dim() < 3 or value.shape[:2] != (1, NUM_TOKENS):
        return False
    poisoned = value.isnan().flatten(2).any(-1)[0]
    poisoned[poisoned_row] = False
    return bool(poisoned.any())


def _token_ids(model: transformers.PreTrainedModel) -> torch.Tensor:
    """Different tokens, none of the lowest, which are special in many vocabularies."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    return (torch.arange(NUM_TOKENS) + 2) * vocab_size // (NUM_TOKENS + 2)


def _spread_positions(max_position: int) -> torch.Tensor:
    """The first ones, then ones far apart: rules that set in late in a long text show too."""
    return torch.tensor([0, 1, max_position // 2, max_position - 1])


def _run(
    model: transformers.PreTrainedModel,
    recorder: CallRecorder,
    token_ids: torch.Tensor,
    positions: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Everything that is one token's own, `[1, num_tokens, ...]` each: final state, attention."""
    device = next(model.parameters()).device
    positions = None if positions is None else positions.to(device)
    recorder.take_calls()
    try:
        hidden = run_decoder(find_decoder(model), token_ids.to(device), positions)
    except Exception as error:  # a class of Transformers may raise anything
        raise UnsupportedModelError(
            f"{type(model).__name__}: its decoder cannot run on a flat batch: "
            f"{_raiser(error) or 'it'} raised {type(error).__name__} ({error})."
        ) from error
    parts = [hidden[None, :, None]]
    for call in recorder.calls:
        parts += [part.transpose(1, 2) for part in (call.query, call.key, call.value)]
    return parts


def _raiser(error: Exception) -> str | None:
    """The class of the innermost of Transformers' modules that an error passed through."""
    modules = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [
        type(module).__name__
        for module in modules
        if isinstance(module, nn.Module) and type(module).__module__.startswith("transformers.")
    ]
    return names[-1] if names else None


def _refuse_extras(name: str, calls: list[AttentionCall]) -> None:
    extras = sorted({extra for call in calls for extra in call.extras})
    if extras:
        raise UnsupportedModelError(
            f"{name}: its attention needs {', '.join(extras)}, which the engine does not offer."
        )


def _refuse_uneven(name: str, calls: list[AttentionCall]) -> None:
    if not calls:
        raise UnsupportedModelError(f"{name}: it has no attention layers.")
    if len({id(call.module) for call in calls}) != len(calls):
        raise UnsupportedModelError(f"{name}: a layer makes more than one attention call.")


def _differ(
    ones: list[torch.Tensor], others: list[torch.Tensor], tolerance: float, *, rows: list[int]
) -> bool:
    """Whether any result of the typical token differs by more than rounding.

    The typical one is the median: rounding may send a single token to another expert.
    """
    for one, other in zip(ones, others, strict=True):
        first, second = one[0, rows].flatten(1).float(), other[0, rows].flatten(1).float()
        distances = (first - second).norm(dim=1) / second.norm(dim=1).clamp(min=1e-6)
        if not float(distances.median()) <= tolerance:
            return True
    return False
