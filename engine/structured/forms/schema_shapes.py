"""Whether a JSON schema has the shape of one: what each keyword's value may be.

Knows no references and no limits. Asked before anything else, so that nothing else is surprised.
"""

import math
from collections.abc import Callable
from typing import Any, Final

from engine.structured.forms.schema_terms import TYPES, Schema

_MAX_COUNT: Final = 2**31 - 1
_MAX_NAME: Final = 80
"""Of a name, in places."""


class SchemaError(ValueError):
    """A demand that cannot be enforced, or a keyword whose value is of the wrong type.

    Attributes:
        path: where in the schema, such as `.properties.a`; empty for the whole.
        message: what is wrong, and what to do.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path.removeprefix('.') or 'the schema'}: {message}")
        self.path = path
        self.message = message


def at(path: str, keyword: str, name: str) -> str:
    """The path of a named schema."""
    is_word = len(name) <= _MAX_NAME and name.replace("-", "_").replace("$", "_").isidentifier()
    return f"{path}.{keyword}.{name}" if is_word else f"{path}.{keyword}[{name[:_MAX_NAME]!r}]"


class Shapes:
    """Checks schemas, all of which must live on while it is used; each of them once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def check(self, schema: object, path: str) -> None:
        """Check a schema and those within it; not what its references point to.

        Raises:
            SchemaError: one that is wrong.
        """
        left = [(schema, path)]
        while left:
            one, place = left.pop()
            if isinstance(one, bool) or id(one) in self._seen:
                continue
            if not isinstance(one, dict):
                raise SchemaError(place, "must be a schema: an object, true or false")
            self._seen.add(id(one))
            _check_values(one, place)
            for keyword, value in one.items():
                where = f"{place}.{keyword}"
                if keyword in _SCHEMA and not isinstance(value, list):
                    left.append((value, where))
                elif keyword in _SCHEMA or keyword in _SCHEMAS:
                    left += [(item, f"{where}[{index}]") for index, item in enumerate(value)]
                elif keyword in _NAMED:
                    left += [(item, at(place, keyword, name)) for name, item in value.items()]


def _check_values(schema: Schema, path: str) -> None:
    for keyword, value in schema.items():
        if not isinstance(keyword, str):
            raise SchemaError(path, f"keys must be strings, got {str(keyword)[:_MAX_NAME]}")
        if keyword in _ALLOWED:
            is_right, allowed = _ALLOWED[keyword]
            if not is_right(value):
                raise SchemaError(f"{path}.{keyword}", f"must be {allowed}")
    for least, most in _RANGES:
        if least in schema and most in schema and schema[least] > schema[most]:
            raise SchemaError(path, f"unsatisfiable: {least!r} is above {most!r}")


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= _MAX_COUNT and value == value // 1


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    is_known = all(isinstance(name, str) and name in TYPES for name in names)
    return is_known and 0 < len(names) <= len(TYPES)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _are_named(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _rule(check: Callable[[Any], bool], allowed: str, *keywords: str) -> dict[str, Any]:
    return dict.fromkeys(keywords, (check, allowed))


_SCHEMA: Final = frozenset(
    (
        *("additionalProperties", "unevaluatedProperties", "propertyNames", "items"),
        *("unevaluatedItems", "contains", "additionalItems"),
    )
)
"""Keywords whose value is a schema; of `items`, in older drafts, a list of them."""
_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions")

_ALLOWED: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    **_rule(
        *(_is_count, "a whole number that is not negative", "minLength", "maxLength"),
        *("minItems", "maxItems", "minProperties", "maxProperties"),
    ),
    **_rule(
        *(_is_number, "a number", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    ),
    **_rule(_is_positive, "a number above 0", "multipleOf"),
    **_rule(_is_type, f"one of {', '.join(TYPES)}, or a list of some", "type"),
    **_rule(_are_names, "a list of property names", "required"),
    **_rule(lambda value: isinstance(value, bool), "true or false", "uniqueItems"),
    **_rule(lambda value: isinstance(value, str), "a string", "pattern", "format", "$ref"),
    **_rule(_is_list, "a list of values that is not empty", "enum"),
    **_rule(_is_list, "a list of schemas that is not empty", "anyOf", "oneOf", "allOf"),
    **_rule(lambda value: isinstance(value, list), "a list of schemas", "prefixItems"),
    **_rule(_are_named, "an object of schemas by name", *_NAMED),
}
"""Of keywords: what their value may be, and how to say so."""
_RANGES: Final = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minimum", "maximum"),
)
