"""What JSON schema says of one value: its type, a number's bounds, a string's form.

Knows which of these demands the grammar library holds and how the others are put so that it does.
Does not know where schemas stand within schemas.
"""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import lru_cache
from typing import Any, Final

from engine.types.expression_parser import parse, rewritten
from engine.types.regular_expression import (
    IN_JSON,
    Characters,
    Node,
    RegularExpressionError,
    Repetition,
    common,
    lengths,
    others,
    restricted,
    simplified,
)

Schema = dict[str, Any]

KEYWORDS: Final = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern"),
    "array": (
        *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
        "unevaluatedItems",
    ),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
    ),
}
"""Keywords that say something of values of one type only."""

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")

MAX_STEPS: Final = 300_000
_SCHEMA_STEPS: Final = 8
_CHARACTER_STEPS: Final = 8
_PATTERN_CHARACTERS: Final = 4
"""How many of a pattern's characters take as long as what else is done with it."""

MAX_INTEGER: Final = 2**63 - 1
_MAX_NUMBER: Final = 10**15
_NUM_DECIMALS: Final = 6
"""Of a number's bounds."""
_MAX_MULTIPLE: Final = 1024
_MAX_MULTIPLE_WIDTH: Final = 10_000

_DAY: Final = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
_ZONE: Final = r"(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL: Final = r"[a-z0-9]{1,20}(?:-[a-z0-9]{1,20}){0,2}"
_FORMATS: Final = {
    "date": rf"[0-9]{{4}}-{_DAY}",
    "time": _TIME + _ZONE,
    "date-time": rf"[0-9]{{4}}-{_DAY}T{_TIME}{_ZONE}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
    "email": r"[A-Za-z0-9_]{1,20}(?:[.+\-][A-Za-z0-9_]{1,20}){0,2}@"
    rf"{_LABEL}(?:\.{_LABEL}){{1,3}}",
}
"""Formats for which the grammar library has expressions that let through what is none."""


class SchemaError(ValueError):
    """A demand that cannot be held.

    Attributes:
        path: where in the schema, such as `.properties.a`; empty for the whole.
        message: what is wrong, and what to do.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path.removeprefix('.') or 'the schema'}: {message}")
        self.path = path
        self.message = message


class Budget:
    """The work that checking one request's schemas may take, in steps of about a microsecond.

    References let few bytes ask for much, so that it is counted where it is done.

    Attributes:
        num_left: steps that may still be taken.
    """

    __slots__ = ("num_left",)

    def __init__(self, num_steps: int = MAX_STEPS) -> None:
        self.num_left = num_steps

    def spend(self, num_steps: int, path: str) -> None:
        """Take some steps at a place.

        Raises:
            SchemaError: there are not as many left.
        """
        self.num_left -= num_steps
        if self.num_left < 0:
            raise SchemaError(
                path,
                "checking it would take too long; use fewer or shorter schemas, references, "
                "values and patterns",
            )


def num_steps_of(schema: Schema) -> int:
    """What it takes to check a schema, those within it left out."""
    num_steps = _SCHEMA_STEPS + len(schema)
    for value in schema.values():
        if isinstance(value, dict | list):
            num_steps += len(value)
    patterns = [*schema.get("patternProperties", ())]
    if "pattern" in schema:
        patterns.append(schema["pattern"])
    return num_steps + sum(map(num_pattern_steps, patterns))


def num_pattern_steps(pattern: str) -> int:
    """What it takes to check an expression."""
    return _CHARACTER_STEPS * (len(pattern) + _PATTERN_CHARACTERS)


def types_of(schema: Schema, path: str) -> list[str] | None:
    """The types that a schema names, or that its keywords speak of; None if it speaks of none."""
    given = schema.get("type")
    if given is not None:
        return given if isinstance(given, list) else [given]
    groups = [name for name, words in KEYWORDS.items() if any(word in schema for word in words)]
    if len(groups) > 1:
        first = [next(w for w in KEYWORDS[name] if w in schema) for name in groups]
        raise SchemaError(
            path,
            f"{' and '.join(map(repr, first))} speak of values of different types; "
            "say which with 'type'",
        )
    return groups or None


def common_types(first: list[str], second: list[str]) -> list[str]:
    """Types of the values that are of a type of both; whole numbers are numbers, too."""
    mine, others = (
        {*names, "integer"} if "number" in names else set(names) for names in (first, second)
    )
    found = mine & others
    return sorted(found - {"integer"} if "number" in found else found)


def type_of(value: object) -> str:
    """The type of a JSON value; `integer` for whole numbers."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def hold_counts(schema: Schema, least: str, most: str, path: str) -> None:
    """Put the counts of two keywords in place, the first of which may not be above the second."""
    schema |= {keyword: int(schema[keyword]) for keyword in (least, most) if keyword in schema}
    if least in schema and most in schema and schema[least] > schema[most]:
        raise SchemaError(path, f"nothing fits it: {least!r} is above {most!r}")


