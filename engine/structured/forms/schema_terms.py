"""JSON Schema's own terms: types, the keywords that speak of each, pointers. Pure functions."""

from typing import Any, Final
from urllib.parse import unquote

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
"""By type, the keywords that speak of its values only."""
TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_INTEGER: Final = 2**63 - 1
_MAX_DIGITS: Final = 10
"""Of an index in a reference."""


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


def is_local(reference: str) -> bool:
    """Whether a reference points into the schema that has it."""
    return reference == "#" or reference.startswith("#/")


def pointed_at(root: Any, reference: str) -> Any:
    """The part of a schema that a local reference points to.

    Raises:
        LookupError: there is none.
    """
    target = root
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and key in target:
            target = target[key]
        elif (
            isinstance(target, list)
            and key.isdecimal()
            and len(key) < _MAX_DIGITS
            and int(key) < len(target)
        ):
            target = target[int(key)]
        else:
            raise LookupError(f"nothing is at {reference[:80]!r}")
    return target
