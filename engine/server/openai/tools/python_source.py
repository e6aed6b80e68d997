"""Python as models write it: the tree of an expression, and the values of literals.

Nothing is evaluated. Models write Python without having to run it, so two things are read that
Python itself refuses: its keywords as names, and line ends within a string.
"""

import ast
import keyword
import re
import warnings
from collections.abc import Collection
from typing import Any

_JSON_WORDS = {"true": True, "false": False, "null": None}

_STRING = (
    r"""(?P<raw>(?:\b[rR])?)(?P<quote>'{3}|"{3}|['"])"""
    r"(?P<inside>(?:\\.|(?!(?P=quote))[^\\])*+)(?P=quote)"
)
_KEY = rf"(?P<before>[(,]\s*)(?P<key>{'|'.join(keyword.kwlist)})(?=\s*=(?!=))"
_FUNCTION = r"(?<![\w.])(?P<function>[A-Za-z_][\w.]*)(?=\s*\()"
_UNFINISHED = r"['\"].*"
"""A string without an end, so that its end is not searched for again from within it."""
_PARTS = re.compile("|".join((_STRING, _UNFINISHED, _KEY, _FUNCTION)), re.DOTALL)
_LINE_END = re.compile(r"\\(?:\r\n|.)|[\r\n]", re.DOTALL)
_ESCAPES = {"\n": "\\n", "\r": "\\r"}
_TO_WIDE = 0xFEE0
"""From a letter to its full-width form."""


def parse_python(text: str, functions: Collection[str] = ()) -> ast.expr:
    """The tree of an expression; no warning of odd escapes gets out.

    Args:
        functions: names that may be called although parts of them are keywords.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it is no Python, or nested too deep.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text.strip(), mode="eval").body
        except SyntaxError:
            allowed = _allowed(text, functions)
            if allowed == text:
                raise
            return ast.parse(allowed.strip(), mode="eval").body


def _allowed(text: str, functions: Collection[str]) -> str:
    """The text with keywords as names, and with line ends in strings, put so that Python has it."""

    def put(part: re.Match[str]) -> str:
        if part["key"]:
            return part["before"] + _as_name(part["key"])
        if part["function"]:
            name = part["function"]
            return ".".join(map(_as_name, name.split("."))) if name in functions else name
        raw, quote, inside = part.group("raw", "quote", "inside")
        if quote is None or len(quote) > 1 or not ("\n" in inside or "\r" in inside):
            return part[0]
        if raw:
            return f"{raw}{quote * 3}{inside}{quote * 3}"
        return f"{quote}{_LINE_END.sub(lambda end: _ESCAPES.get(end[0], end[0]), inside)}{quote}"

    return _PARTS.sub(put, text)


def _as_name(word: str) -> str:
    """A keyword as a name: Python tells keywords by their letters, but names by what NFKC makes."""
    return chr(ord(word[0]) + _TO_WIDE) + word[1:] if keyword.iskeyword(word) else word


def read_literal(node: ast.expr) -> Any:
    """The value of a literal that JSON has, too; its words for true, false and null are understood.

    Raises:
        ValueError: it is anything else.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [read_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        items = zip(node.keys, node.values, strict=True)
        return {_key(key): read_literal(value) for key, value in items}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = read_literal(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("keys must be strings")
