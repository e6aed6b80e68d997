"""What the engine core and the grammar process say to each other, and what both do alike.

Knows xgrammar's compiler as an object that it is handed; imports no grammar library.
"""

import json
import time
from types import TracebackType
from typing import Any, Final

import msgspec

from engine.types.grammar_text import (
    PROBE_SCHEMA,
    expression_grammar,
    is_known_print,
    repaired,
)
from instrumentation import GrammarOutcome

GrammarKey = tuple[str, str, bool]
"""Kind, text, disable_any_whitespace."""

MAX_WHITESPACE: Final = 10
"""Most whitespace characters in a row between the parts of JSON. A model that has begun to indent
may otherwise go on for ever."""
_MAX_MEAN_S: Final = 0.004
_NUM_BEFORE_MEAN: Final = 16
_MAX_WORST_S: Final = 0.100
QUICK_NS: Final = 250_000_000
"""What compiles within that time, the core compiles again: reading it could take longer."""
WALL_FACTOR: Final = 4
"""How many times the processor time that it may take a constraint may last: steps go first."""
_ANY_OBJECT: Final = '{"type": "object"}'


class Vocabulary(msgspec.Struct, array_like=True, gc=False):
    """The tokens' bytes as xgrammar serialises them, or why there are none."""

    info: str = ""
    failure: str = ""


class CompileRequest(msgspec.Struct, array_like=True, gc=False):
    """A constraint to try out, or one that nobody wants any more."""

    number: int
    """The core's, never used again."""
    key: GrammarKey | None = None
    """None where the constraint of that number is withdrawn; it then gets no result."""


class CompileResult(msgspec.Struct, array_like=True, gc=False):
    """What came of trying one constraint out."""

    number: int
    """Its request's."""
    outcome: GrammarOutcome
    failure: str = ""
    """Why it was not compiled; empty if it was."""
    duration_ns: int = 0
    """Time spent on it, that of tries that were cut short included, waiting for others not."""
    compile_ns: int = 0
    """Processor time of compiling, trying out not included."""
    num_bytes: int = 0
    grammar: str = ""
    """The compiled grammar as xgrammar serialises it; empty where it is to be compiled again."""


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
    if kind == "regex":
        return compiler.compile_grammar(expression_grammar(text))
    if kind in ("json", "json_object") or (kind == "structural_tag" and "schema" in text):
        schema = _ANY_OBJECT if kind == "json_object" else text
        return compiler.compile_grammar(repaired(_printed(kind, schema, disable_any_whitespace)))
    if kind == "choice":
        return compiler.compile_grammar(choice_grammar(json.loads(text)))
    if kind == "structural_tag":
        return compiler.compile_structural_tag(text)
    assert kind == "grammar", kind
    return compiler.compile_grammar(text)


def _printed(kind: str, text: str, disable_any_whitespace: bool) -> str:
    """The grammar that the library makes of a schema or a structural tag, as EBNF."""
    from xgrammar import Grammar  # which the compiler's process has loaded

    if kind == "structural_tag":
        return str(Grammar.from_structural_tag(text))
    if disable_any_whitespace:
        return str(Grammar.from_json_schema(text, any_whitespace=False))
    return str(Grammar.from_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE))


def check_library() -> None:
    """See to it that what the library makes of schemas can be repaired.

    Raises:
        RuntimeError: it is a version that prints grammars otherwise.
    """
    for is_compact in (False, True):
        if not is_known_print(_printed("json", PROBE_SCHEMA, is_compact)):
            raise RuntimeError(
                "this version of xgrammar prints grammars in a form that is not known, so that "
                "schemas would not be held; install one that this package's requirements allow"
            )


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
