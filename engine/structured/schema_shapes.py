"""Whether a JSON schema has the shape of one: what each keyword's value may be.

Knows no references and no limits. Asked before anything else, so that nothing else is surprised.
"""

import math
from collections.abc import Callable
from typing import Any, Final

from engine.structured.schema_terms import TYPES, Schema

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


def check_shape(schema: Schema, path: str) -> None:
    """Check the values of a schema's own keywords; schemas within it are told by being one.

    Raises:
        SchemaError: one that is wrong.
    """
    for keyword, value in schema.items():
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


def _is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def _are_schemas(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _are_named(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and _is_schema(one) for name, one in value.items()
    )


def _rule(check: Callable[[Any], bool], allowed: str, *keywords: str) -> dict[str, Any]:
    return dict.fromkeys(keywords, (check, allowed))


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
    **_rule(
        *(lambda value: isinstance(value, list) and bool(value), "a list of values"),
        "enum",
    ),
    **_rule(_are_schemas, "a list of schemas that is not empty", "anyOf", "oneOf", "allOf"),
    **_rule(
        *(lambda value: value == [] or _are_schemas(value), "a list of schemas", "prefixItems")
    ),
    **_rule(
        *(lambda value: _is_schema(value) or _are_schemas(value), "a schema", "items"),
    ),
    **_rule(
        *(_is_schema, "a schema: an object, true or false", "additionalProperties"),
        *("unevaluatedProperties", "propertyNames", "unevaluatedItems", "contains"),
        "additionalItems",
    ),
    **_rule(
        *(_are_named, "an object of schemas by name", "properties", "patternProperties"),
        *("$defs", "definitions"),
    ),
}
"""Of keywords: what their value may be, and how to say so."""
_RANGES: Final = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minimum", "maximum"),
)
