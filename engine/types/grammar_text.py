"""Grammars as text (EBNF), where the grammar library by itself would let through too much.

Knows how the library prints the grammar that it makes of a JSON schema. In it strings of a bounded
length may hold control characters, all strings surrogates, and expressions are automata that let
through text that does not match (optional groups with repetitions in them) and bytes that are no
UTF-8. `repaired` puts rules in their place, which it knows by how they are printed, so that
`is_known_print` has to be asked once about the library; `expression_grammar` makes some of an
expression alone.
"""

import re
from typing import Final

from engine.types.expression_parser import MAX_WRITTEN_LENGTH, parse
from engine.types.key_rules import exclusive, is_exclusive
from engine.types.regular_expression import (
    Characters,
    Choice,
    Node,
    Ranges,
    RegularExpressionError,
    Repetition,
    Sequence,
    simplified,
)

_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]', re.DOTALL)
"""A literal or a class."""
_BOUNDED: Final = r"[^\"\\\r\n]"
"""A character of a string of a bounded length, as the library has it."""
_OPEN: Final = r"[^\0-\x1f\"\\\r\n"
"""A character of any other string, or key; what more it excludes may follow."""
_PLAIN: Final = r"[^\0-\x1f\"\\\ud800-\udfff"
"""As JSON and UTF-8 have it."""
_HEX: Final = "[A-Fa-f0-9]"
_ESCAPE: Final = rf'(([\"\\/bfnrt]) | ("u" {_HEX} {_HEX} {_HEX} {_HEX}))'
_PAIRED: Final = (
    rf'(([\"\\/bfnrt]) | ("u" [A-Ca-cEeFf0-9] {_HEX} {_HEX} {_HEX})'
    rf' | ("u" [Dd] [0-7] {_HEX} {_HEX})'
    rf' | ("u" [Dd] [89ABab] {_HEX} {_HEX} "\\u" [Dd] [C-Fc-f] {_HEX} {_HEX}))'
)
"""What may follow a backslash: surrogates in pairs only."""
_EXPRESSION: Final = re.compile(
    r'^(\S+) ::= Regex\("((?:[^"\\]|\\[^a-zA-Z0-9])*)", json_string=true\)$', re.MULTILINE
)

PROBE_SCHEMA: Final = (
    '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 2}, "é": {}, '
    '"c": {"type": "string", "pattern": "(?:ab*)?c"}}, "additionalProperties": {"type": "string"}}'
)
"""In whose grammar is all that `repaired` replaces."""

_ESCAPED: Final = re.compile(r"\\(.)")


def repaired(grammar: str) -> str:
    """The printed grammar of a schema, so that all that it lets through fits the schema."""
    grammar = exclusive(grammar).replace(_ESCAPE, _PAIRED)
    grammar = _TOKEN.sub(lambda token: _character(token[0]), grammar)
    prefix = "expression"
    while prefix in grammar:
        prefix += "_"
    more: list[str] = []

    def replace(match: re.Match[str]) -> str:
        try:
            node = parse(_ESCAPED.sub(r"\1", match[2]), longest=MAX_WRITTEN_LENGTH)
        except RegularExpressionError:
            return match[0]  # of a grammar within a structural tag: its author's
        rules = _rules(match[1], node, f"{prefix}{len(more)}")
        more.append("")
        return "\n".join(rules)

    return _EXPRESSION.sub(replace, grammar)


def is_known_print(grammar: str) -> bool:
    """Whether the printed grammar of `PROBE_SCHEMA` has nothing left open once it is repaired."""
    left = repaired(grammar)
    classes = [token for token in _TOKEN.findall(left) if token.startswith("[^")]
    return (
        _BOUNDED in _TOKEN.findall(grammar)
        and _EXPRESSION.search(grammar) is not None
        and _PAIRED in left
        and "Regex(" not in left
        and is_exclusive(left)
        and all(token.startswith(_PLAIN) for token in classes)
    )


def _character(token: str) -> str:
    if token == _BOUNDED:
        return f"{_PLAIN}]"
    return _PLAIN + token[len(_OPEN) :] if token.startswith(_OPEN) else token


def expression_grammar(text: str) -> str:
    """The grammar of an expression, which matches whole texts.

    Raises:
        RegularExpressionError: it is none, or asks for what cannot be held.
    """
    return "\n".join(_rules("root", parse(text, longest=MAX_WRITTEN_LENGTH), "part"))


def _rules(name: str, node: Node, prefix: str) -> list[str]:
    """Rules of which the one of that name is the expression; others' names have the prefix."""
    parts: list[str] = []
    body = _body(simplified(node), prefix, parts)
    return [f"{name} ::= {body}", *parts]


def _body(node: Node, prefix: str, rules: list[str]) -> str:
    if isinstance(node, Characters):
        return _one_of(node.ranges)
    if isinstance(node, Choice):
        return f"({' | '.join(_body(option, prefix, rules) for option in node.options)})"
    if isinstance(node, Sequence):
        return " ".join(_items(node, prefix, rules)) or '""'
    assert isinstance(node, Repetition), node
    body = _body(node.part, prefix, rules)
    if isinstance(node.part, Characters) and node.least == 0 and node.most is None:
        return f"{body}*"
    # A rule of its own is what the library repeats quickly.
    name = f"{prefix}_{len(rules)}"
    rules.append(f"{name} ::= ({body})")
    return f"{name}{{{node.least}, {-1 if node.most is None else node.most}}}"


def _items(node: Sequence, prefix: str, rules: list[str]) -> list[str]:
    """The parts of a sequence; characters that follow each other become one literal."""
    items: list[str] = []
    literal = ""
    for part in node.parts:
        if isinstance(part, Characters) and _is_single(part.ranges):
            literal += _escape(part.ranges[0][0])
            continue
        if literal:
            items.append(f'"{literal}"')
            literal = ""
        items.append(_body(part, prefix, rules))
    return [*items, f'"{literal}"'] if literal else items


def _one_of(ranges: Ranges) -> str:
    if _is_single(ranges):
        return f'"{_escape(ranges[0][0])}"'
    spans = (
        _escape(low) if low == high else f"{_escape(low)}-{_escape(high)}" for low, high in ranges
    )
    return f"[{''.join(spans)}]"


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _escape(code: int) -> str:
    """A character within a literal or a class."""
    character = chr(code)
    if code < 0x80 and character.isalnum():
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
