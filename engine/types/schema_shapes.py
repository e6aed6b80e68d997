"""Whether a JSON schema has the shape of one: each keyword's value is of the type it has to be.

Knows for each keyword what its value may be, and where in it there are schemas. It is asked before
anything else, so that nothing else is surprised by what it finds. Does not know what can be held.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

from engine.types.schema_objects import at
from engine.types.schema_values import MAX_INTEGER, TYPES, Budget, SchemaError, check_value

Inner = Iterator[tuple[Any, str]]
"""Schemas within a keyword's value, and their paths."""


class Shapes:
    """Checks schemas, all of which must live on while it is used; each of them once.

    Args:
        budget: what it may take.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._seen: set[int] = set()

    def check(self, schema: object, path: str) -> None:
        """Check a schema and those within it; not what its references point to.

        Raises:
            SchemaError: one that is wrong.
        """
        left = [(schema, path)]
        while left:
            one, place = left.pop()
            if isinstance(one, bool):
                continue
            if not isinstance(one, dict):
                raise SchemaError(place, "must be a schema: an object, true or false")
            if id(one) in self._seen:
                continue
            self._seen.add(id(one))
            self._budget.spend(1 + len(one), place)
            for keyword, value in one.items():
                left += self._inner(keyword, value, place)

    def _inner(self, keyword: Any, value: Any, path: str) -> Inner:
        if not isinstance(keyword, str):
            raise SchemaError(path, f"keys must be strings, got {str(keyword)[:80]}")
        where = f"{path}.{keyword}"
        if keyword in ("const", "enum"):
            if keyword == "enum" and not (isinstance(value, list) and value):
                raise SchemaError(where, "must be a list of values that is not empty")
            check_value(value, where, self._budget)
        elif keyword in _LEAVES:
            is_right, allowed = _LEAVES[keyword]
            if not is_right(value):
                raise SchemaError(where, allowed)
        elif keyword in _SCHEMA:
            yield value, where
        elif keyword in _SCHEMAS:
            if not isinstance(value, list) or (not value and keyword != "prefixItems"):
                raise SchemaError(where, "must be a list of schemas that is not empty")
            for index, one in enumerate(value):
                yield one, f"{where}[{index}]"
        elif keyword in _NAMED:
            if not isinstance(value, dict):
                raise SchemaError(where, "must map names to schemas")
            for name, one in value.items():
                if not isinstance(name, str):
                    raise SchemaError(where, f"names must be strings, got {str(name)[:80]}")
                yield one, at(path, keyword, name)
        elif keyword == "items" and not isinstance(value, list):  # a list is refused later
            yield value, where


_SCHEMA: Final = frozenset(
    (
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("unevaluatedItems", "contains"),
    )
)
_SCHEMAS: Final = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_NAMED: Final = frozenset(("properties", "patternProperties", "$defs", "definitions"))


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= MAX_INTEGER and value == value // 1


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    is_known = all(isinstance(name, str) and name in TYPES for name in names)
    return is_known and 0 < len(names) <= len(TYPES)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_boolean(value: object) -> bool:
    return isinstance(value, bool)


_LEAVES: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    **dict.fromkeys(
        (
            *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
            *("minContains", "maxContains"),
        ),
        (_is_count, "must be a whole number that is not negative"),
    ),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        (_is_number, "must be a number"),
    ),
    "type": (_is_type, f"must be of {', '.join(TYPES)}, or a list of some"),
    "required": (_are_names, "must be a list of property names"),
    "uniqueItems": (_is_boolean, "must be true or false"),
    "pattern": (_is_text, "must be a regular expression"),
    "format": (_is_text, "must be the name of a format"),
    "$ref": (_is_text, "must be a string, such as '#/$defs/name'"),
}
"""Of keywords without schemas in them: what their value may be, and how to say so."""
