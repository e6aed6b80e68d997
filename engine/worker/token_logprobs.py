"""Log-probabilities of selected tokens and of the most likely ones.

Knows logits and token ids. Does not know which request a row belongs to nor what its text is.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.types.logprobs import LogprobsLists
from engine.types.sampling import WHOLE_VOCABULARY
from engine.worker.truncation import maxima_of_blocks, top_k_token_ids

_ROWS_AT_A_TIME: Final = 64


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int, *, normalise: bool = True
) -> LogprobsLists:
    """Return the values of the given tokens (column 0) and of the most likely ones.

    Ranks are 1 plus the number of tokens that are strictly more likely.

    Args:
        logits: float32 [num_rows, vocab_size].
        token_ids: int64 [num_rows] on the same device.
        num_logprobs: how many most likely tokens, at most vocab_size.
        normalise: report log-probabilities; False reports the logits themselves.

    Returns:
        Arrays on the host: int32 and float32 [num_rows, num_logprobs + 1], int32 [num_rows].
    """
    chosen_ids = token_ids[:, None]
    chosen = logits.gather(-1, chosen_ids)
    maximum = logits.amax(-1, keepdim=True)
    top_ids = _most_likely(logits, num_logprobs, maximum=maximum)
    top = logits.gather(-1, top_ids)
    values = torch.cat((chosen, top), dim=-1)  # [num_rows, num_logprobs + 1]
    if normalise:
        log_total = (logits - maximum).exp_().sum(-1, keepdim=True).log_()
        # NaN: a row in which everything is forbidden.
        values = torch.nan_to_num_(values - maximum - log_total, nan=-torch.inf, neginf=-torch.inf)
    return LogprobsLists(
        token_ids=torch.cat((chosen_ids, top_ids), dim=-1).to(torch.int32).cpu().numpy(),
        logprobs=values.cpu().numpy(),
        ranks=_ranks(logits, chosen),
    )


def _ranks(logits: torch.Tensor, chosen: torch.Tensor) -> npt.NDArray[np.int32]:
    # Counted on logits: rounding in the normalisation could merge neighbours.
    if logits.device.type != "cpu":
        return ((logits > chosen).sum(-1, dtype=torch.int32) + 1).cpu().numpy()
    pairs = zip(logits.numpy(), chosen.numpy(), strict=True)
    return np.array([np.count_nonzero(row > value) + 1 for row, value in pairs], dtype=np.int32)


def _most_likely(logits: torch.Tensor, num_tokens: int, *, maximum: torch.Tensor) -> torch.Tensor:
    """Ids of the largest logits, descending, ties by id: int64 [num_rows, num_tokens]."""
    num_rows, vocab_size = logits.shape
    if num_tokens == vocab_size:
        return torch.sort(logits, dim=-1, descending=True, stable=True).indices
    if logits.device.type != "cpu" or num_tokens == 0 or maximum.isnan().any():
        return logits.topk(num_tokens, dim=-1).indices
    block_maxima = maxima_of_blocks(logits)
    token_ids = np.empty((num_rows, num_tokens), dtype=np.int64)
    for row, values in enumerate(logits.numpy()):
        candidates = top_k_token_ids(values, num_tokens, block_maxima[row])
        order = np.argsort(-values[candidates], kind="stable")[:num_tokens]
        token_ids[row] = candidates[order]
    return torch.from_numpy(token_ids)


def compute_prompt_logprobs(
    logits: torch.Tensor, target_token_ids: torch.Tensor, num_logprobs: int
) -> LogprobsLists:
    """Return the log-probabilities of prompt tokens under the logits before each of them.

    Works through a few rows at a time, so that a long prompt needs no second copy of its logits.

    Args:
        logits: [num_positions, vocab_size], of any floating type.
        target_token_ids: integers [num_positions]; entry i is the token that follows position i.
        num_logprobs: how many most likely tokens; -1 for the whole vocabulary.

    Returns:
        Arrays on the host: int32 and float32 [num_positions, k + 1], int32 [num_positions].
    """
    vocab_size = logits.shape[-1]
    width = vocab_size if num_logprobs == WHOLE_VOCABULARY else num_logprobs
    targets = target_token_ids.to(device=logits.device, dtype=torch.int64)
    parts = [
        gather_logprobs(chunk.float(), chunk_targets, width)
        for chunk, chunk_targets in zip(
            torch.split(logits, _ROWS_AT_A_TIME), torch.split(targets, _ROWS_AT_A_TIME), strict=True
        )
    ]
    return LogprobsLists.concatenate(parts)


def scatter_rows(lists: LogprobsLists, rows: np.ndarray, num_rows: int) -> LogprobsLists:
    """Spread the entries of some rows over a batch; other rows hold -1, minus infinity and 0."""
    if len(rows) == num_rows:
        return lists
    width = lists.token_ids.shape[1]
    token_ids = np.full((num_rows, width), -1, dtype=np.int32)
    logprobs = np.full((num_rows, width), -np.inf, dtype=np.float32)
    ranks = np.zeros(num_rows, dtype=np.int32)
    token_ids[rows], logprobs[rows], ranks[rows] = lists
    return LogprobsLists(token_ids, logprobs, ranks)


def slice_logprobs(lists: LogprobsLists, row: int, num_logprobs: int) -> LogprobsLists:
    """Return one row, cut to what its request asked for, as arrays with one position.

    Args:
        lists: the whole batch, as wide as the widest request.
        row: the request's row.
        num_logprobs: the request's `logprobs`; -1 for the whole vocabulary.
    """
    width = lists.token_ids.shape[1] if num_logprobs == WHOLE_VOCABULARY else num_logprobs + 1
    return LogprobsLists(
        token_ids=lists.token_ids[row : row + 1, :width],
        logprobs=lists.logprobs[row : row + 1, :width],
        ranks=lists.ranks[row : row + 1],
    )
