"""Finds what a JSON schema demands and the grammar made of it would not hold.

Knows the keywords of JSON Schema (draft 2020-12 and its forerunners) and where schemas stand within
schemas. A keyword that would be ignored is refused, so that what comes back is what was asked for.
"""

from collections.abc import Iterator
from typing import Any, Final

_IN_VALUE: Final = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_IN_LIST: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_IN_MAPPING: Final = ("properties", "patternProperties", "$defs", "definitions")

_UNENFORCED: Final = (
    *("not", "if", "dependentRequired", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef"),
)


def unenforced(schema: dict[str, Any]) -> str | None:
    """The first demand that would be ignored, with what to do about it; None if there is none.

    `oneOf` counts as `anyOf`, and an unknown `format` as a remark, as the standard has it.
    """
    return next((found for one in _schemas(schema) for found in _demands(one)), None)


def _demands(schema: dict[str, Any]) -> Iterator[str]:
    for keyword in _UNENFORCED:
        if keyword in schema:
            yield f"{keyword!r} is not supported; leave it out, or state it with other keywords"
    if schema.get("uniqueItems") is True:
        yield "'uniqueItems' is not supported; leave it out"
    all_of = schema.get("allOf")
    if isinstance(all_of, list) and len(all_of) > 1:
        yield "'allOf' is supported with one schema; merge its schemas into one"
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        yield f"'$ref' must point into the schema itself (#/…), not to {reference[:80]!r}"
    if "pattern" in schema and {"minLength", "maxLength"} & schema.keys():
        yield "'pattern' cannot stand beside 'minLength' or 'maxLength'; count in the pattern"


def _schemas(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it, but nothing that is a value (`enum`, `default`)."""
    left: list[Any] = [root]
    while left:
        schema = left.pop()
        if not isinstance(schema, dict):
            continue
        yield schema
        left += [schema[keyword] for keyword in _IN_VALUE if keyword in schema]
        for keyword in _IN_LIST:
            if isinstance(schema.get(keyword), list):
                left += schema[keyword]
        for keyword in _IN_MAPPING:
            if isinstance(schema.get(keyword), dict):
                left += schema[keyword].values()
