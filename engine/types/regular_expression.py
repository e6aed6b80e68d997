"""What a regular expression says, and how it is written so that the grammar library reads it so.

Knows characters as numbers, and sets of them as ranges. Does not read expressions
(`engine.types.expression_parser` does), and does not match anything.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

Ranges = tuple[tuple[int, int], ...]
"""Characters as sorted, separate ranges of code points, ends included."""

TOP: Final = 0x10FFFF
_SURROGATES: Final = ((0xD800, 0xDFFF),)
_NUL: Final = ((0, 0),)  # ends the grammar library's texts
ESCAPES: Final = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_ESCAPED: Final = {code: f"\\{letter}" for letter, code in ESCAPES.items()}
_SPECIAL: Final = frozenset("^$.*+?\\()[]{}|/-")
_CLASS_SPECIAL: Final = frozenset("^\\[]-")


class RegularExpressionError(ValueError):
    """An expression that cannot be held; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of these."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """One part after the other; without parts the empty text."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Choice:
    """Any of these."""

    options: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repetition:
    """A part some times over; without end if `most` is None."""

    part: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """`^` or `$`; only between reading an expression and checking where they stand."""

    mark: str
    place: int


Node = Characters | Sequence | Choice | Repetition | Anchor

EMPTY: Final = Sequence(())


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Any ranges as sorted and separate ones."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def others(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All code points but these."""
    found, start = [], 0
    for low, high in joined(ranges):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    if start <= TOP:
        found.append((start, TOP))
    return tuple(found)


@lru_cache(maxsize=1024)
def common(first: Ranges, second: Ranges) -> Ranges:
    """What two sets have in common."""
    return others((*others(first), *others(second)))


CHARACTERS: Final = others((*_SURROGATES, *_NUL))
"""What text has: everything but surrogates, and NUL."""
IN_JSON: Final = others((*_SURROGATES, (0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
"""What stands for itself in a JSON string."""


def restricted(node: Node, allowed: Ranges) -> Node | None:
    """The expression without other characters than these; None if nothing is left to match."""
    if isinstance(node, Characters):
        ranges = common(node.ranges, allowed)
        if ranges == node.ranges:
            return node
        return Characters(ranges) if ranges else None
    if isinstance(node, Sequence):
        parts = [restricted(part, allowed) for part in node.parts]
        kept = tuple(part for part in parts if part is not None)
        return Sequence(kept) if len(kept) == len(parts) else None
    if isinstance(node, Choice):
        options = (restricted(option, allowed) for option in node.options)
        left = tuple(option for option in options if option is not None)
        return Choice(left) if left else None
    assert isinstance(node, Repetition), node
    inner = restricted(node.part, allowed)
    if inner is None:
        return None if node.least else EMPTY
    return Repetition(inner, node.least, node.most)


def lengths(node: Node) -> tuple[int, int | None]:
    """Least and most characters of a match; None for no end."""
    if isinstance(node, Characters):
        return 1, 1
    if isinstance(node, Repetition):
        least, most = lengths(node.part)
        if most == 0:
            return 0, 0
        end = None if most is None or node.most is None else most * node.most
        return least * node.least, end
    assert not isinstance(node, Anchor), node
    inner = [lengths(part) for part in (node.parts if isinstance(node, Sequence) else node.options)]
    lows, highs = [low for low, _ in inner], [high for _, high in inner]
    known = [high for high in highs if high is not None]
    is_open = len(known) < len(highs)
    if isinstance(node, Sequence):
        return sum(lows), None if is_open else sum(known)
    return min(lows), None if is_open else max(known)


def simplified(node: Node) -> Node:
    """The same expression without groups, options and repetitions that say nothing."""
    if isinstance(node, Sequence):
        return _sequence_of(simplified(part) for part in node.parts)
    if isinstance(node, Choice):
        options: dict[Node, None] = {}
        for option in map(simplified, node.options):
            options |= dict.fromkeys(option.options if isinstance(option, Choice) else (option,))
        shown = tuple(option for option in options if option != EMPTY)
        if not shown:
            return EMPTY
        choice = shown[0] if len(shown) == 1 else Choice(shown)
        return choice if len(shown) == len(options) else Repetition(choice, 0, 1)
    if isinstance(node, Repetition):
        part = simplified(node.part)
        if part == EMPTY or node.most == 0:
            return EMPTY
        return part if node.least == node.most == 1 else Repetition(part, node.least, node.most)
    return node


def _sequence_of(parts: Iterable[Node]) -> Node:
    flat: list[Node] = []
    for part in parts:
        flat += part.parts if isinstance(part, Sequence) else (part,)
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def written(node: Node) -> str:
    """The expression as text that the grammar library reads as it is meant; empty for no text."""
    return _write(simplified(node))


def _write(node: Node) -> str:
    if isinstance(node, Characters):
        return _write_characters(node.ranges)
    if isinstance(node, Sequence):
        return "".join(_write_group(part, isinstance(part, Choice)) for part in node.parts)
    if isinstance(node, Choice):
        return "|".join(map(_write, node.options))
    assert isinstance(node, Repetition), node
    inner = _write_group(node.part, not isinstance(node.part, Characters))
    marks = {(0, 1): "?", (0, None): "*", (1, None): "+"}
    if (mark := marks.get((node.least, node.most))) is not None:
        return inner + mark
    if node.least == node.most:
        return f"{inner}{{{node.least}}}"
    return f"{inner}{{{node.least},{'' if node.most is None else node.most}}}"


def _write_group(node: Node, is_group: bool) -> str:
    return f"(?:{_write(node)})" if is_group else _write(node)


@lru_cache(maxsize=1024)
def _write_characters(ranges: Ranges) -> str:
    assert ranges, "no character is allowed"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _write_one(ranges[0][0], _SPECIAL)
    # Characters with a meaning in a class stand alone, and a caret not in front.
    spans: list[str] = []
    singles: list[str] = []
    for low, high in _split(ranges):
        while low <= high and low < 0x80 and chr(low) in _CLASS_SPECIAL:
            singles.append(chr(low))
            low += 1
        tail = []
        while low <= high and high < 0x80 and chr(high) in _CLASS_SPECIAL:
            tail.append(chr(high))
            high -= 1
        singles += reversed(tail)
        if low < high:
            spans.append(f"{_write_one(low, _CLASS_SPECIAL)}-{_write_one(high, _CLASS_SPECIAL)}")
        elif low == high:
            spans.append(_write_one(low, _CLASS_SPECIAL))
    singles.sort(key=lambda character: character == "^")
    escaped = "".join("\\" + single for single in singles)
    return f"[{''.join(spans)}{escaped}]"


def _split(ranges: Ranges) -> Iterable[tuple[int, int]]:
    """Ranges of characters whose UTF-8 has the same length; others are read wrongly."""
    for low, high in ranges:
        for last in (0x7F, 0x7FF, 0xFFFF):
            if low <= last < high:
                yield low, last
                low = last + 1
        yield low, high


def _write_one(code: int, special: frozenset[str]) -> str:
    if code in _ESCAPED:
        return _ESCAPED[code]
    character = chr(code)
    if character in special:
        return f"\\{character}"
    if 0x20 <= code < 0x7F:
        return character
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\u{{{code:x}}}"
