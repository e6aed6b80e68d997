"""What an answer in a chat is made of: pieces as they come, and the whole that they add up to.

Knows the kinds of pieces and how they join. Does not know how they are found in text, nor JSON's
forms of OpenAI's API.
"""

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

_ALPHANUMERIC = string.ascii_letters + string.digits


class Content(msgspec.Struct, frozen=True, gc=False):
    """More of the answer's text; never empty."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """More of the reasoning's text; never empty."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """A call begins; its arguments follow as `ToolCallArguments` of the same index."""

    index: int
    """0 for the answer's first call."""
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments, JSON text; never empty."""

    index: int
    text: str


Piece = Content | Reasoning | ToolCallStart | ToolCallArguments


@dataclass(slots=True)
class ToolCall:
    """A whole call."""

    id: str
    name: str
    arguments: str = ""
    """JSON text as the model wrote it; not JSON where the model erred or was cut off."""


@dataclass(slots=True)
class ChatOutput:
    """A whole answer."""

    content: str | None = None
    """None if there was no text."""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


def gather(pieces: Iterable[Piece]) -> ChatOutput:
    """Join pieces into the answer that they add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, Content):
            content.append(piece.text)
        elif isinstance(piece, Reasoning):
            reasoning.append(piece.text)
        elif isinstance(piece, ToolCallStart):
            assert piece.index == len(calls)
            calls.append(ToolCall(piece.id, piece.name))
            arguments.append([])
        else:
            arguments[piece.index].append(piece.text)
    for call, parts in zip(calls, arguments, strict=True):
        call.arguments = "".join(parts)
    return ChatOutput("".join(content) or None, "".join(reasoning) or None, calls)


def new_call_id() -> str:
    """A random id of a call in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """A random id as Mistral's templates demand it: nine letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
