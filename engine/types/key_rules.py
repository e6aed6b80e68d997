"""Rules for the keys that an object may have beside those with a name of their own.

Knows how the grammar library prints them: as a tree of the named keys' bytes, which begins a rule
at each, and lets through what leaves the tree. A byte of several stands there as the character of
that number, so that names beyond ASCII exclude nothing; and a backslash leaves the tree wherever it
is, so that an escape spells any name. `exclusive` puts that right. Knows nothing of other rules.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_FIRST: Final = re.compile(r'^\S+_addl_key ::= \(\("\\"" (\S+)\)\)', re.MULTILINE)
_CLASS: Final = r"[^\0-\x1f\"\\\r\n"
_RULE: Final = re.compile(
    r'^(?P<name>\S+_addl_key_\d+) ::= \((?P<end>\("\\""\) \| )?'
    r"\(\[\^\\0-\\x1f\\\"\\\\\\r\\n(?:[^\]\\]|\\.)*\] (?P<rest>\S+)\)"
    r' \| \("\\\\" \S+ (?P=rest)\)(?P<more>(?: \| \("(?:[^"\\]|\\.[^"]*)" \S+\))*)\)$',
    re.MULTILINE,
)
_MAX_BYTES: Final = 4
"""Of a character in UTF-8."""
_BRANCH: Final = re.compile(r'\("([^"\\]|\\.[^"]*)" (\S+?)\)')


class _Rule(NamedTuple):
    """What the library has for one place in the tree."""

    end: str
    """The alternative that ends the key, if no name ends here."""
    rest: str
    """The rule for what comes when the tree has been left."""
    branches: list[tuple[int, str]]
    """A byte, and the rule behind it."""


def exclusive(grammar: str) -> str:
    """The printed grammar, so that no key beside named ones is one of them, however it is spelled.

    Of escapes such keys have the necessary ones only, which no name has where there are such keys.
    """
    rules = {
        match["name"]: _Rule(
            match["end"] or "",
            match["rest"],
            [(_byte(byte), name) for byte, name in _BRANCH.findall(match["more"])],
        )
        for match in _RULE.finditer(grammar)
    }
    left = _FIRST.findall(grammar)
    within: dict[str, str] = {}
    written: dict[str, str] = {}
    while left:
        name = left.pop()
        if name in written or name not in rules:
            continue  # of a grammar within a structural tag, which may have any rules
        children = list(_characters(rules[name].branches, b"", rules, within))
        written[name] = _written(name, rules[name], children)
        left += [child for _, child in children]
    # To rules within a character nothing refers any more.
    written = within | written
    return _RULE.sub(lambda match: written.get(match["name"], match[0]), grammar)


def is_exclusive(grammar: str) -> bool:
    """Whether no other key of such a grammar is `é`, which it names, however it is spelled."""
    keys = "\n".join(line for line in grammar.split("\n") if "_addl_key_" in line.split(" ")[0])
    return _escape("é") in keys and "_escape" not in keys


def _byte(literal: str) -> int:
    return int(literal[2:], 16) if literal.startswith(r"\x") else ord(literal[-1])


def _characters(
    branches: list[tuple[int, str]], begun: bytes, rules: dict[str, _Rule], within: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Each character that goes on in the tree, and the rule behind it; names what is within one."""
    for byte, name in branches:
        encoded = begun + bytes([byte])
        try:
            yield encoded.decode(), name
        except UnicodeDecodeError:
            if name in rules and len(encoded) < _MAX_BYTES:
                within[name] = ""
                yield from _characters(rules[name].branches, encoded, rules, within)


def _written(name: str, rule: _Rule, children: list[tuple[str, str]]) -> str:
    escapes = [_escape(character) for character, _ in children]
    parts = [
        f"({_CLASS}{''.join(escapes)}] {rule.rest})",
        rf'("\\" [\"\\bfnrt] {rule.rest})',
        *(f'("{escape}" {child})' for escape, (_, child) in zip(escapes, children, strict=True)),
    ]
    return f"{name} ::= ({rule.end}{' | '.join(parts)})"


def _escape(character: str) -> str:
    return f"\\U{ord(character):08x}"
