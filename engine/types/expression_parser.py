"""Reads regular expressions: `parse`.

Knows the syntax that Python's `re` and ECMA-262 share, and refuses what they read differently, what
no regular grammar can hold, and what the grammar library would ignore.
"""

import re
import string
from functools import lru_cache
from typing import Final, NoReturn

from engine.types.regular_expression import (
    CHARACTERS,
    EMPTY,
    ESCAPES,
    TOP,
    Anchor,
    Characters,
    Choice,
    Node,
    Ranges,
    RegularExpressionError,
    Repetition,
    Sequence,
    common,
    joined,
    others,
    written,
)

MAX_LENGTH: Final = 32_768
"""Longest expression, in characters."""
MAX_WRITTEN_LENGTH: Final = 8 * MAX_LENGTH
"""Longest that it may be once it is written as it is held, where `\\S` is a long list."""
MAX_DEPTH: Final = 50
"""How deep groups may be nested."""
MAX_COUNT_DIGITS: Final = 6

_DIGITS: Final = ((0x30, 0x39),)
_WORDS: Final = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES: Final = ((0x09, 0x0D), (0x20, 0x20))
_ALL_SPACES: Final = (
    *((0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680)),
    *((0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F)),
    *((0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_LINE_ENDS: Final = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CLASS_ESCAPES: Final = {
    "d": _DIGITS,
    "w": _WORDS,
    "s": _SPACES,
    "D": others(_DIGITS),
    "W": others(_WORDS),
    "S": others(_ALL_SPACES),
}
_COUNTS: Final = re.compile(r"\{([0-9,]+)\}")
_RUN: Final = re.compile(r"[^\\^$.*+?()\[\]{}|\x00\ud800-\udfff]+(?![*+?{])")
"""Characters that stand for themselves, the last of which is not repeated."""
_ANY: Final = Characters(common(others(_LINE_ENDS), CHARACTERS))


def parse(text: str, *, longest: int = MAX_LENGTH) -> Node:
    """An expression that matches a whole text; anchors at its ends are taken off.

    `\\d`, `\\w` and their opposites are ASCII's, as ECMA-262 has them; a dot is no line end.

    Raises:
        RegularExpressionError: it is none, or asks for what cannot be held.
    """
    return _Parser(text).parse(longest)


def rewritten(node: Node) -> str:
    """The text of an expression as it is held.

    Raises:
        RegularExpressionError: it is too long.
    """
    text = written(node)
    if len(text) > MAX_WRITTEN_LENGTH:
        raise RegularExpressionError(
            f"it takes {len(text)} characters once its classes are written out, and may take "
            f"{MAX_WRITTEN_LENGTH}; use fewer dots and negated classes, or repeat them by counts"
        )
    return text


@lru_cache(maxsize=1024)
def _literal(character: str) -> Characters:
    return Characters(((ord(character), ord(character)),))


class _Parser:
    """Reads one expression, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def parse(self, longest: int) -> Node:
        if len(self._text) > longest:
            self._fail(f"an expression may have {longest} characters, not {len(self._text)}")
        node = self._choice()
        if self._at < len(self._text):
            self._fail("')' closes nothing")
        return self._unanchored(node, is_first=True, is_last=True)

    def _unanchored(self, node: Node, *, is_first: bool, is_last: bool) -> Node:
        """The expression without anchors, all of which must say what is so anyway.

        Args:
            is_first: nothing but anchors stands before it.
            is_last: nothing but anchors stands behind it.
        """
        if isinstance(node, Anchor):
            if not (is_first if node.mark == "^" else is_last):
                where = "beginning" if node.mark == "^" else "end"
                self._fail(f"'{node.mark}' can only be held at the {where}", node.place)
            return EMPTY
        if isinstance(node, Choice):
            found = (self._unanchored(o, is_first=is_first, is_last=is_last) for o in node.options)
            return Choice(tuple(found))
        if isinstance(node, Repetition):
            inner = self._unanchored(node.part, is_first=False, is_last=False)
            return Repetition(inner, node.least, node.most)
        if not isinstance(node, Sequence):
            return node
        solid = [at for at, part in enumerate(node.parts) if not isinstance(part, Anchor)]
        first, last = (solid[0], solid[-1]) if solid else (len(node.parts), -1)
        parts = [
            self._unanchored(
                part, is_first=is_first and at <= first, is_last=is_last and at >= last
            )
            for at, part in enumerate(node.parts)
        ]
        parts = [part for part in parts if part != EMPTY]
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _choice(self) -> Node:
        """Options up to the group's end."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"groups must not be nested deeper than {MAX_DEPTH}")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if (run := _RUN.match(self._text, self._at)) is not None:
                parts += map(_literal, run[0])
                self._at = run.end()
            else:
                parts.append(self._repeated())
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self) -> Node:
        start = self._at
        node = self._atom()
        counts = self._counts()
        if counts is None:
            return node
        if isinstance(node, Anchor):
            self._fail("there is nothing to repeat", start)
        self._take("?")  # as few as possible: which texts match is the same
        if self._at_mark("+") or self._counts() is not None:
            self._fail("a repetition cannot be repeated, nor be possessive; use a group")
        least, most = counts
        if most is not None and most < least:
            self._fail("a repetition's least is above its most", start)
        return Repetition(node, least, most)

    def _counts(self) -> tuple[int, int | None] | None:
        if self._take("*"):
            return 0, None
        if self._take("+"):
            return 1, None
        if self._take("?"):
            return 0, 1
        found = _COUNTS.match(self._text, self._at)
        if found is None:
            return None  # no brace, or one that is a character
        least, comma, most = found[1].partition(",")
        if not least or "," in most or max(len(least), len(most)) > MAX_COUNT_DIGITS:
            self._fail("a repetition must be {n}, {n,} or {n,m}")
        self._at = found.end()
        return int(least), (int(most) if most else None) if comma else int(least)

    def _atom(self) -> Node:
        character = self._text[self._at]
        if character == "(":
            return self._group()
        if character in "*+?" or (character == "{" and self._counts() is not None):
            self._fail("there is nothing to repeat", self._at)
        if character == "[":
            return self._class()
        if character == "\\":
            return Characters(common(self._escape(in_class=False), CHARACTERS))
        self._at += 1
        if character in "^$":
            return Anchor(character, self._at - 1)
        if character == ".":
            return _ANY
        return Characters(self._one(ord(character)))

    def _group(self) -> Node:
        start = self._at
        self._at += 1
        if self._take("?"):
            rest = self._text[self._at : self._at + 2]
            if rest[:1] in ("=", "!") or rest in ("<=", "<!"):
                self._fail("lookaheads and lookbehinds cannot be held", start)
            if rest[:1] != ":" and rest != "P<" and rest[:1] != "<":
                self._fail(
                    "of groups that begin with '(?' only (?:…) and named ones can be held", start
                )
            if not self._take(":"):
                self._take("P")
                end = self._text.find(">", self._at)
                if end < 0 or not self._text[self._at + 1 : end].isidentifier():
                    self._fail("a group's name must be a word between '<' and '>'", start)
                self._at = end + 1
        node = self._choice()
        if not self._take(")"):
            self._fail("the group has no end", start)
        return node

    def _class(self) -> Node:
        start = self._at
        self._at += 1
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        if self._at_mark("]"):
            self._fail("a class must not be empty; write \\] for a bracket", start)
        while not self._take("]"):
            if self._at >= len(self._text):
                self._fail("the class has no end", start)
            if self._text.startswith(("[:", "[.", "[="), self._at):
                self._fail("classes such as [:alpha:] are not known; use ranges, such as a-z")
            low = self._class_item()
            if self._at_mark("-") and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._class_item() if self._at < len(self._text) else ()
                self._check_range(low, high, start)
                ranges.append((low[0][0], high[0][1]))
            else:
                ranges += low
        found = joined(ranges)
        found = common(others(found) if is_negated else found, CHARACTERS)
        if not found:
            self._fail("no character is in the class", start)
        return Characters(found)

    def _check_range(self, low: Ranges, high: Ranges, start: int) -> None:
        if not all(len(end) == 1 and end[0][0] == end[0][1] for end in (low, high)):
            self._fail("a range goes from one character to another; write \\- for a hyphen", start)
        if low[0][0] > high[0][0]:
            self._fail("a range begins behind its end", start)

    def _class_item(self) -> Ranges:
        if self._at_mark("\\"):
            return self._escape(in_class=True)
        self._at += 1
        return self._one(ord(self._text[self._at - 1]))

    def _escape(self, *, in_class: bool) -> Ranges:
        start = self._at
        letter = self._text[start + 1 : start + 2]
        self._at += 2
        if not letter:
            self._fail("the escape has no end", start)
        if letter in _CLASS_ESCAPES:
            return _CLASS_ESCAPES[letter]
        if letter in ESCAPES:
            return self._one(ESCAPES[letter])
        if letter == "b" and in_class:
            return self._one(8)
        if letter in "ux":
            return self._one(self._hexadecimal(letter, start))
        if letter == "c" and self._text[self._at : self._at + 1] in set(string.ascii_letters):
            self._at += 1
            return self._one(ord(self._text[self._at - 1]) % 32)
        if letter in string.digits or letter == "k":
            self._fail("backreferences, and octal numbers, cannot be held", start)
        if letter in string.ascii_letters:
            self._fail(f"the escape \\{letter} is not supported", start)
        return self._one(ord(letter))

    def _hexadecimal(self, letter: str, start: int) -> int:
        if letter == "u" and self._take("{"):
            end = self._text.find("}", self._at)
            code = self._number(self._text[self._at : max(self._at, end)][:7], start)
            self._at = end + 1
            return code
        length = 4 if letter == "u" else 2
        digits = self._text[self._at : self._at + length]
        if len(digits) < length:
            self._fail(f"\\{letter} needs {length} hexadecimal digits", start)
        self._at += length
        code = self._number(digits, start)
        if 0xD800 <= code < 0xDC00 and self._text.startswith("\\u", self._at):
            low = self._text[self._at + 2 : self._at + 6]
            if len(low) == 4 and 0xDC00 <= self._number(low, start) < 0xE000:
                self._at += 6
                return 0x10000 + ((code - 0xD800) << 10) + int(low, 16) - 0xDC00
        return code

    def _number(self, digits: str, start: int) -> int:
        if not digits or not set(digits) <= set(string.hexdigits):
            self._fail("\\x and \\u need hexadecimal digits", start)
        return int(digits, 16)

    def _one(self, code: int) -> Ranges:
        if 0xD800 <= code <= 0xDFFF or code > TOP:
            self._fail("surrogates are no characters; write \\u{…}, or the character itself")
        if code == 0:
            self._fail("the NUL character is not supported")
        return ((code, code),)

    def _at_mark(self, mark: str) -> bool:
        return self._text.startswith(mark, self._at)

    def _take(self, mark: str) -> bool:
        if not self._at_mark(mark):
            return False
        self._at += len(mark)
        return True

    def _fail(self, message: str, at: int | None = None) -> NoReturn:
        place = self._at if at is None else at
        near = self._text[max(0, place - 10) : place + 10]
        raise RegularExpressionError(f"{message} (character {place + 1}, near {near!r})")
