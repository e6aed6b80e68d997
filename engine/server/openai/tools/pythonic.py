"""Calls written as Python: `[get_weather(city="Paris"), now()]`.

Nothing is evaluated. A list is read when it is complete, so its calls come whole.
"""

import ast
import enum
import re
from collections.abc import Collection
from typing import Any

from engine.server.openai.reasoning.tag_search import first_tag, num_held_back
from engine.server.openai.tools.call_parser import (
    CallParser,
    dump_arguments,
)
from engine.server.openai.tools.python_source import parse_python, read_literal
from engine.server.openai.tools.scanner import BalanceScanner

MAX_LIST = 65_536
"""Longest list of calls, in characters; a longer one is content."""

_FIRST_NAME = re.compile(r"\[\s{0,8}([A-Za-z_][A-Za-z0-9_.]{0,127})\s{0,8}\(")
_FIRST_NAME_SO_FAR = re.compile(r"\[\s{0,8}(?:[A-Za-z_][A-Za-z0-9_.]{0,127}\s{0,8})?")


class _At(enum.Enum):
    BEGINNING = enum.auto()
    TEXT = enum.auto()
    LIST = enum.auto()
    END = enum.auto()


class PythonicCallParser(CallParser):
    """Reads a list of calls at the answer's beginning, or behind a tag.

    A list whose first function is unknown, that is no list of calls with literal keyword
    arguments, or that is cut off, is content.

    Args:
        tags: a tag that opens a list and the one that closes it, if the model has any.
    """

    def __init__(self, tags: tuple[str, str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._tags = tags
        self._prefixes = () if tags is None else tags[:1]
        self._at = _At.BEGINNING
        self._opening = ""
        self._scanner = BalanceScanner("\"'", "[]{}()")
        self._num_scanned = 0

    @property
    def _is_open(self) -> bool:
        return False  # calls are reported when they are complete

    def _step(self, *, is_final: bool) -> bool:
        before = (self._at, len(self._buffer))
        if self._at is _At.BEGINNING:
            self._begin()
        elif self._at is _At.TEXT:
            self._read_text()
        elif self._at is _At.LIST:
            self._read_list()
        else:
            self._read_end()
        if before != (self._at, len(self._buffer)):
            return True
        if is_final and self._at in (_At.BEGINNING, _At.LIST):
            self._give_up()
            return True
        if is_final and self._at is _At.END:
            self._consume(len(self._buffer))
        return False

    def _begin(self) -> None:
        """At the beginning, or behind an opening tag."""
        self._opening += self._skip_space()
        if not self._buffer:
            return
        if self._buffer[0] == "[":
            self._at = _At.LIST
            self._scanner = BalanceScanner("\"'", "[]{}()")
            self._num_scanned = 0
        else:
            self._give_up()

    def _read_text(self) -> None:
        found = first_tag(self._buffer, self._prefixes)
        if found is None:
            held = num_held_back(self._buffer, self._prefixes)
            self._write(self._consume(len(self._buffer) - held))
            return
        place, tag = found
        self._write(self._consume(place))
        self._consume(len(tag))
        self._opening = "" if tag in self._hidden else tag
        self._at = _At.BEGINNING

    def _read_list(self) -> None:
        first = _FIRST_NAME.match(self._buffer)
        if first is None:
            if _FIRST_NAME_SO_FAR.fullmatch(self._buffer) is None:
                self._give_up()
            return
        if first[1] not in self._names:
            self._give_up()
            return
        end = self._scanner.scan(self._buffer, self._num_scanned)
        self._num_scanned = len(self._buffer)
        if end is None and len(self._buffer) < MAX_LIST:
            return
        is_whole = end is not None and end <= MAX_LIST
        calls = read_calls(self._buffer[:end], self._names) if is_whole else None
        if calls is None:
            self._give_up()
            return
        self._consume(end or 0)
        self._opening = ""
        for name, arguments in calls:
            self._start_call(name)
            self._add_arguments(arguments)
        self._at = _At.END

    def _read_end(self) -> None:
        """Behind a list: the closing tag, if there is one."""
        closing = "" if self._tags is None else self._tags[1]
        rest = self._buffer.lstrip()
        if closing and rest.startswith(closing):
            self._consume(len(self._buffer) - len(rest) + len(closing))
            self._at = _At.TEXT
        elif not (rest == "" or (closing and closing.startswith(rest))):
            self._at = _At.TEXT

    def _give_up(self) -> None:
        self._write(self._opening)
        self._opening = ""
        # The bracket goes out, too, so that what follows is text.
        if self._at is _At.LIST:
            self._write(self._consume(1))
        self._at = _At.TEXT


def read_calls(text: str, names: Collection[str] = ()) -> list[tuple[str, str]] | None:
    """Names and arguments (JSON text) of a list of calls; None if it is anything else.

    Args:
        names: functions that there are.
    """
    try:
        tree = parse_python(text, names)
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_read_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _read_call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keyword arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("arguments must be named, once each")
        arguments[keyword.arg] = read_literal(keyword.value)
    return _dotted_name(node.func), dump_arguments(arguments)


def _dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("not a function's name")
