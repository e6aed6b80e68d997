"""What the engine core and the process that vets grammars say to each other, and both do alike.

Knows xgrammar's compiler as an object that it is handed; imports no grammar library.
"""

import json
import time
from types import TracebackType
from typing import Any, Final

import msgspec

MAX_WHITESPACE: Final = 10
"""Most whitespace characters in a row between the parts of JSON. A model that has begun to indent
may otherwise go on for ever."""
_MAX_MEAN_S: Final = 0.004
_NUM_BEFORE_MEAN: Final = 16
_MAX_WORST_S: Final = 0.100
_ANY_OBJECT: Final = '{"type": "object"}'


class Vocabulary(msgspec.Struct, array_like=True, gc=False):
    """The tokens' bytes as xgrammar serialises them, or why there are none."""

    info: str = ""
    failure: str = ""


class Verdict(msgspec.Struct, array_like=True, gc=False):
    """What came of trying one constraint out; an empty `failure` means that it is good."""

    failure: str = ""
    compile_ns: int = 0
    """Processor time."""
    num_bytes: int = 0


class MatchTime:
    """Processor time that a grammar takes for single tokens, and whether that is too much."""

    __slots__ = ("_begin_s", "_num", "_total_s", "_worst_s")

    def __init__(self) -> None:
        self._num = 0
        self._begin_s = self._total_s = self._worst_s = 0.0

    @property
    def is_too_long(self) -> bool:
        """Whether following this grammar would hold everybody's steps up.

        What is bad grows with the text, token by token, so that it is noticed before it is long.
        """
        mean_s = self._total_s / max(1, self._num)
        return self._worst_s > _MAX_WORST_S or (
            self._num >= _NUM_BEFORE_MEAN and mean_s > _MAX_MEAN_S
        )

    def __enter__(self) -> None:
        self._begin_s = time.thread_time()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        taken_s = time.thread_time() - self._begin_s
        self._num += 1
        self._total_s += taken_s
        self._worst_s = max(self._worst_s, taken_s)


def compile_constraint(compiler: Any, kind: str, text: str, *, disable_any_whitespace: bool) -> Any:
    """The constraint as a compiled grammar; raises what xgrammar's `GrammarCompiler` raises.

    Args:
        compiler: a `GrammarCompiler`.
        kind: one of `engine.types.structured_outputs.KINDS`.
        text: the constraint; of a choice, its JSON list.
        disable_any_whitespace: see `StructuredOutputsParams`.
    """
    if kind in ("json", "json_object"):
        schema = text if kind == "json" else _ANY_OBJECT
        if disable_any_whitespace:
            return compiler.compile_json_schema(schema, any_whitespace=False)
        return compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "choice":
        return compiler.compile_grammar(choice_grammar(json.loads(text)))
    if kind == "structural_tag":
        return compiler.compile_structural_tag(text)
    assert kind == "grammar", kind
    return compiler.compile_grammar(text)


def choice_grammar(choices: list[str]) -> str:
    """The EBNF grammar of a few literal texts."""
    return "root ::= " + " | ".join(f'"{_escaped(choice)}"' for choice in choices)


def _escaped(text: str) -> str:
    """A text as it stands within an EBNF literal."""
    return "".join(
        character
        if " " <= character <= "~" and character not in '"\\'
        else f"\\U{ord(character):08x}"
        for character in text
    )
