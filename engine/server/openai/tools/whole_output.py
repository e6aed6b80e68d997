"""Answers that are nothing but calls: what a required or a named `tool_choice` gives.

Knows that the output was held to its form, so that it has no content beside calls.
"""

from typing import Any

from engine.server.openai.tools.call_parser import CallParser
from engine.server.openai.tools.json_calls import JsonCallParser, JsonSyntax


class NamedCallParser(CallParser):
    """All text is the arguments of a call of one function; there is a call even without text."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(**options)
        self._name = name

    @property
    def _is_open(self) -> bool:
        return False  # it cannot be told: the function may take anything

    def _step(self, *, is_final: bool) -> bool:
        if not self._num_seen:
            self._skip_space()
            if not (self._buffer or is_final):
                return False
            self._start_call(self._name)
        # White space at the end waits, and is dropped if nothing follows.
        shown = self._buffer.rstrip()
        self._add_arguments(self._consume(len(shown)))
        if is_final:
            self._consume(len(self._buffer))
        return False


class RequiredCallParser(JsonCallParser):
    """Reads the list of calls that `tools.choice.required_schema` describes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(JsonSyntax(is_bare=True), **options)

    def _write(self, text: str) -> None:
        """Content is what was cut off before there was a call; beside calls nothing is."""
        if not self._num_seen:
            super()._write(text)
