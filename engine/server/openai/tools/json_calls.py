"""Calls written as JSON: `{"name": …, "arguments": {…}}`, alone, in lists, between or behind tags.

One parser for Hermes, Qwen, Llama, Mistral, Granite and others: they differ in their tags alone,
which `JsonSyntax` names. Arguments are streamed as the model writes them; they are not validated,
as OpenAI's API has it.
"""

import enum
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.server.openai.reasoning.tag_search import first_tag, num_held_back
from engine.server.openai.tools.call_parser import (
    CallParser,
    dump_arguments,
)
from engine.server.openai.tools.pieces import Piece
from engine.server.openai.tools.scanner import BalanceScanner, Certainty, read_header
from engine.types.sampling_checks import encodable

MAX_OBJECT = 65_536
"""Longest object, in characters, that is read whole because of its order."""


@dataclass(frozen=True, slots=True)
class JsonSyntax:
    """Where the JSON of calls is found."""

    prefixes: tuple[str, ...] = ()
    """Tags that calls follow; one, or a list of them."""
    end_tag: str | None = None
    """Closes what a prefix opened."""
    is_bare: bool = False
    """Calls may also stand at the answer's beginning without a prefix. Only JSON that names a
    known function is taken for one."""
    names_first: bool = False
    """A function's name may stand between prefix and arguments: `[TOOL_CALLS]name{…}`."""

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags."""
        return self.prefixes if self.end_tag is None else (*self.prefixes, self.end_tag)


class _At(enum.Enum):
    """What the parser expects next."""

    BEGINNING = enum.auto()
    TEXT = enum.auto()
    OPENED = enum.auto()
    """Behind a prefix: a list, an object or a name."""
    ELEMENT = enum.auto()
    """In a list: an object, or the list's end."""
    OBJECT = enum.auto()
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()
    """Behind the arguments, within the object."""
    NEXT = enum.auto()
    """Behind an object: another one, or the end."""
    END = enum.auto()


_NAMED = re.compile(
    r"([A-Za-z0-9_.-]{1,128})(?:\[CALL_ID\][A-Za-z0-9]{0,64})?(?:\[ARGS\])?\s{0,8}(?=\{)"
)
_NAMED_SO_FAR = re.compile(r"[A-Za-z0-9_.\[\]-]{0,256}\s{0,8}")
_SEPARATOR = re.compile(r"\s*[;,]?\s*")


