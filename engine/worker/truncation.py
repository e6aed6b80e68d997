"""Which tokens min-p, top-k and top-p leave in play, and which of them the noise of a key picks.

Knows scaled logits and keys (`engine.worker.random`). There are two implementations of one
definition: on the CPU row by row in NumPy, looking only at the few tokens that can matter; on other
devices for the whole batch in PyTorch with one sort and no synchronisation. Knows nothing of
requests.

The definition, for the weights `exp(logit - max)` of one row:

1. min-p keeps tokens whose weight is at least `min_p` (the largest weight is 1);
2. top-k keeps tokens that are not below the k-th largest logit of the row;
3. top-p keeps the fewest of the most likely remaining tokens whose share reaches `top_p`.

Tokens that tie with the last one kept stay too, so that the result depends on no sorting order.
The drawn token wins a race: each weight is divided by exponential noise of its own, and the largest
quotient wins, which it does with the probability that belongs to the weight (the same as adding
Gumbel noise to the logits). The race is run in two rounds, between the sums of blocks of 128
neighbouring token ids and then inside the block that has won, so that a draw needs a few hundred
noise numbers and not one for each token.

The noise of a token depends on the key and the token's id alone. Logits that differ in their last
bits, as those of one request in different batches do, change a draw only where two quotients are
that close. Of an inverse distribution function every border between tokens shifts instead; on a
trained model in bfloat16 that changed several times as many draws.
"""

from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.worker.random import exponentials, exponentials_on_device
from engine.worker.transfer import to_device

FloatRow: TypeAlias = npt.NDArray[np.float32]
Weights: TypeAlias = npt.NDArray[np.floating[Any]]

NO_TOKEN: Final = -1
"""Drawn from a row without a finite largest logit: everything is forbidden, or a NaN."""

_BLOCK_SIZE: Final = 128

_BLOCK_NOISE: Final = 1 << 32
"""Where the noise of blocks begins; that of tokens has the token's id as its index."""

_FEW: Final = 1024
"""So few weights are sorted without further ado."""


class Truncation(NamedTuple):
    """Parameters of the rows that draw, all of length num_rows."""

    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    truncates: npt.NDArray[np.bool_]
    """Rows in which any of the three is on."""


def draw(
    logits: torch.Tensor,
    keys: npt.NDArray[np.uint64],
    truncation: Truncation,
    *,
    mask_logits: bool = False,
) -> torch.Tensor:
    """Draw one token from each row.

    Args:
        logits: float32 [num_rows, vocab_size], already divided by the temperature.
        keys: uint64 [num_rows], the noise of each row.
        truncation: parameters of the rows.
        mask_logits: also set the tokens that truncation drops to minus infinity, in place.

    Returns:
        Token ids, int64 [num_rows] on the device of the logits; `NO_TOKEN` for a row without
        a finite largest logit.
    """
    if logits.device.type == "cpu":
        return draw_by_row(logits, keys, truncation, mask_logits=mask_logits)
    return draw_by_sort(logits, keys, truncation, mask_logits=mask_logits)


def draw_by_row(
    logits: torch.Tensor,
    keys: npt.NDArray[np.uint64],
    truncation: Truncation,
    *,
    mask_logits: bool = False,
) -> torch.Tensor:
    """The CPU's version of `draw`."""
    vocab_size = logits.shape[-1]
    tokens = np.full(len(logits), NO_TOKEN, dtype=np.int64)
    has_token = np.isfinite(logits.amax(-1).numpy())  # false for NaN too
    is_narrow = truncation.top_k < vocab_size
    narrow, wide = np.flatnonzero(has_token & is_narrow), np.flatnonzero(has_token & ~is_narrow)
    if len(narrow):
        block_maxima = maxima_of_blocks(logits)
        kept = [
            _kept_of_top_k(
                logits[row].numpy(),
                block_maxima[row],
                top_k=int(truncation.top_k[row]),
                top_p=float(truncation.top_p[row]),
                min_p=float(truncation.min_p[row]),
                mask_logits=mask_logits,
            )
            for row in narrow
        ]
        tokens[narrow] = _race_of_few(kept, keys[narrow])
    if len(wide):
        weights = _weights_in_blocks(logits if len(wide) == len(logits) else logits[wide])
        sums = weights.sum(-1).double().numpy()
        for row, blocks, of_blocks in zip(wide, weights.numpy(), sums, strict=True):
            if truncation.truncates[row]:
                row_weights = blocks.reshape(-1)[:vocab_size]
                lowest = _lowest_kept_weight(
                    row_weights,
                    total=float(of_blocks.sum()),
                    top_p=float(truncation.top_p[row]),
                    min_p=float(truncation.min_p[row]),
                )
                if mask_logits:
                    logits[row].numpy()[row_weights < lowest] = -np.inf
                blocks *= blocks >= lowest
                of_blocks[:] = blocks.sum(-1)
        tokens[wide] = _race_of_all(weights.numpy(), sums, keys[wide])
    return torch.from_numpy(tokens)