def check_value(value: object, path: str, budget: Budget) -> None:
    """Refuse a `const` or an item of `enum` that the grammar library would change."""
    left = [value]
    while left:
        budget.spend(1, path)
        one = left.pop()
        if isinstance(one, int) and not isinstance(one, bool) and abs(one) > MAX_INTEGER:
            raise SchemaError(path, "whole numbers must be of at most 64 bits")
        if isinstance(one, float) and not math.isfinite(one):
            raise SchemaError(path, "numbers must be finite")
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()


def hold_number(schema: Schema, types: list[str], path: str) -> list[str]:
    """Put a number's bounds in place as they can be held; returns the types that are left."""
    multiple = schema.get("multipleOf")
    if multiple is not None:
        where = f"{path}.multipleOf"
        if not 0 < multiple <= _MAX_MULTIPLE or multiple != multiple // 1:
            raise SchemaError(
                where, f"can be held for whole numbers from 1 to {_MAX_MULTIPLE}; leave it out"
            )
        schema["multipleOf"] = int(multiple)
        types = list(dict.fromkeys("integer" if name == "number" else name for name in types))
    is_integer = "number" not in types
    bounds: dict[str, int | float] = {}
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if keyword in schema:
            bounds[keyword] = _bound(schema[keyword], keyword, is_integer, f"{path}.{keyword}")
    schema |= bounds
    _check_range(bounds, is_integer, path)
    if multiple is not None and bounds:
        _check_multiple(bounds, f"{path}.multipleOf")
    return types


def _bound(value: int | float, keyword: str, is_integer: bool, where: str) -> int | float:
    largest = MAX_INTEGER if is_integer else _MAX_NUMBER
    if abs(value) >= largest:
        raise SchemaError(where, f"must lie between -{largest} and {largest}, ends excluded")
    is_least = keyword.lower().endswith("minimum")
    if not is_integer:
        # Only so many decimals of a bound count, so that it is moved inwards, if at all.
        exact = Decimal(repr(value))
        step = Decimal(1).scaleb(-_NUM_DECIMALS)
        moved = exact.quantize(step, ROUND_CEILING if is_least else ROUND_FLOOR)
        return value if moved == exact else float(moved)
    if isinstance(value, int) or value.is_integer():
        return int(value)
    # An exclusive bound between two whole numbers excludes neither.
    is_up = is_least != keyword.startswith("exclusive")
    return math.ceil(value) if is_up else math.floor(value)


def _check_range(bounds: dict[str, int | float], is_integer: bool, path: str) -> None:
    above = bounds.get("exclusiveMinimum", -math.inf)
    below = bounds.get("exclusiveMaximum", math.inf)
    least = max(bounds.get("minimum", -math.inf), above + 1 if is_integer else above)
    most = min(bounds.get("maximum", math.inf), below - 1 if is_integer else below)
    if least > most or (least == most and not is_integer and (above == least or below == most)):
        raise SchemaError(path, "nothing fits it: no such number lies between its bounds")


