"""Answers of `/v1/completions`, as events and as one document.

Knows the JSON. A plain delta, by far the most common event, is put together from parts that are
encoded once a request.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from engine.server.openai.logprobs import CompletionLogprobs, TokenNames, prompt_logprobs_json
from engine.server.openai.streaming import event
from engine.server.openai.text_offsets import TextOffsets, offsets_in_prompt
from engine.server.openai.usage import Usage
from engine.text.tokenizer import Tokenizer
from engine.types.logprobs import LogprobsOnePosition
from engine.types.outputs import CompletionOutput, RequestOutput

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """What the answer to one request is to have."""

    response_id: str
    created: int
    model: str
    n: int
    tokenizer: Tokenizer | None
    echo: bool
    drops_output: bool
    """Whether only the prompt was asked for; the engine makes one token nevertheless."""
    num_logprobs: int | None
    wants_prompt_logprobs: bool
    """Whether they go into the answer besides those of `echo`."""
    returns_token_ids: bool
    names_tokens_by_id: bool
    skips_special_tokens: bool
    truncates: bool
    include_usage: bool
    continuous_usage: bool

    def head(self) -> dict[str, Any]:
        """What every document of the answer begins with."""
        return {
            "id": self.response_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    @property
    def is_plain(self) -> bool:
        """Whether a delta has nothing but its text."""
        return (
            self.num_logprobs is None
            and not self.drops_output
            and not self.returns_token_ids
            and not self.continuous_usage
        )

    def prompt_text(self, output: RequestOutput) -> str:
        """The prompt as the output repeats it."""
        if self._repeats_text(output):
            assert output.prompt is not None
            return output.prompt
        assert self.tokenizer is not None
        return self.tokenizer.decode(
            output.prompt_token_ids, skip_special_tokens=self.skips_special_tokens
        )

    def prompt_offsets(self, output: RequestOutput, prompt_text: str) -> list[int]:
        """Where the prompt's tokens begin in it."""
        tokenizer, token_ids = self.tokenizer, output.prompt_token_ids
        assert tokenizer is not None
        if self._repeats_text(output):
            return offsets_in_prompt(tokenizer, prompt_text, token_ids)
        offsets = TextOffsets(tokenizer, skip_special_tokens=self.skips_special_tokens)
        return [offsets.take(token_id, tokenizer.token_text(token_id)) for token_id in token_ids]

    def _repeats_text(self, output: RequestOutput) -> bool:
        return output.prompt is not None and not self.truncates


class ChoiceWriter:
    """One output of one prompt, from its first delta to its last, or in one piece."""

    __slots__ = ("_has_begun", "_logprobs", "_offsets", "_plan")

    def __init__(self, plan: CompletionPlan) -> None:
        self._plan = plan
        self._has_begun = False
        self._logprobs: CompletionLogprobs | None = None
        if plan.num_logprobs is not None:
            names = TokenNames(plan.tokenizer, as_ids=plan.names_tokens_by_id)
            self._logprobs = CompletionLogprobs(names, plan.num_logprobs)
        self._offsets: TextOffsets | None = None

    def choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        """The choice with what is new since the last call."""
        plan, is_first = self._plan, not self._has_begun
        self._has_begun = True
        text = "" if plan.drops_output else completion.text
        token_ids = [] if plan.drops_output else list(completion.token_ids)
        prompt_text = plan.prompt_text(output) if is_first and plan.echo else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt_text + text,
            "logprobs": self._take_logprobs(output, completion, token_ids, prompt_text),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if is_first and plan.wants_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        if plan.returns_token_ids:
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = token_ids
        return choice

    def _take_logprobs(
        self,
        output: RequestOutput,
        completion: CompletionOutput,
        token_ids: list[int],
        prompt_text: str,
    ) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        plan, prompt_ids = self._plan, output.prompt_token_ids
        positions: list[tuple[int, LogprobsOnePosition | None]] = []
        offsets: list[int] = []
        if self._offsets is None:
            self._offsets = TextOffsets(
                plan.tokenizer,
                prompt_ids,
                start=len(prompt_text),
                skip_special_tokens=plan.skips_special_tokens,
            )
            if plan.echo and output.prompt_logprobs is not None:
                positions += zip(prompt_ids, output.prompt_logprobs, strict=True)
                offsets += plan.prompt_offsets(output, prompt_text)
        if token_ids and completion.logprobs is not None:
            for token_id, position in zip(token_ids, completion.logprobs, strict=True):
                positions.append((token_id, position))
                decoded = None if position is None else position[token_id].decoded_token
                offsets.append(self._offsets.take(token_id, decoded))
        return self._logprobs.take(positions, offsets)


class CompletionCollector:
    """The answer in one document."""

    def __init__(self, plan: CompletionPlan, num_prompts: int) -> None:
        self._plan = plan
        self._choices: list[dict[str, Any] | None] = [None] * (num_prompts * plan.n)
        self.usage = Usage()

    def add(self, number: int, output: RequestOutput) -> None:
        """Take the final output of prompt `number`."""
        plan = self._plan
        self.usage.add_prompt(number, output)
        for completion in output.outputs:
            index = number * plan.n + completion.index
            if not plan.drops_output:
                self.usage.completion_tokens += len(completion.token_ids)
            self._choices[index] = ChoiceWriter(plan).choice(index, output, completion)

    def document(self) -> dict[str, Any]:
        """The answer."""
        return self._plan.head() | {"choices": self._choices, "usage": self.usage.json()}


class CompletionWriter:
    """The answer as events."""

    def __init__(self, plan: CompletionPlan) -> None:
        self._plan = plan
        self.usage = Usage()
        self._choices: dict[int, ChoiceWriter] = {}
        self._is_plain = plan.is_plain
        self._prefixes: dict[int, bytes] = {}
        head = _encode(plan.head() | {"choices": []})
        self._head = b"data: " + head[: -len(b"]}")]
        usage = b',"usage":null' if plan.include_usage else b""
        self._plain_tail = (
            b',"logprobs":null,"finish_reason":null,"stop_reason":null}]' + usage + b"}\n\n"
        )

    def write(self, number: int, output: RequestOutput) -> bytes:
        """Events for an output of prompt `number`."""
        events = b""
        for completion in output.outputs:
            index = number * self._plan.n + completion.index
            if not self._plan.drops_output:
                self.usage.completion_tokens += len(completion.token_ids)
            prefix = self._prefixes.get(index)
            if prefix is not None and completion.finish_reason is None:
                if completion.text:
                    events += prefix + _encode(completion.text) + self._plain_tail
            else:
                events += self._write_fully(number, index, output, completion)
        return events

    def end(self) -> bytes:
        """The usage, if it was asked for."""
        if not self._plan.include_usage:
            return b""
        return event(self._plan.head() | {"choices": [], "usage": self.usage.json()})

    def _write_fully(
        self, number: int, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> bytes:
        self.usage.add_prompt(number, output)
        choice_writer = self._choices.get(index)
        if choice_writer is None:
            choice_writer = self._choices[index] = ChoiceWriter(self._plan)
            if self._is_plain:  # from the second event on
                self._prefixes[index] = self._head + b'{"index":%d,"text":' % index
        choice = choice_writer.choice(index, output, completion)
        document = self._plan.head() | {"choices": [choice]}
        if self._plan.include_usage:
            document["usage"] = self.usage.json() if self._plan.continuous_usage else None
        return event(document)
