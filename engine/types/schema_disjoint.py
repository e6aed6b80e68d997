"""Whether a value can fit two JSON schemas: `are_disjoint`.

Knows types, values, and keys that only one of two objects has. Where it cannot tell, the answer is
that one may.
"""

from collections.abc import Callable
from typing import Any, Final

from engine.types.schema_values import TYPES, type_of

_MAX_DEPTH: Final = 4
_OPAQUE: Final = ("anyOf", "oneOf", "allOf")

Follow = Callable[[Any, str], Any]


def are_disjoint(first: Any, second: Any, followed: Follow, depth: int = 0) -> bool:
    """Whether surely no value fits both.

    Args:
        followed: what a schema leads to that may be a reference.
    """
    first, second = followed(first, ""), followed(second, "")
    if first is False or second is False:
        return True
    if not isinstance(first, dict) or not isinstance(second, dict) or depth > _MAX_DEPTH:
        return False
    values, others = _values(first), _values(second)
    if values is not None and others is not None:
        return not any(_is_same(one, other) for one in values for other in others)
    if _makes_objects(first) and _makes_objects(second):
        return _keys_differ(first, second, followed, depth)
    return not _types(first, values) & _types(second, others)


def _makes_objects(schema: dict[str, Any]) -> bool:
    """Whether what is made of a schema is an object, though others may fit it."""
    if any(word in schema for word in (*_OPAQUE, "const", "enum")):
        return False
    given = schema.get("type")
    return given in ("object", ["object"]) or (given is None and "properties" in schema)


def _keys_differ(
    first: dict[str, Any], second: dict[str, Any], followed: Follow, depth: int
) -> bool:
    """Whether of two schemas of objects one requires what the other forbids."""
    for one, other in ((first, second), (second, first)):
        properties = other.get("properties", {})
        is_closed = other.get("additionalProperties") is False and "patternProperties" not in other
        for name in one.get("required", []):
            if name not in properties:
                if is_closed:
                    return True
                continue
            if name in other.get("required", []) and name in one.get("properties", {}):
                mine = one["properties"][name]
                if are_disjoint(mine, properties[name], followed, depth + 1):
                    return True
    return False


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: dict[str, Any], values: list[Any] | None) -> set[str]:
    """Types of values that may fit; a whole number is a number, too."""
    if values is not None:
        names = {type_of(value) for value in values}
        return names | {"number"} if "integer" in names else names
    if any(word in schema for word in _OPAQUE):
        return set(TYPES)
    given = schema.get("type", list(TYPES))
    names = {given} if isinstance(given, str) else set(given)
    return names | {"integer"} if "number" in names else names


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same in JSON, where true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return bool(one == other)