def _kept_of_top_k(
    logits: FloatRow,
    block_maxima: FloatRow,
    *,
    top_k: int,
    top_p: float,
    min_p: float,
    mask_logits: bool,
) -> tuple[npt.NDArray[np.int64], Weights]:
    """The ids, ascending, and the weights of the tokens of one row that stay in play."""
    token_ids = top_k_token_ids(logits, top_k, block_maxima)
    values = logits[token_ids].astype(np.float64)
    weights = np.exp(values - values.max())
    total = float(weights.sum())
    is_kept = weights >= _lowest_kept_weight(weights, total=total, top_p=top_p, min_p=min_p)
    token_ids, weights = token_ids[is_kept], weights[is_kept]
    if mask_logits:
        kept_logits = logits[token_ids]
        logits[:] = -np.inf
        logits[token_ids] = kept_logits
    return token_ids, weights


def maxima_of_blocks(logits: torch.Tensor) -> FloatRow:
    """The largest logit of each whole block, float32 [num_rows, vocab_size // block_size]."""
    num_blocks = logits.shape[-1] // _BLOCK_SIZE
    whole = logits[:, : num_blocks * _BLOCK_SIZE]
    maxima: FloatRow = whole.reshape(len(logits), num_blocks, _BLOCK_SIZE).amax(-1).numpy()
    return maxima


def top_k_token_ids(logits: FloatRow, top_k: int, block_maxima: FloatRow) -> npt.NDArray[np.int64]:
    """Ids of the tokens of one row that are not below its k-th largest logit, ascending.

    Args:
        logits: float32 [vocab_size].
        top_k: at least 1, less than vocab_size.
        block_maxima: the row's entry of `maxima_of_blocks`.
    """
    if top_k > len(block_maxima):
        cut = len(logits) - top_k
        return np.flatnonzero(logits >= np.partition(logits, cut)[cut])
    # Each of top_k blocks holds a logit at least as large as the k-th largest of the maxima, so
    # that the k-th largest logit is not below it: a cheap first sieve.
    cut = len(block_maxima) - top_k
    candidates = np.flatnonzero(logits >= np.partition(block_maxima, cut)[cut])
    values = logits[candidates]
    cut = len(values) - top_k
    kept: npt.NDArray[np.int64] = candidates[values >= np.partition(values, cut)[cut]]
    return kept


def _weights_in_blocks(logits: torch.Tensor) -> torch.Tensor:
    """Weights, zero-padded to whole blocks: float32 [num_rows, num_blocks, block_size]."""
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // _BLOCK_SIZE)
    maximum = logits.amax(-1, keepdim=True)
    maximum.masked_fill_(maximum == -torch.inf, 0.0)
    weights = logits.new_empty(num_rows, num_blocks * _BLOCK_SIZE)
    torch.sub(logits, maximum, out=weights[:, :vocab_size])
    weights[:, vocab_size:] = -torch.inf
    return weights.exp_().view(num_rows, num_blocks, _BLOCK_SIZE)


