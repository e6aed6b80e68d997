"""Log probabilities as lines of text for a terminal. Knows what users receive; prints nothing."""

from collections.abc import Iterable

from engine.types.logprobs import LogprobsOnePosition


def logprob_lines(positions: Iterable[LogprobsOnePosition | None]) -> list[str]:
    """One line a position: the token that is there, then the most likely ones, best first.

    The first position of a prompt has no log probabilities, and no line.
    """
    return [_line(position) for position in positions if position]


def _line(position: LogprobsOnePosition) -> str:
    # The token itself comes first, and again among the most likely ones only if it is one of them.
    (first, chosen), *others = position.items()
    ranked = sorted(
        [(entry.rank or 0, entry.decoded_token, token_id, entry) for token_id, entry in others],
        key=lambda one: one[0],
    )
    shown = [_shown(first, chosen.decoded_token, chosen.logprob) + f" rank {chosen.rank}"]
    shown += [_shown(token_id, text, entry.logprob) for _, text, token_id, entry in ranked]
    return "  " + "  |  ".join(shown)


def _shown(token_id: int, text: str | None, logprob: float) -> str:
    return f"{token_id if text is None else repr(text)} {logprob:.4f}"
