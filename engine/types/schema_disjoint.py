"""Whether a value can fit two JSON schemas: `Disjointness`.

Knows types, values, and keys that only one of two objects has. Where it cannot tell, the answer is
that one may. That schemas have the shape of some has been checked; what they say has not.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

from engine.types.schema_values import TYPES, Budget, type_of

_MAX_DEPTH: Final = 4
_OPAQUE: Final = ("anyOf", "oneOf", "allOf")
_PAIR_STEPS: Final = 8

Follow = Callable[[Any, str], Any]
Values = frozenset[Hashable]


class Disjointness:
    """Compares schemas, all of which must live on while it is used.

    Args:
        followed: what a schema leads to that may be a reference.
        budget: what comparing may take.
    """

    def __init__(self, followed: Follow, budget: Budget) -> None:
        self._followed = followed
        self._budget = budget
        self._values: dict[int, Values | None] = {}
        """By the schema's identity."""

    def overlap(self, options: Sequence[Any], path: str) -> tuple[int, int] | None:
        """Two options that a value may fit both; None if surely none does."""
        options = [self._followed(option, path) for option in options]
        owners: dict[Hashable, int] = {}
        others: list[int] = []
        for index, option in enumerate(options):
            values = self._values_of(option, path) if isinstance(option, dict) else None
            if values is None:
                others.append(index)
                continue
            for value in values:
                if (former := owners.setdefault(value, index)) != index:
                    return former, index
        unlike = set(others)
        for place, index in enumerate(others):
            for other in (*others[:place], *(i for i in range(len(options)) if i not in unlike)):
                if not self._are_disjoint(options[index], options[other], path):
                    return min(index, other), max(index, other)
        return None

    def _are_disjoint(self, first: Any, second: Any, path: str, depth: int = 0) -> bool:
        """Whether surely no value fits both."""
        self._budget.spend(_PAIR_STEPS, path)
        first, second = self._followed(first, path), self._followed(second, path)
        if first is False or second is False:
            return True
        if not isinstance(first, dict) or not isinstance(second, dict) or depth > _MAX_DEPTH:
            return False
        values, others = self._values_of(first, path), self._values_of(second, path)
        if values is not None and others is not None:
            self._budget.spend(min(len(values), len(others)) // 8, path)
            return values.isdisjoint(others)
        if _makes_objects(first) and _makes_objects(second):
            return self._keys_differ(first, second, path, depth)
        return not self._types_of(first) & self._types_of(second)

    def _keys_differ(
        self, first: dict[str, Any], second: dict[str, Any], path: str, depth: int
    ) -> bool:
        """Whether of two schemas of objects one requires what the other forbids."""
        names, others = first.get("required", []), second.get("required", [])
        self._budget.spend(len(names) + len(others), path)
        for required, other in ((names, second), (others, first)):
            if other.get("additionalProperties") is False and "patternProperties" not in other:
                allowed = other.get("properties", {})
                if any(name not in allowed for name in required):
                    return True
        mine, its = first.get("properties", {}), second.get("properties", {})
        both = set(others)
        return any(
            self._are_disjoint(mine[name], its[name], path, depth + 1)
            for name in names
            if name in both and name in mine and name in its
        )

    def _values_of(self, schema: dict[str, Any], path: str) -> Values | None:
        """Keys of the values that `const` or `enum` names; None if there is neither."""
        values = _listed(schema)
        if values is None:
            return None
        if id(schema) not in self._values:
            self._values[id(schema)] = frozenset(self._key(value, path) for value in values)
        return self._values[id(schema)]

    def _key(self, value: Any, path: str) -> Hashable:
        """The same for values that are the same in JSON, where 1 is 1.0, and not true."""
        self._budget.spend(2, path)
        if isinstance(value, list | tuple):
            return ("array", *(self._key(item, path) for item in value))
        if isinstance(value, dict):
            return frozenset((key, self._key(item, path)) for key, item in value.items())
        # Of numbers the text, because everybody can find whole numbers with the same hash.
        is_whole = type_of(value) == "integer"
        return type_of(value), value if isinstance(value, str) else repr(
            int(value) if is_whole else value
        )

    def _types_of(self, schema: dict[str, Any]) -> set[str]:
        """Types of values that may fit; a whole number is a number, too."""
        values = _listed(schema)
        if values is not None:
            names = {type_of(value) for value in values}
            return names | {"number"} if "integer" in names else names
        if "type" not in schema or any(word in schema for word in _OPAQUE):
            return set(TYPES)
        given = schema["type"]
        names = {given} if isinstance(given, str) else set(given)
        return names | {"integer"} if "number" in names else names


def _makes_objects(schema: dict[str, Any]) -> bool:
    """Whether what is made of a schema is an object, though others may fit it."""
    if any(word in schema for word in (*_OPAQUE, "const", "enum")):
        return False
    given = schema.get("type")
    return given in ("object", ["object"]) or (given is None and "properties" in schema)


def _listed(schema: dict[str, Any]) -> list[Any] | None:
    """The values that `const` or `enum` names; None if there is neither."""
    return [schema["const"]] if "const" in schema else schema.get("enum")
