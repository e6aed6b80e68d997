"""Answers of `/v1/chat/completions`, as events and as one document.

Knows the JSON, and how pieces of a message (content, reasoning, calls) become it. What of a text is
which is decided by the parser that the plan gives. A plain delta, by far the most common event, is
put together from parts that are encoded once a request.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from engine.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs_json
from engine.server.openai.streaming import event
from engine.server.openai.usage import Usage
from engine.text.tokenizer import Tokenizer
from engine.types.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from engine.server.openai.tools.chat_output import ChatOutputParser
    from engine.server.openai.tools.pieces import Piece
    from engine.server.openai.tools.plan import OutputPlan

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class ChatAnswerPlan:
    """What the answer to one request is to have."""

    response_id: str
    created: int
    model: str
    tokenizer: Tokenizer
    output: "OutputPlan"
    """How the text is read."""
    echo: str
    """In front of each answer."""
    num_top_logprobs: int | None
    """None: no log probabilities at all."""
    wants_prompt_logprobs: bool
    returns_token_ids: bool
    names_tokens_by_id: bool
    include_usage: bool
    continuous_usage: bool

    def head(self, kind: str) -> dict[str, Any]:
        """What every document of the answer begins with."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    @property
    def is_plain(self) -> bool:
        """Whether a delta has nothing but its text."""
        return (
            self.num_top_logprobs is None
            and not self.returns_token_ids
            and not self.continuous_usage
        )

    def logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """Of the tokens of an output or a delta."""
        if self.num_top_logprobs is None or completion.logprobs is None:
            return None
        names = TokenNames(self.tokenizer, as_ids=self.names_tokens_by_id)
        return chat_logprobs(names, completion.logprobs, self.num_top_logprobs)

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What the document says of the prompt."""
        found: dict[str, Any] = {}
        if self.wants_prompt_logprobs:
            found["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        if self.returns_token_ids:
            found["prompt_token_ids"] = output.prompt_token_ids
        return found


class ChatCollector:
    """The answer in one document."""

    def __init__(self, plan: ChatAnswerPlan) -> None:
        self._plan = plan
        self._choices: list[dict[str, Any]] = []
        self.usage = Usage()
        self._of_prompt: dict[str, Any] = {}

    def add(self, number: int, output: RequestOutput) -> None:
        """Take the final output."""
        self.usage.add_prompt(number, output)
        self._of_prompt = self._plan.of_prompt(output)
        for completion in output.outputs:
            self.usage.completion_tokens += len(completion.token_ids)
            self._choices.append(self._choice(completion))

    def document(self) -> dict[str, Any]:
        """The answer."""
        rest = {"choices": self._choices, "usage": self.usage.json()}
        return self._plan.head("chat.completion") | rest | self._of_prompt

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        plan = self._plan
        parser = plan.output.new_parser()
        answer = parser.parse(completion.text)
        content = answer.content
        if content is None and not answer.tool_calls:
            content = ""
        if plan.echo:
            content = plan.echo + (content or "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning is not None:
            message["reasoning"] = message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.tool_calls
            ]
        choice = {
            "index": completion.index,
            "message": message,
            "logprobs": plan.logprobs(completion),
            "finish_reason": plan.output.finish_reason(completion.finish_reason, parser),
            "stop_reason": completion.stop_reason,
        }
        if plan.returns_token_ids:
            choice["token_ids"] = list(completion.token_ids)
        return choice


class ChatWriter:
    """The answer as events."""

    def __init__(self, plan: ChatAnswerPlan) -> None:
        self._plan = plan
        self.usage = Usage()
        self._parsers: dict[int, ChatOutputParser] = {}
        self._prefixes: dict[int, bytes] = {}
        self._head = plan.head("chat.completion.chunk")
        head = _encode(self._head | {"choices": []})
        self._plain_head = b"data: " + head[: -len(b"]}")]
        usage = b',"usage":null' if plan.include_usage else b""
        self._plain_tail = b'},"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def write(self, number: int, output: RequestOutput) -> bytes:
        """Events for an output."""
        events = b""
        for completion in output.outputs:
            prefix = self._prefixes.get(completion.index)
            if prefix is not None and completion.finish_reason is None:
                self.usage.completion_tokens += len(completion.token_ids)
                if completion.text:
                    events += prefix + _encode(completion.text) + self._plain_tail
            else:
                events += self._write_fully(number, output, completion)
        return events

    def end(self) -> bytes:
        """The usage, if it was asked for."""
        if not self._plan.include_usage:
            return b""
        return event(self._head | {"choices": [], "usage": self.usage.json()})

    def _write_fully(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> bytes:
        plan, index = self._plan, completion.index
        events = b""
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = plan.output.new_parser()
            self.usage.add_prompt(number, output)
            events = self._begin(index, output)
            if plan.is_plain and parser.is_plain:  # from the second event on
                self._prefixes[index] = (
                    self._plain_head + b'{"index":%d,"delta":{"content":' % index
                )
        self.usage.completion_tokens += len(completion.token_ids)
        pieces = parser.feed(completion.text) if completion.text else []
        if completion.finish_reason is not None:
            pieces += parser.finish()
        of_tokens = self._of_tokens(completion)
        deltas = merged_deltas(pieces) or ([{}] if of_tokens else [])
        for delta in deltas[:-1]:
            events += self._event(index, delta, {})
        if deltas:
            events += self._event(index, deltas[-1], of_tokens)
        if completion.finish_reason is None:
            return events
        # By itself, as OpenAI's: clients leave their loop at it before they look at its delta.
        reason = plan.output.finish_reason(completion.finish_reason, parser)
        ending = {"finish_reason": reason, "stop_reason": completion.stop_reason}
        return events + self._event(index, {}, ending)

    def _begin(self, index: int, output: RequestOutput) -> bytes:
        """The event that says whose message it is."""
        document = self._document(index, {"role": "assistant", "content": ""}, {})
        events = event(document | self._plan.of_prompt(output))
        if self._plan.echo:
            events += self._event(index, {"content": self._plan.echo}, {})
        return events

    def _of_tokens(self, completion: CompletionOutput) -> dict[str, Any]:
        """What the choice of an event says of its tokens, besides their text."""
        plan = self._plan
        found: dict[str, Any] = {}
        if plan.num_top_logprobs is not None and completion.token_ids:
            found["logprobs"] = plan.logprobs(completion)
        if plan.returns_token_ids and completion.token_ids:
            found["token_ids"] = list(completion.token_ids)
        return found

    def _event(self, index: int, delta: dict[str, Any], extras: dict[str, Any]) -> bytes:
        return event(self._document(index, delta, extras))

    def _document(
        self, index: int, delta: dict[str, Any], extras: dict[str, Any]
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | extras
        document = self._head | {"choices": [choice]}
        if self._plan.include_usage:
            document["usage"] = self.usage.json() if self._plan.continuous_usage else None
        return document


def merged_deltas(pieces: "Iterable[Piece]") -> list[dict[str, Any]]:
    """Pieces of a message as deltas of the API; neighbours that can be one are one.

    Reasoning goes by both of its names: vLLM's present one, and the one that most clients read.
    """
    from engine.server.openai.tools.pieces import Content, Reasoning, ToolCallStart

    deltas: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, Content | Reasoning):
            key = "content" if isinstance(piece, Content) else "reasoning_content"
            if deltas and key in deltas[-1]:
                deltas[-1][key] += piece.text
            else:
                deltas.append({key: piece.text})
        elif isinstance(piece, ToolCallStart):
            function: dict[str, Any] = {"name": piece.name, "arguments": ""}
            call = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
            deltas.append({"tool_calls": [call]})
        else:
            before = deltas[-1].get("tool_calls") if deltas else None
            if before and before[-1]["index"] == piece.index:
                before[-1]["function"]["arguments"] += piece.text
            else:
                call = {"index": piece.index, "function": {"arguments": piece.text}}
                deltas.append({"tool_calls": [call]})
    for delta in deltas:
        if "reasoning_content" in delta:
            delta["reasoning"] = delta["reasoning_content"]
    return deltas
