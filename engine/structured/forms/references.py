"""What references in a JSON schema lead to, and which schemas speak of the same value.

Knows pointers, anchors, and how schemas are put together. Does not know what may be enforced.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final

from engine.structured.forms.schema_shapes import SchemaError, Shapes
from engine.structured.forms.schema_terms import Schema, common_types, pointed_at

SAME_VALUE: Final = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas speak of the value itself, as `$ref` does."""
MAX_OPTIONAL_IN_ALL: Final = 2_000
MAX_DEPTH: Final = 64
MAX_STEPS: Final = 50_000
"""Schemas looked at, again and again where references lead to the same ones."""


class Allowance:
    """What the schemas of one request may have together."""

    __slots__ = ("num_optional", "num_steps")

    def __init__(self) -> None:
        self.num_optional = MAX_OPTIONAL_IN_ALL
        self.num_steps = MAX_STEPS

    def step(self, path: str) -> None:
        """Count a schema that is looked at."""
        self.num_steps -= 1
        if self.num_steps < 0:
            raise SchemaError(
                path, "the schema is too large to check; use fewer references, or smaller schemas"
            )


class References:
    """The references of one document.

    Args:
        root: the document, whose shape is checked.
    """

    def __init__(self, root: Schema, allowance: Allowance) -> None:
        self._root = root
        self._allowance = allowance
        self._shapes = Shapes()
        self._shapes.check(root, "")

    @cached_property
    def _anchored(self) -> dict[str, Any]:
        return dict(_anchors(self._root))

    def target(self, reference: str, path: str) -> Any:
        """What a reference leads to.

        Raises:
            SchemaError: it leads nowhere, elsewhere, or to what has not the shape of a schema.
        """
        own = self._root.get("$id")
        if isinstance(own, str) and own.rstrip("#") and reference.startswith(own.rstrip("#")):
            reference = reference[len(own.rstrip("#")) :] or "#"
        if not reference.startswith("#"):
            raise SchemaError(
                path,
                f"must point into the schema itself (#/…), not to {reference[:80]!r}",
            )
        try:
            if reference == "#" or reference.startswith("#/"):
                target = pointed_at(self._root, reference)
            else:
                target = self._anchored[reference[1:]]
        except LookupError:
            raise SchemaError(path, f"points to nothing: {reference[:80]!r}") from None
        self._shapes.check(target, place_of(reference))
        return target

    def parts(self, schema: Schema, path: str) -> Iterator[Schema]:
        """All schemas that speak of the same value, this one first.

        Raises:
            SchemaError: they lead back to themselves, or too far.
        """
        left: list[tuple[Any, str, frozenset[int]]] = [(schema, path, frozenset())]
        while left:
            one, place, above = left.pop()
            if not isinstance(one, dict):
                continue
            self._allowance.step(place)
            if id(one) in above:
                raise SchemaError(path, "the schema refers to itself without anything between")
            if len(above) > MAX_DEPTH:
                raise SchemaError(path, f"more than {MAX_DEPTH} references lead to each other")
            yield one
            inner = [
                (item, f"{place}.{word}[{index}]")
                for word in SAME_VALUE
                for index, item in enumerate(one.get(word, ()))
            ]
            if "$ref" in one:
                where = f"{place}.$ref"
                inner.insert(0, (self.target(one["$ref"], where), where))
            left += [(item, where, above | {id(one)}) for item, where in reversed(inner)]

    def options_word(self, options: list[Any] | None, path: str) -> str:
        """`anyOf` where a value can fit one of a `oneOf` only, as far as is easily seen."""
        facts = [self._facts(one, path) for one in options or ()]
        for index, (types, values) in enumerate(facts):
            for other_types, other_values in facts[:index]:
                self._allowance.step(path)
                apart = types and other_types and not common_types(types, other_types)
                if not apart and not any(
                    values[name].isdisjoint(other_values[name])
                    for name in values.keys() & other_values.keys()
                ):
                    return "oneOf"
        return "anyOf"

    def _facts(self, schema: Any, path: str) -> tuple[list[str], dict[str, frozenset[str]]]:
        """Types that a value may have, and values of required properties, as text by name."""
        types: list[str] = []
        values: dict[str, frozenset[str]] = {}
        while isinstance(schema, dict):
            given = schema.get("type", types)
            types = given if isinstance(given, list) else [given]
            properties: Any = schema.get("properties")
            for name in schema.get("required", ()) if isinstance(properties, dict) else ():
                one = properties.get(name)
                if isinstance(one, dict) and ("const" in one or isinstance(one.get("enum"), list)):
                    found = [one["const"]] if "const" in one else one["enum"]
                    if all(isinstance(value, str) for value in found):
                        values[name] = frozenset(found)
            if "$ref" not in schema:
                break
            schema = self.target(schema["$ref"], path)  # `_parts` has found that this ends
        return types, values if types == ["object"] else {}


def place_of(reference: str) -> str:
    """The path in the schema that a reference leads to."""
    return reference.removeprefix("#").replace("/", ".")[:200]


def _anchors(root: Any) -> Iterator[tuple[str, Any]]:
    left = [root]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            if isinstance(one.get("$anchor"), str):
                yield one["$anchor"], one
            left += one.values()
        elif isinstance(one, list):
            left += one
