"""What JSON schema says of one value: its type, a number's bounds, a string's form.

Knows which of these demands the grammar library holds and how the others are put so that it does.
Does not know where schemas stand within schemas.
"""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final

from engine.types.expression_parser import parse
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
    written,
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

_MAX_INTEGER: Final = 2**63 - 1
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


def types_of(schema: Schema, path: str) -> list[str] | None:
    """The types that a schema names, or that its keywords speak of; None if it speaks of none."""
    given = schema.get("type")
    if given is not None:
        names = given if isinstance(given, list) else [given]
        if not names or not all(isinstance(name, str) and name in TYPES for name in names):
            raise SchemaError(f"{path}.type", f"must be of {', '.join(TYPES)}, or a list of some")
        return names
    groups = [name for name, words in KEYWORDS.items() if any(word in schema for word in words)]
    if len(groups) > 1:
        first = [next(w for w in KEYWORDS[name] if w in schema) for name in groups]
        raise SchemaError(
            path,
            f"{' and '.join(map(repr, first))} speak of values of different types; "
            "say which with 'type'",
        )
    return groups or None


def type_of(value: object) -> str:
    """The type of a JSON value; `integer` for whole numbers."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def whole_number(schema: Schema, keyword: str, path: str) -> int | None:
    """A keyword's count; None if it is not there."""
    value = schema.get(keyword)
    if value is None and keyword not in schema:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise SchemaError(f"{path}.{keyword}", "must be a whole number that is not negative")
    if not 0 <= value <= _MAX_INTEGER:
        raise SchemaError(f"{path}.{keyword}", "must be a whole number that is not negative")
    return int(value)


def check_value(value: object, path: str) -> None:
    """Refuse a `const` or an item of `enum` that the grammar library would change."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, int) and not isinstance(one, bool) and abs(one) > _MAX_INTEGER:
            raise SchemaError(path, "whole numbers must be of at most 64 bits")
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()


def hold_number(schema: Schema, types: list[str], path: str) -> list[str]:
    """Put a number's bounds in place as they can be held; returns the types that are left."""
    multiple = schema.get("multipleOf")
    if multiple is not None:
        where = f"{path}.multipleOf"
        if isinstance(multiple, bool) or not isinstance(multiple, int | float) or multiple <= 0:
            raise SchemaError(where, "must be a number above 0")
        if multiple != multiple // 1 or multiple > _MAX_MULTIPLE:
            raise SchemaError(
                where, f"can be held for whole numbers up to {_MAX_MULTIPLE}; leave it out"
            )
        schema["multipleOf"] = int(multiple)
        types = list(dict.fromkeys("integer" if name == "number" else name for name in types))
    is_integer = "number" not in types
    bounds: dict[str, int | float] = {}
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if keyword in schema:
            bounds[keyword] = _bound(schema[keyword], keyword, is_integer, f"{path}.{keyword}")
    schema |= bounds
    if multiple is not None and bounds:
        _check_multiple(bounds, f"{path}.multipleOf")
    return types


def _bound(value: object, keyword: str, is_integer: bool, where: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SchemaError(where, "must be a number")
    largest = _MAX_INTEGER if is_integer else _MAX_NUMBER
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
    least, most = whole_number(schema, "minLength", path), whole_number(schema, "maxLength", path)
    schema |= {
        name: value
        for name, value in (("minLength", least), ("maxLength", most))
        if value is not None
    }
    format_name = schema.get("format")
    if "pattern" not in schema or schema["pattern"] == "":
        schema.pop("pattern", None)
        if least or most is not None:
            schema.pop("format", None)
        elif isinstance(format_name, str) and format_name in _FORMATS:
            del schema["format"]
            schema.pop("minLength", None)
            schema["pattern"] = written(parse(_FORMATS[format_name]))
        return
    schema.pop("format", None)
    where = f"{path}.pattern"
    node = _pattern(schema.pop("pattern"), where)
    if least is not None or most is not None:
        node = _of_length(node, least or 0, most, where)
        schema.pop("minLength", None)
        schema.pop("maxLength", None)
    text = written(node)
    if not text:
        schema["maxLength"] = 0
    elif (counts := _any_text(node)) is not None:
        schema["minLength"] = counts[0]
        if counts[1] is not None:
            schema["maxLength"] = counts[1]
    else:
        schema["pattern"] = text


def held_pattern(pattern: object, where: str) -> str:
    """An expression for keys, as it can be held; it matches the whole key."""
    text = written(_pattern(pattern, where))
    if not text:
        raise SchemaError(where, "matches no key but the empty one; leave it out")
    return text


def _pattern(pattern: object, where: str) -> Node:
    if not isinstance(pattern, str):
        raise SchemaError(where, "must be a regular expression")
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
