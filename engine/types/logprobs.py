"""Log probabilities: the arrays that the core sends and the dictionaries that users read.

Knows how a row of arrays becomes a dictionary and that this happens only when someone reads it.
Does not know how log probabilities are computed, nor how a token's text is made: whoever fills
these containers passes the function that decodes a token.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np


class LogprobsLists(NamedTuple):
    """Log probabilities of consecutive positions of one request, as the core sends them.

    Column 0 is the token that was sampled (or stands in the prompt), columns 1 to k are the k most
    likely tokens, best first. `ranks` counts from 1 and belongs to column 0; column j has rank j.
    """

    token_ids: np.ndarray
    """[num_positions, k + 1] int32."""
    logprobs: np.ndarray
    """[num_positions, k + 1] float32."""
    ranks: np.ndarray
    """[num_positions] int32."""

    @classmethod
    def concatenate(cls, parts: "Sequence[LogprobsLists]") -> "LogprobsLists":
        """The positions of all parts in their order; at least one part, all of one width."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class Logprob:
    """Log probability and rank of one token at one position.

    `decoded_token` is made when it is first read. Two are equal if all three values are. A pickled
    one carries its text and not the tokenizer.

    Attributes:
        logprob: natural logarithm of the probability (or a logit, see `logprobs_mode`).
        rank: place of the token in the vocabulary by logprob, from 1; None if unknown.
    """

    __slots__ = ("_decode", "_token", "logprob", "rank")

    def __init__(
        self, logprob: float, rank: int | None = None, decoded_token: str | None = None
    ) -> None:
        self.logprob = logprob
        self.rank = rank
        self._token: int | str | None = decoded_token
        self._decode: Callable[[int], str] | None = None

    @classmethod
    def lazy(
        cls, logprob: float, rank: int | None, *, token_id: int, decode: Callable[[int], str]
    ) -> "Logprob":
        """A log probability whose text is `decode(token_id)`, called when it is first read."""
        self = cls(logprob, rank)
        self._token = token_id
        self._decode = decode
        return self

    @property
    def decoded_token(self) -> str | None:
        """The token's text; None without a tokenizer."""
        if self._decode is not None:
            self._token = self._decode(self._token)  # type: ignore[arg-type]
            self._decode = None
        return self._token  # type: ignore[return-value]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Logprob):
            return NotImplemented
        return (
            self.logprob == other.logprob
            and self.rank == other.rank
            and self.decoded_token == other.decoded_token
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"Logprob(logprob={self.logprob!r}, rank={self.rank!r}, "
            f"decoded_token={self.decoded_token!r})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Logprob, (self.logprob, self.rank, self.decoded_token)


LogprobsOnePosition: TypeAlias = dict[int, Logprob]


class LogprobsRow(NamedTuple):
    """One position that nobody has read yet."""

    lists: LogprobsLists
    row: int
    """Row of `lists`."""
    num_columns: int
    decode: Callable[[int], str] | None

    def build(self) -> LogprobsOnePosition:
        """The dictionary of this position: the sampled token first, then the most likely ones."""
        token_ids = self.lists.token_ids[self.row, : self.num_columns].tolist()
        logprobs = self.lists.logprobs[self.row, : self.num_columns].tolist()
        # A sampled token that is among the most likely ones has the rank of its column there: ties
        # have an order in the columns, but share one (the last) rank in `ranks`.
        ranks = [int(self.lists.ranks[self.row]), *range(1, self.num_columns)]
        decode = self.decode
        if decode is None:
            return {
                token_id: Logprob(logprob, rank)
                for token_id, logprob, rank in zip(token_ids, logprobs, ranks, strict=True)
            }
        return {
            token_id: Logprob.lazy(logprob, rank, token_id=token_id, decode=decode)
            for token_id, logprob, rank in zip(token_ids, logprobs, ranks, strict=True)
        }


class LazyLogprobs(MutableSequence[LogprobsOnePosition | None]):
    """A list of `dict[int, Logprob] | None` that makes each dictionary when it is first read.

    Compares equal to a list with the same content. Slices and copies are as lazy; a pickled one is
    a plain list, because neither arrays nor the tokenizer should travel with a result.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: list[LogprobsRow | LogprobsOnePosition | None] | None = None) -> None:
        self._rows = [] if rows is None else rows

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition | None: ...
    @overload
    def __getitem__(self, index: slice) -> "LazyLogprobs": ...
    def __getitem__(self, index: int | slice) -> "LogprobsOnePosition | LazyLogprobs | None":
        if isinstance(index, slice):
            return LazyLogprobs(self._rows[index])
        row = self._rows[index]
        if isinstance(row, LogprobsRow):
            row = self._rows[index] = row.build()
        return row

    def __setitem__(self, index: Any, value: Any) -> None:
        self._rows[index] = value

    def __delitem__(self, index: int | slice) -> None:
        del self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[LogprobsOnePosition | None]:
        return map(self.__getitem__, range(len(self._rows)))

    def insert(self, index: int, value: Any) -> None:
        """Put a row or a finished dictionary before position `index`."""
        self._rows.insert(index, value)

    def append(self, value: Any) -> None:
        """Add a row or a finished dictionary at the end."""
        self._rows.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        """Add rows or finished dictionaries at the end; another lazy list's stay as lazy."""
        self._rows.extend(values._rows if isinstance(values, LazyLogprobs) else values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LazyLogprobs | list):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: "LazyLogprobs | list[Any]") -> "LazyLogprobs":
        rows = other._rows if isinstance(other, LazyLogprobs) else other
        return LazyLogprobs(self._rows + rows)

    def __repr__(self) -> str:
        return repr(list(self))

    def __copy__(self) -> "LazyLogprobs":
        return LazyLogprobs(self._rows.copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> "LazyLogprobs":
        # Rows and their arrays never change, so that only dictionaries already made need copying.
        return LazyLogprobs(
            [row if isinstance(row, LogprobsRow) else _copied(row) for row in self._rows]
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def _copied(position: LogprobsOnePosition | None) -> LogprobsOnePosition | None:
    if position is None:
        return None
    return {
        token_id: Logprob(entry.logprob, entry.rank, entry.decoded_token)
        for token_id, entry in position.items()
    }


PromptLogprobs: TypeAlias = LazyLogprobs | list[LogprobsOnePosition | None]
"""One entry a prompt token; the first is None, since nothing predicts the first token."""

SampleLogprobs: TypeAlias = LazyLogprobs | list[LogprobsOnePosition]
"""One entry an output token: the most likely tokens and the sampled one."""
