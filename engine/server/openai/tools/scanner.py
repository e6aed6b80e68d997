"""Where a bracketed value ends, and how a call's JSON begins; both while the text is growing.

Knows brackets, quotes and escapes. Does not know whether what is between them is valid.
"""

import enum
import json
import re
from typing import NamedTuple

from engine.types.sampling_checks import encodable


class BalanceScanner:
    """Finds the end of a value that begins with a bracket, in pieces and in one pass.

    Args:
        quotes: characters that delimit strings.
        brackets: those that count, opening and closing ones.
    """

    __slots__ = ("_depth", "_is_escaped", "_marks", "_quote")

    def __init__(self, quotes: str = '"', brackets: str = "[]{}") -> None:
        self._marks = re.compile(rf"[\\{re.escape(quotes + brackets)}]")
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def scan(self, text: str, start: int = 0) -> int | None:
        """Read on; returns the place behind the last bracket, or None while it is missing."""
        position = start
        if self._is_escaped and position < len(text):
            self._is_escaped = False
            position += 1
        while (mark := self._marks.search(text, position)) is not None:
            position = mark.end()
            character = mark.group()
            if character == "\\":
                if self._quote:
                    self._is_escaped = position == len(text)
                    position += 1
            elif self._quote:
                if character == self._quote:
                    self._quote = ""
            elif character in "[{(":
                self._depth += 1
            elif character in "]})":
                self._depth -= 1
                if self._depth <= 0:
                    return position
            else:
                self._quote = character
        return None


class Certainty(enum.Enum):
    """How sure it is that a text begins as a call does."""

    YES = enum.auto()
    NO = enum.auto()
    UNKNOWN = enum.auto()


class Header(NamedTuple):
    """How far `{"name": …, "arguments": {` has been read."""

    certainty: Certainty
    name: str | None = None
    arguments_start: int = 0
    """Where the arguments' opening brace is, if it is certain."""


MAX_HEADER = 2048
"""Characters within which the arguments have to begin; else the object is read whole."""

_STRING = re.compile(r'\s*"((?:[^"\\]|\\.)*)"', re.DOTALL)
_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_SKIPPED_KEYS = ("type", "id")


def read_header(text: str) -> Header:
    """Read the beginning of a call's object.

    A call begins with its name and then has an object of arguments; a type and an id may precede
    either. NO is also the answer for calls in another order, which have to be read whole.

    Args:
        text: begins with the object's opening brace.
    """
    assert text.startswith("{")
    header = _read_header(text[:MAX_HEADER])
    if header.certainty is Certainty.UNKNOWN and len(text) >= MAX_HEADER:
        return Header(Certainty.NO, header.name)
    return header


def _read_header(text: str) -> Header:
    position = 1
    name: str | None = None
    while True:
        key = _STRING.match(text, position)
        if key is None:
            return Header(_unfinished(text, position, '"'), name)
        position = key.end()
        if (after := _skip(text, position, ":")) is None:
            return Header(_unfinished(text, position, ":"), name)
        position = after
        if key[1] in _ARGUMENT_KEYS and name is not None:
            if (after := _skip(text, position, "{")) is None:
                return Header(_unfinished(text, position, "{"), name)
            return Header(Certainty.YES, name, after - 1)
        is_name = key[1] in _NAME_KEYS and name is None
        if not is_name and key[1] not in _SKIPPED_KEYS:
            return Header(Certainty.NO, name)
        value = _STRING.match(text, position)
        if value is None:
            return Header(_unfinished(text, position, '"'), name)
        if is_name:
            name = decode_name(value[1])
            if name is None:
                return Header(Certainty.NO)
        position = value.end()
        if (after := _skip(text, position, ",")) is None:
            return Header(_unfinished(text, position, ","), name)
        position = after


def decode_name(literal: str) -> str | None:
    """The string that a JSON literal (without quotes) stands for; None if it is no name."""
    try:
        name = json.loads(f'"{literal}"')
    except ValueError:
        return None
    return name if name and encodable(name) else None


def _skip(text: str, position: int, character: str) -> int | None:
    """The place behind the character, white space before it allowed."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position + 1 if text.startswith(character, position) else None


def _unfinished(text: str, position: int, character: str) -> Certainty:
    """Whether the character, or the string that it opens, may yet come."""
    rest = text[position:].lstrip()
    is_open = not rest or (character == '"' and rest.startswith('"'))
    return Certainty.UNKNOWN if is_open else Certainty.NO