def _check_multiple(bounds: dict[str, int | float], where: str) -> None:
    lows = [value for keyword, value in bounds.items() if keyword.lower().endswith("minimum")]
    highs = [value for keyword, value in bounds.items() if keyword.lower().endswith("maximum")]
    if not lows or not highs or min(highs) - max(lows) >= _MAX_MULTIPLE_WIDTH:
        raise SchemaError(
            where,
            "can be held without bounds, or between a lower and an upper bound that are less than "
            f"{_MAX_MULTIPLE_WIDTH} apart",
        )


def hold_string(schema: Schema, path: str) -> None:
    """Put a string's pattern and lengths in place as they can be held.

    A pattern matches the whole string. A format is a remark where there is a pattern or a length.
    """
    hold_counts(schema, "minLength", "maxLength", path)
    least, most = schema.get("minLength"), schema.get("maxLength")
    format_name = schema.get("format")
    if "pattern" not in schema or schema["pattern"] == "":
        schema.pop("pattern", None)
        if least or most is not None:
            schema.pop("format", None)
        elif isinstance(format_name, str) and format_name in _FORMATS:
            del schema["format"]
            schema.pop("minLength", None)
            schema["pattern"] = _pattern_of_format(format_name)
        return
    schema.pop("format", None)
    where = f"{path}.pattern"
    node = _pattern(schema.pop("pattern"), where)
    if least is not None or most is not None:
        node = _of_length(node, least or 0, most, where)
        schema.pop("minLength", None)
        schema.pop("maxLength", None)
    text = _text_of(node, where)
    if not text:
        schema["maxLength"] = 0
    elif (counts := _any_text(node)) is not None:
        schema["minLength"] = counts[0]
        if counts[1] is not None:
            schema["maxLength"] = counts[1]
    else:
        schema["pattern"] = text


@lru_cache
def _pattern_of_format(name: str) -> str:
    return rewritten(parse(_FORMATS[name]))


def enforceable_pattern(pattern: str, where: str) -> str:
    """An expression for keys, as it can be held; it matches the whole key."""
    text = _text_of(_pattern(pattern, where), where)
    if not text:
        raise SchemaError(where, "matches no key but the empty one; leave it out")
    return text


def _text_of(node: Node, where: str) -> str:
    try:
        return rewritten(node)
    except RegularExpressionError as error:
        raise SchemaError(where, str(error)) from error


def _pattern(pattern: str, where: str) -> Node:
    try:
        node = restricted(parse(pattern), IN_JSON)
    except RegularExpressionError as error:
        raise SchemaError(where, str(error)) from error
    if node is None:
        raise SchemaError(
            where, 'cannot ask for characters that JSON escapes (", \\ and control characters)'
        )
    return simplified(node)


def _of_length(node: Node, least: int, most: int | None, where: str) -> Node:
    """The expression's matches of these lengths."""
    shortest, longest = lengths(node)
    if shortest >= least and (most is None or (longest is not None and longest <= most)):
        return node
    if isinstance(node, Repetition) and isinstance(node.part, Characters):
        least = max(least, node.least)
        ends = [end for end in (most, node.most) if end is not None]
        end = min(ends) if ends else None
        if end is None or least <= end:
            return simplified(Repetition(node.part, least, end))
    raise SchemaError(
        where,
        "cannot stand beside 'minLength' or 'maxLength', which it does not imply; count in the "
        "pattern",
    )


def _any_text(node: Node) -> tuple[int, int | None] | None:
    """How many characters there are, if any that JSON does not escape will do.

    Line separators, which a dot is not, are let pass: the library counts much faster so.
    """
    if not isinstance(node, Repetition) or not isinstance(node.part, Characters):
        return None
    missing = common(IN_JSON, others(node.part.ranges))
    is_any = missing in ((), ((0x2028, 0x2029),))
    return (node.least, node.most) if is_any and (node.least or node.most is not None) else None
