"""Grammars in the library's dialect of Lark, put together rule by rule. Knows no format of ours.

`grammar_of_text` tells Lark and GBNF apart as vLLM's guidance backend does.
"""

import json
import re
from typing import Any, Final

ANY_TEXT: Final = "/(?s:.*)/"
_GBNF_SIGN: Final = "::="
_NO_RULE: Final = re.compile(r'#|//|"')
"""What a comment, or a literal, begins with."""

_PARTS: Final = re.compile(
    r"(?P<around>\(\?<?[=!])|(?P<edge>\\[bB])|(?P<back>\\[1-9k])"
    r"|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.",
    re.DOTALL,
)
"""The parts of an expression, of which classes are one each."""
_FLAWS: Final = {
    "around": "lookaheads and lookbehinds",
    "edge": "word boundaries",
    "back": "backreferences",
}


class LarkError(ValueError):
    """A grammar's text that cannot be brought into Lark."""


def quoted(text: str) -> str:
    """A literal."""
    return json.dumps(text, ensure_ascii=False)


def expression(pattern: str) -> str:
    r"""A regular expression in Rust's syntax; `\d` and `\w` are ASCII's, as in ECMA-262."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, use_ascii='dw')}/"


def flaw_of(pattern: str) -> str:
    """What the library has not got that an expression asks for; empty if nothing is seen.

    What else is wrong with an expression is found where it is compiled.
    """
    for found in _PARTS.finditer(pattern):
        for name, flaw in _FLAWS.items():
            if found[name]:
                return f"{flaw} are not supported ({found[0]!r} at character {found.start() + 1})"
    return ""


def text_without(excludes: list[str]) -> str:
    """Any text in which none of these is found, as a terminal's expression."""
    if not excludes:
        return ANY_TEXT
    found = " | ".join(map(quoted, dict.fromkeys(excludes)))
    return f"({ANY_TEXT} & ~({ANY_TEXT} ({found}) {ANY_TEXT}))"


def grammar_of_text(text: str) -> str:
    """A user's grammar as Lark: it is Lark unless a line says `::=` as GBNF's rules do.

    Raises:
        LarkError: GBNF that is malformed, or refers to a rule that there is not.
    """
    if not any(_GBNF_SIGN in _NO_RULE.split(line, maxsplit=1)[0] for line in text.splitlines()):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except (Exception, RecursionError) as error:  # it raises bare exceptions
        raise LarkError(str(error) or type(error).__name__) from error


class Rules:
    """The rules of one grammar, and other grammars that they refer to."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._others: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule; returns its name."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal, which is one regular expression; returns its name."""
        name = f"T{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def schema(self, schema: dict[str, Any]) -> str:
        """Add a JSON schema; returns its rule's name."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def grammar(self, text: str) -> str:
        """Add a user's grammar as one of its own; returns the reference to it."""
        self._others.append(text)
        return f"@g{len(self._others) - 1}"

    def text(self, start: str) -> str:
        """The whole as the library reads it.

        Raises:
            LarkError: see `grammar_of_text`.
        """
        lark = "\n".join([f"start: {start}", *self._lines])
        others = [
            {"name": f"g{index}", "lark_grammar": grammar_of_text(one)}
            for index, one in enumerate(self._others)
        ]
        return json.dumps({"grammars": [{"name": "all", "lark_grammar": lark}, *others]})