class JsonCallParser(CallParser):
    """Reads calls of one `JsonSyntax`.

    What a tag opens without being a call is content, tag included. Between the last object and its
    end tag everything is dropped, such as a brace too many, and so is the beginning of a further
    call with which the answer was cut off.
    """

    def __init__(self, syntax: JsonSyntax, **options: Any) -> None:
        super().__init__(**options)
        self._syntax = syntax
        self._at = _At.BEGINNING if syntax.is_bare else _At.TEXT
        self._opening = ""
        """Text since the last content that is to be shown if no call follows."""
        self._is_tagged = False
        self._in_list = False
        self._has_called = False
        """Whether this tag, or list, has had a call."""
        self._behind_arguments = _At.TAIL
        self._restart_scanner()

    def feed(self, text: str) -> list[Piece]:
        """What this much more text settles."""
        if self._at is _At.TEXT and not self._buffer:
            for tag in self._syntax.prefixes:
                if tag[0] in text:
                    break
            else:  # by far the most common case, and the cheapest
                self._write(text)
                return self._take()
        return super().feed(text)

    @property
    def _is_open(self) -> bool:
        return self._at is _At.ARGUMENTS

    def _step(self, *, is_final: bool) -> bool:
        before = (self._at, len(self._buffer))
        _STEPS[self._at](self)
        if before != (self._at, len(self._buffer)):
            return True
        return is_final and self._end()

    def _end(self) -> bool:
        """The text has ended here; whether that leads to more steps."""
        is_undecided = self._at in (_At.BEGINNING, _At.OPENED, _At.ELEMENT, _At.OBJECT)
        if is_undecided and not self._has_called:
            self._skip_object(len(self._buffer))
            return True
        is_cut_off = is_undecided or self._at in (_At.TAIL, _At.NEXT)
        if is_cut_off or (self._at is _At.END and self._is_part_of_end_tag()):
            self._consume(len(self._buffer))
        return False

    def _is_part_of_end_tag(self) -> bool:
        end_tag = self._syntax.end_tag
        return end_tag is not None and end_tag.startswith(self._buffer.strip())

    def _open(self, text: str, at: _At) -> None:
        self._opening += text
        self._at = at

    def _give_up(self) -> None:
        """What has been opened is no call: show it, and go on behind it."""
        self._write(self._opening)
        self._opening = ""
        self._at = _At.TEXT

    def _leave(self) -> None:
        """The object, or what should have been one, cannot be read: leave the tag or the list."""
        if not self._has_called:
            self._give_up()
        elif self._syntax.end_tag is not None and self._is_tagged:
            self._opening = ""
            self._at = _At.END
        else:
            self._give_up()

    # -- states ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._may_begin_call():
            self._give_up()

    def _read_text(self) -> None:
        found = first_tag(self._buffer, self._syntax.prefixes)
        if found is None:
            held = num_held_back(self._buffer, self._syntax.prefixes)
            self._write(self._consume(len(self._buffer) - held))
            return
        place, tag = found
        self._write(self._consume(place))
        self._consume(len(tag))
        self._is_tagged = True
        self._in_list = self._has_called = False
        self._open("" if tag in self._hidden else tag, _At.OPENED)

    def _read_opened(self) -> None:
        if self._may_begin_call():
            return
        if not self._syntax.names_first:
            self._leave()
        elif (match := _NAMED.match(self._buffer)) is not None:
            self._begin_call(match[1], match.end(), then=_At.NEXT)
        elif _NAMED_SO_FAR.fullmatch(self._buffer) is None:
            self._leave()

    def _read_element(self) -> None:
        self._opening += self._skip_space()
        if not self._buffer:
            return
        if self._buffer[0] == "{":
            self._expect_object()
        elif self._buffer[0] == "]" and (self._is_tagged or self._has_called):
            self._consume(1)
            self._opening = ""
            self._in_list = False
            self._at = _At.END
        else:
            self._leave()

    def _read_object(self) -> None:
        header = read_header(self._buffer)
        is_undecided = header.certainty is Certainty.UNKNOWN
        if not self._is_tagged and header.name not in self._names:
            if header.name is not None or not is_undecided:
                self._leave()
        elif header.certainty is Certainty.YES:
            assert header.name is not None
            self._begin_call(header.name, header.arguments_start, then=_At.TAIL)
        elif not is_undecided:
            self._read_whole_object()

    def _read_whole_object(self) -> None:
        """An object in another order than usual, read when it is complete."""
        end = self._scan()
        if end is None and len(self._buffer) < MAX_OBJECT:
            return
        call = None if end is None or end > MAX_OBJECT else _call_of(self._buffer[:end])
        if call is None:
            self._skip_object(MAX_OBJECT if end is None else min(end, MAX_OBJECT))
            return
        name, arguments = call
        self._begin_call(name, end or 0, then=_At.NEXT)
        self._add_arguments(arguments)
        self._at = _At.NEXT

    def _skip_object(self, length: int) -> None:
        """This much is no call. It is not searched for others: such a search could go on and on."""
        self._opening += self._consume(length)
        self._leave()

    def _read_arguments(self) -> None:
        end = self._scanner.scan(self._buffer)
        self._add_arguments(self._consume(len(self._buffer) if end is None else end))
        if end is not None:
            self._at = self._behind_arguments
            self._restart_scanner(depth=1)

    def _read_tail(self) -> None:
        rest = self._buffer.lstrip()
        if rest.startswith("}"):
            self._consume(len(self._buffer) - len(rest) + 1)
            self._at = _At.NEXT
        elif rest.startswith(","):  # more keys, of which there is no use
            if (end := self._scan()) is not None:
                self._consume(end)
                self._at = _At.NEXT
        elif rest:
            self._at = _At.NEXT

    def _read_next(self) -> None:
        if self._in_list:
            self._skip_space()
            if self._buffer.startswith(","):
                self._open(self._consume(1), _At.ELEMENT)
            elif self._buffer:
                self._in_list = False
                self._consume(self._buffer.startswith("]"))
                self._at = _At.END
            return
        separator = _SEPARATOR.match(self._buffer)
        assert separator is not None
        rest = self._buffer[separator.end() :]
        if rest.startswith("{"):
            self._opening = self._consume(separator.end())
            self._expect_object()
        elif rest:
            self._at = _At.END

    def _read_end(self) -> None:
        end_tag = self._syntax.end_tag
        if end_tag is None or not self._is_tagged:
            self._at = _At.TEXT
            return
        found = first_tag(self._buffer, self._syntax.tags)
        if found is not None:
            place, tag = found
            self._consume(place + (len(tag) if tag == end_tag else 0))
            self._at = _At.TEXT

    # -- helpers -----------------------------------------------------------------------------------

    def _may_begin_call(self) -> bool:
        """Whether an object or a list begins here, which is then entered, or nothing has come."""
        self._opening += self._skip_space()
        if self._buffer.startswith("{"):
            self._expect_object()
        elif self._buffer.startswith("["):
            self._in_list = True
            self._open(self._consume(1), _At.ELEMENT)
        elif self._buffer:
            return False
        return True

    def _begin_call(self, name: str, length: int, *, then: _At) -> None:
        """A call whose arguments begin behind this length, and what is expected behind them."""
        self._start_call(name)
        self._consume(length)
        self._opening = ""
        self._has_called = True
        self._at = _At.ARGUMENTS
        self._behind_arguments = then
        self._restart_scanner()

    def _expect_object(self) -> None:
        self._at = _At.OBJECT
        self._restart_scanner()

    def _restart_scanner(self, *, depth: int = 0) -> None:
        self._scanner = BalanceScanner()
        self._scanner.scan("{" * depth)
        self._num_scanned = 0

    def _scan(self) -> int | None:
        """Where the value ends that the buffer begins with, or is within."""
        end = self._scanner.scan(self._buffer, self._num_scanned)
        self._num_scanned = len(self._buffer)
        return end


_STEPS: dict[_At, Callable[[JsonCallParser], None]] = {
    _At.BEGINNING: JsonCallParser._begin,
    _At.TEXT: JsonCallParser._read_text,
    _At.OPENED: JsonCallParser._read_opened,
    _At.ELEMENT: JsonCallParser._read_element,
    _At.OBJECT: JsonCallParser._read_object,
    _At.ARGUMENTS: JsonCallParser._read_arguments,
    _At.TAIL: JsonCallParser._read_tail,
    _At.NEXT: JsonCallParser._read_next,
    _At.END: JsonCallParser._read_end,
}


def _call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call's object; None if it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    inner = call.get("function")
    call = inner if isinstance(inner, dict) else call
    name = call.get("name", inner)
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not name or not encodable(name):
        return None
    if isinstance(arguments, str):
        return name, arguments.strip() or "{}"
    if not isinstance(arguments, dict | None):
        return None
    try:
        return name, dump_arguments(arguments or {})
    except ValueError:
        return None