def _race_of_all(
    weights: Weights, sums: npt.NDArray[np.float64], keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """The winner of each row; weights [num_rows, num_blocks, block_size], sums of the blocks."""
    rows = np.arange(len(sums))
    keys = keys[:, None]
    block = np.argmax(sums / exponentials(keys, _BLOCK_NOISE + np.arange(sums.shape[1])), axis=1)
    token_ids = block[:, None] * _BLOCK_SIZE + np.arange(_BLOCK_SIZE)
    # A weight of zero cannot win while another one is left, since the noise is finite.
    place = np.argmax(weights[rows, block] / exponentials(keys, token_ids), axis=1)
    return token_ids[rows, place]


def _race_of_few(
    kept: list[tuple[npt.NDArray[np.int64], Weights]], keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """The same for rows of which only some tokens, (ids, weights) a row, are in play."""
    lengths = [len(token_ids) for token_ids, _ in kept]
    row = np.repeat(np.arange(len(kept)), lengths)  # [num_kept], like all below, end to end
    token_ids = np.concatenate([one for one, _ in kept])
    weights = np.concatenate([one for _, one in kept])
    block = token_ids // _BLOCK_SIZE
    begins = np.flatnonzero((np.diff(block, prepend=-1) != 0) | (np.diff(row, prepend=-1) != 0))
    quotients = np.add.reduceat(weights, begins) / exponentials(
        keys[row[begins]], _BLOCK_NOISE + block[begins]
    )
    winners = _argmax_by_row(quotients, row[begins])
    ends = np.append(begins[1:], len(row))
    inside = np.concatenate([np.arange(begins[one], ends[one]) for one in winners])
    quotients = weights[inside] / exponentials(keys[row[inside]], token_ids[inside])
    return token_ids[inside[_argmax_by_row(quotients, row[inside])]]


def _argmax_by_row(
    values: npt.NDArray[np.float64], row: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Where each row's largest value is; the rows' values lie end to end."""
    begins = np.flatnonzero(np.diff(row, prepend=-1))
    ends = np.append(begins[1:], len(row))
    return np.array(
        [begin + np.argmax(values[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    )


def _lowest_kept_weight(weights: Weights, *, total: float, top_p: float, min_p: float) -> float:
    """The smallest of a row's weights that min-p and then top-p leave in play.

    Args:
        weights: [num_tokens], the largest being 1.
        total: their sum.
        top_p: in (0, 1].
        min_p: in [0, 1].
    """
    if top_p == 1.0:
        return min_p
    if min_p > 0.0:
        weights = weights.take(np.flatnonzero(weights >= min_p))
        total = float(weights.sum(dtype=np.float64))
    # All tokens below this weight together hold less than 1 - top_p of the total, so that none of
    # them can be needed; of a trained model's distribution few tokens remain.
    may_count = weights >= (1.0 - top_p) * total / len(weights)
    if 2 * np.count_nonzero(may_count) < len(weights):
        weights = weights.take(np.flatnonzero(may_count))
    needed = top_p * total
    while len(weights) > _FEW:
        middle = len(weights) // 2
        parts: Weights = np.partition(weights, middle)
        upper = float(parts[middle:].sum(dtype=np.float64))
        if upper >= needed:
            weights = parts[middle:]
        else:
            needed -= upper
            weights = parts[:middle]
    descending = np.sort(weights)[::-1]
    num_above = int(np.searchsorted(np.cumsum(descending, dtype=np.float64), needed, side="left"))
    return float(descending[min(num_above, len(descending) - 1)])


def draw_by_sort(
    logits: torch.Tensor,
    keys: npt.NDArray[np.uint64],
    truncation: Truncation,
    *,
    mask_logits: bool = False,
) -> torch.Tensor:
    """The version of `draw` for accelerators; works on any device."""
    if truncation.truncates.any():
        lowest = _lowest_kept_logits(logits, truncation)
        dropped = logits < lowest
        logits = (
            logits.masked_fill_(dropped, -torch.inf)
            if mask_logits
            else logits.masked_fill(dropped, -torch.inf)
        )
    blocks = _weights_in_blocks(logits)
    sums = blocks.sum(-1).double()  # [num_rows, num_blocks]
    key = to_device(keys.view(np.int64), logits.device)[:, None]
    numbers = torch.arange(sums.shape[1], device=logits.device)
    block = (sums / exponentials_on_device(key, _BLOCK_NOISE + numbers)).argmax(-1, keepdim=True)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK_SIZE)).squeeze(1).double()
    token_ids = block * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE, device=logits.device)
    place = (inside / exponentials_on_device(key, token_ids)).argmax(-1, keepdim=True)
    total = sums.sum(-1, keepdim=True)
    return torch.where(total > 0.0, token_ids.gather(-1, place), NO_TOKEN).squeeze(-1)


def _lowest_kept_logits(logits: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """The smallest logit that survives in each row, float32 [num_rows, 1]."""
    vocab_size = logits.shape[-1]
    device = logits.device
    descending = logits.sort(-1, descending=True).values
    maximum = descending[:, :1]
    weights = (descending - maximum.masked_fill(maximum == -torch.inf, 0.0)).exp_()
    top_k = to_device(np.minimum(truncation.top_k, vocab_size), device)[:, None]
    kept = descending >= descending.gather(-1, top_k - 1)
    kept &= weights >= to_device(truncation.min_p, device)[:, None]
    weights = weights.double().masked_fill_(~kept, 0.0)
    cumulative = weights.cumsum(-1)
    before = cumulative - weights
    top_p = to_device(truncation.top_p, device)[:, None]
    # At top_p = 1 rounding must not cut the tail.
    kept &= (before < top_p * cumulative[:, -1:]) | (top_p == 1.0)
    num_kept = kept.sum(-1, keepdim=True).clamp_(min=1)
    return descending.gather(-1, num_kept - 1)
