"""A schema taken apart into the plain ones that it is put together of: `SchemaOptions`.

Knows how JSON schemas are put together: references, `allOf`, `anyOf`, `oneOf`, and what stands
beside them. The schemas are a client's, and may be anything. Does not know how values are written.
"""

from typing import Any, Final

from engine.structured.forms.schema_terms import (
    KEYWORDS,
    TYPES,
    Schema,
    common_types,
    is_local,
    pointed_at,
    type_of,
)

Option = tuple[Schema, ...]
"""Schemas that a value has to fit all of, each without others within it; none allow any value."""

_MAX_STEPS: Final = 1024
"""For one schema: whoever needs more alternatives has an enumeration."""
_REFERENCE_STEPS: Final = 16
"""What following one takes, so that references to themselves soon come to an end."""

_ALIASES: Final = {
    **dict.fromkeys(("str", "text", "char", "varchar"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "long", "short"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    "bool": "boolean",
    "dict": "object",
    **dict.fromkeys(("list", "arr", "sequence"), "array"),
    "none": "null",
}
"""Names that people give to types, though JSON Schema does not."""


class _CannotTell(Exception):  # noqa: N818 - it is how a walk ends, and goes no further than here
    """A schema that takes too long, or that refers to nothing."""


class SchemaOptions:
    """Takes the schemas of one document apart; what a reference leads to only once.

    Args:
        root: the document, which references point into.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._known: dict[str, tuple[list[Option], int]] = {}
        """By reference, with the steps that it took: the answer must not depend on the order."""
        self._num_left = 0

    def of(self, schema: object) -> list[Option] | None:
        """What a value may fit, any one of them; None if that cannot be told."""
        self._num_left = _MAX_STEPS
        try:
            return self._options(schema)
        except (_CannotTell, RecursionError):
            return None

    def _options(self, schema: object) -> list[Option]:
        self._spend(1)
        if schema is False:
            return []
        if not isinstance(schema, dict):
            return [()]
        options: list[Option] = [()] if own_types(schema) is None else [(schema,)]
        if isinstance(reference := schema.get("$ref"), str):
            options = self._both(options, self._referred(reference))
        for inner in _schemas(schema, "allOf"):
            options = self._both(options, self._options(inner))
        for keyword in ("anyOf", "oneOf"):
            if inners := _schemas(schema, keyword):
                found = [option for inner in inners for option in self._options(inner)]
                options = self._both(options, found)
        return options

    def _both(self, first: list[Option], second: list[Option]) -> list[Option]:
        if first == [()]:
            return second
        self._spend(len(first) * len(second))
        return [one + other for one in first for other in second]

    def _referred(self, reference: str) -> list[Option]:
        if reference in self._known:
            options, num_steps = self._known[reference]
            self._spend(num_steps)
            return options
        before = self._num_left
        self._spend(_REFERENCE_STEPS)
        if not is_local(reference):
            raise _CannotTell
        try:
            target = pointed_at(self._root, reference)
        except LookupError as error:
            raise _CannotTell from error
        options = self._options(target)
        self._known[reference] = options, before - self._num_left
        return options

    def _spend(self, num_steps: int) -> None:
        self._num_left -= num_steps
        if self._num_left < 0:
            raise _CannotTell


def own_types(schema: Schema) -> list[str] | None:
    """The types that a schema itself allows, its inner schemas apart; None if it does not say.

    Keywords that speak of values of one type are meant to say it, too.
    """
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    texts = [name.strip().lower() for name in names if isinstance(name, str)]
    known = [name for name in (_ALIASES.get(text, text) for text in texts) if name in TYPES]
    values = own_values(schema)
    if values is not None:
        of_values = list(dict.fromkeys(map(type_of, values)))
        return common_types(known, of_values) if known else of_values
    if known:
        return known
    return [name for name, words in KEYWORDS.items() if any(w in schema for w in words)] or None


def own_values(schema: Schema) -> list[Any] | None:
    """The only values that a schema allows, where it lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def types_of_option(option: Option) -> list[str]:
    """The types that all of its schemas allow."""
    types = list(TYPES)
    for schema in option:
        types = common_types(types, own_types(schema) or [])
    return types


def _schemas(schema: Schema, keyword: str) -> list[Any]:
    inner = schema.get(keyword)
    return inner if isinstance(inner, list) else []
