"""Log probabilities in the forms of the API.

Knows both forms of OpenAI's and vLLM's form for prompts. JSON has no infinity: what is impossible
has a log probability of -9999.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from engine.text.tokenizer import Tokenizer
from engine.types.logprobs import Logprob, LogprobsOnePosition

LOWEST_LOGPROB = -9999.0


class TokenNames:
    """How tokens are named in logprobs: by their text, or as `token_id:N`.

    Args:
        tokenizer: None where the engine has none; then tokens have no other names than their ids.
        as_ids: name them by id in any case.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int, entry: Logprob | None) -> str:
        """The token's name; without an entry, of a token that stands first."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        if entry is None:
            return self._tokenizer.token_text_after((), token_id)
        return entry.decoded_token or ""

    def entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        """The token in the form of chats."""
        tokenizer = self._tokenizer
        return {
            "token": self.name(token_id, entry),
            "logprob": finite(entry.logprob),
            "bytes": None if tokenizer is None else list(tokenizer.token_bytes(token_id)),
        }


def finite(logprob: float) -> float:
    """The log probability as JSON can carry it."""
    return max(logprob, LOWEST_LOGPROB)


def chat_logprobs(
    names: TokenNames, positions: Iterable[LogprobsOnePosition | None], num_top: int
) -> dict[str, Any]:
    """The form of chats: one entry a token, each with the `num_top` most likely ones (-1: all)."""
    content = []
    for position in positions:
        assert position is not None
        token_id, entry = next(iter(position.items()))
        one = names.entry(token_id, entry)
        one["top_logprobs"] = [names.entry(*item) for item in most_likely(position, num_top)]
        content.append(one)
    return {"content": content, "refusal": None}


def most_likely(position: LogprobsOnePosition, num_top: int) -> list[tuple[int, Logprob]]:
    """The most likely tokens of a position, best first: the chosen one only if it is among them."""
    if num_top == 0:
        return []
    items = list(position.items())
    if 0 < num_top < len(items):
        del items[0]
    items.sort(key=lambda item: item[1].rank or 0)
    return items


class CompletionLogprobs:
    """The older form, in parallel lists.

    Args:
        names: names of tokens.
        num_top: how many most likely tokens there are besides the chosen one.
    """

    __slots__ = ("_names", "_num_top")

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names = names
        self._num_top = num_top

    def take(
        self,
        positions: Iterable[tuple[int, LogprobsOnePosition | None]],
        offsets: Sequence[int],
    ) -> dict[str, Any]:
        """The entries of the next tokens; a token that nothing predicts has None.

        Args:
            positions: token ids, each with its log probabilities.
            offsets: where each token begins in the text.
        """
        logprobs: list[float | None] = []
        tokens: list[str] = []
        tops: list[dict[str, float] | None] = []
        for token_id, position in positions:
            entry = None if position is None else position[token_id]
            tokens.append(self._names.name(token_id, entry))
            logprobs.append(None if entry is None else finite(entry.logprob))
            tops.append(None if position is None else self._top(position))
        return {
            "text_offset": list(offsets),
            "token_logprobs": logprobs,
            "tokens": tokens,
            "top_logprobs": tops,
        }

    def _top(self, position: LogprobsOnePosition) -> dict[str, float]:
        """By name; of two tokens with one name the more likely counts."""
        found: dict[str, float] = {}
        for token_id, entry in position.items():
            name, logprob = self._names.name(token_id, entry), finite(entry.logprob)
            found[name] = max(logprob, found.get(name, logprob))
        return found


def prompt_logprobs_json(
    positions: Sequence[LogprobsOnePosition | None] | None,
) -> list[dict[str, Any] | None] | None:
    """vLLM's form: for each token of the prompt the likely ones by id; None for the first."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in position.items()
        }
        for position in positions
    ]
