"""Calls written as Qwen3-Coder does: functions and parameters as tags, values as plain text.

    <tool_call><function=write><parameter=path>a.txt</parameter></function></tool_call>

Does not know what a value's text means: the function's schema tells, see `Parameters`. Arguments
are streamed a parameter at a time.
"""

import enum
import re
from collections.abc import Sequence
from typing import Any

from engine.server.openai.reasoning.tag_search import first_tag, num_held_back
from engine.server.openai.tools.call_parser import (
    CallParser,
    dump_arguments,
)
from engine.server.openai.tools.definitions import Tool
from engine.server.openai.tools.parameter_values import Parameters, ParameterValues

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_ANYTHING = ParameterValues(None)
_NAME = re.compile(r"([^<>\n]{1,128})>")
_NAME_SO_FAR = re.compile(r"[^<>\n]{0,128}")


class _At(enum.Enum):
    TEXT = enum.auto()
    OPENED = enum.auto()
    NAME = enum.auto()
    PARAMETERS = enum.auto()
    VALUE = enum.auto()
    END = enum.auto()


class QwenXmlCallParser(CallParser):
    """Reads calls between `<tool_call>` tags, or of `<function=` alone, which the model may write.

    A tag without a function's name behind it is content; a call that was cut off has the
    parameters that were complete, as the beginning of a JSON object.

    Args:
        tools: their schemas tell text from numbers.
    """

    def __init__(self, tools: Sequence[Tool] = (), **options: Any) -> None:
        super().__init__(**options)
        self._parameters = {tool.name: Parameters(tool.schema) for tool in tools}
        self._at = _At.TEXT
        self._opening = ""
        self._is_tagged = False
        self._name = ""
        self._key = ""
        self._num_parameters = 0
        self._num_searched = 0

    @property
    def _is_open(self) -> bool:
        return self._at in (_At.PARAMETERS, _At.VALUE)

    def _step(self, *, is_final: bool) -> bool:
        before = (self._at, len(self._buffer))
        _STEPS[self._at](self)
        if before != (self._at, len(self._buffer)):
            return True
        if not is_final:
            return False
        if self._at in (_At.OPENED, _At.NAME):
            self._give_up()
            return True
        if self._at is not _At.TEXT:
            self._consume(len(self._buffer))
        return False

    def _read_text(self) -> None:
        tags = (OPEN, FUNCTION)
        found = first_tag(self._buffer, tags)
        if found is None:
            held = num_held_back(self._buffer, tags)
            self._write(self._consume(len(self._buffer) - held))
            return
        place, tag = found
        self._write(self._consume(place))
        self._consume(len(tag))
        self._is_tagged = tag == OPEN
        self._opening = "" if tag in self._hidden else tag
        self._at = _At.OPENED if tag == OPEN else _At.NAME

    def _read_opened(self) -> None:
        self._opening += self._skip_space()
        if self._buffer.startswith(FUNCTION):
            self._opening += self._consume(len(FUNCTION))
            self._at = _At.NAME
        elif not FUNCTION.startswith(self._buffer):
            self._give_up()

    def _read_name(self) -> None:
        if (match := _NAME.match(self._buffer)) is not None and match[1].strip():
            self._consume(match.end())
            self._name = match[1].strip()
            self._start_call(self._name)
            self._opening = ""
            self._num_parameters = 0
            self._at = _At.PARAMETERS
        elif _NAME_SO_FAR.fullmatch(self._buffer) is None:
            self._give_up()

    def _read_parameters(self) -> None:
        """Up to the next parameter's value, or the function's end; anything else is dropped."""
        found = self._drop_up_to((PARAMETER, FUNCTION_END, CLOSE))
        if found is None:
            return
        place, tag = found
        if tag == PARAMETER:
            match = _NAME.match(self._buffer, place + len(tag))
            if match is not None:
                self._key = match[1].strip()
                self._consume(match.end())
                self._num_searched = 0
                self._at = _At.VALUE
            elif _NAME_SO_FAR.fullmatch(self._buffer, place + len(tag)) is None:
                self._consume(place + len(tag))
            return
        self._consume(place + (len(tag) if tag == FUNCTION_END else 0))
        self._add_arguments("}" if self._num_parameters else "{}")
        self._at = _At.END if self._is_tagged else _At.TEXT

    def _read_value(self) -> None:
        start = max(0, self._num_searched - len(PARAMETER_END))
        found = first_tag(self._buffer, (PARAMETER_END, FUNCTION_END), start)
        self._num_searched = len(self._buffer)
        if found is None:
            return
        place, tag = found
        value = self._consume(place).removeprefix("\n").removesuffix("\n")
        self._consume(len(tag) if tag == PARAMETER_END else 0)
        parameters = self._parameters.get(self._name)
        values = _ANYTHING if parameters is None else parameters[self._key]
        separator = ", " if self._num_parameters else "{"
        self._add_arguments(f"{separator}{dump_arguments(self._key)}: {values.as_json(value)}")
        self._num_parameters += 1
        self._at = _At.PARAMETERS

    def _read_end(self) -> None:
        """Within `<tool_call>`, behind a function: its end tag, or another function."""
        found = self._drop_up_to((CLOSE, OPEN, FUNCTION))
        if found is not None:
            place, tag = found
            self._consume(place + (len(tag) if tag == CLOSE else 0))
            self._at = _At.TEXT

    def _drop_up_to(self, tags: tuple[str, ...]) -> tuple[int, str] | None:
        """The first tag and its place; without one, what cannot be part of one is dropped."""
        found = first_tag(self._buffer, tags)
        if found is None:
            self._consume(len(self._buffer) - num_held_back(self._buffer, tags))
        return found

    def _give_up(self) -> None:
        self._write(self._opening)
        self._opening = ""
        self._at = _At.TEXT


_STEPS = {
    _At.TEXT: QwenXmlCallParser._read_text,
    _At.OPENED: QwenXmlCallParser._read_opened,
    _At.NAME: QwenXmlCallParser._read_name,
    _At.PARAMETERS: QwenXmlCallParser._read_parameters,
    _At.VALUE: QwenXmlCallParser._read_value,
    _At.END: QwenXmlCallParser._read_end,
}
