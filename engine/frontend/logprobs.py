"""Collecting one request's log probabilities from the core's output.

Knows which positions exist and which tokens came before each. Does not build dictionaries or text:
`engine.types.logprobs` does that when somebody reads them.
"""

from collections.abc import Callable, Sequence
from functools import partial

from engine.text.tokenizer import Tokenizer
from engine.types.logprobs import LazyLogprobs, LogprobsLists, LogprobsRow

MAX_CONTEXT_TOKENS = 4
"""A UTF-8 character has at most four bytes, so no more tokens than that can share one."""


class LogprobsProcessor:
    """Log probabilities of one request, position after position.

    Args:
        tokenizer: makes the tokens' text when it is read; None leaves `decoded_token` None.
        num_logprobs: how many most likely tokens to keep for each output token; 0 keeps only the
            sampled one, -1 all that the core sends, None nothing.
        num_prompt_logprobs: the same for prompt tokens.
        prompt_token_ids: the prompt, whose characters its own tokens and the output go on with.

    Attributes:
        logprobs: one dictionary an output token; None if `num_logprobs` is None.
        prompt_logprobs: one dictionary a prompt token, the first None; None if not asked for.
        cumulative_logprob: sum over the sampled tokens; None if `num_logprobs` is None.
    """

    __slots__ = (
        "_num_logprobs",
        "_num_prompt_logprobs",
        "_prompt_context",
        "_sample_context",
        "_tokenizer",
        "cumulative_logprob",
        "logprobs",
        "prompt_logprobs",
    )

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._sample_context = tuple(prompt_token_ids[-MAX_CONTEXT_TOKENS:])
        self._prompt_context = tuple(prompt_token_ids[:1])  # which nothing predicts
        self.cumulative_logprob = None if num_logprobs is None else 0.0
        self.logprobs = None if num_logprobs is None else LazyLogprobs()
        self.prompt_logprobs = None if num_prompt_logprobs is None else LazyLogprobs([None])

    def update_sample(self, lists: LogprobsLists) -> None:
        """Add the output tokens of one step; ignored unless logprobs were asked for."""
        if self.logprobs is None or self._num_logprobs is None:
            return
        assert self.cumulative_logprob is not None
        self._sample_context = self._extend(
            self.logprobs, lists, self._num_logprobs, context=self._sample_context
        )
        self.cumulative_logprob += sum(lists.logprobs[:, 0].tolist())

    def update_prompt(self, lists: LogprobsLists) -> None:
        """Add the next chunk of prompt tokens; ignored unless their logprobs were asked for."""
        if self.prompt_logprobs is None or self._num_prompt_logprobs is None:
            return
        self._prompt_context = self._extend(
            self.prompt_logprobs, lists, self._num_prompt_logprobs, context=self._prompt_context
        )

    def pop_prompt_logprobs(self) -> LazyLogprobs | None:
        """Hand over the prompt's log probabilities and forget them, so that they are sent once.

        Returns:
            What was collected since the last call, maybe nothing; None if not asked for.
        """
        popped = self.prompt_logprobs
        if popped:
            self.prompt_logprobs = LazyLogprobs()
        return popped

    def _extend(
        self,
        target: LazyLogprobs,
        lists: LogprobsLists,
        num_logprobs: int,
        *,
        context: tuple[int, ...],
    ) -> tuple[int, ...]:
        """Append one row a position; returns the tokens before the next position."""
        num_columns = lists.token_ids.shape[1]
        if num_logprobs >= 0:
            num_columns = min(num_columns, num_logprobs + 1)
        text_after = None if self._tokenizer is None else self._tokenizer.token_text_after
        for index, token_id in enumerate(lists.token_ids[:, 0].tolist()):
            decode: Callable[[int], str] | None = None
            if text_after is not None:
                decode = partial(text_after, context)
            target.append(LogprobsRow(lists, index, num_columns, decode))
            context = (*context, token_id)[-MAX_CONTEXT_TOKENS:]
        return context
