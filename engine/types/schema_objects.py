"""What JSON schema says of objects and arrays, put so that the grammar made of it holds it.

Knows that the grammar library names no key that is not in `properties`, that it does not see which
keys two demands share, and that keys without a name of their own may come twice.
"""

from collections.abc import Callable
from typing import Any

from engine.types.schema_values import (
    Budget,
    Schema,
    SchemaError,
    enforceable_pattern,
    hold_counts,
    num_steps_of,
)

Write = Callable[[Any, str], Any]
"""Writes a schema that stands at this path; False if nothing fits it."""

_REMARKS = ("title", "description", "default", "examples", "$comment")


def hold_array(schema: Schema, path: str, write: Write) -> None:
    """Put what is said of items in place."""
    if schema.get("uniqueItems") is True:
        raise SchemaError(path, "'uniqueItems' is not supported; leave it out")
    if "contains" in schema:
        raise SchemaError(path, "'contains' is not supported; say what 'items' are")
    hold_counts(schema, "minItems", "maxItems", path)
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if "unevaluatedItems" in schema:
        rest = schema.pop("unevaluatedItems")
        schema.setdefault("items", rest)
    first = enumerate(schema.get("prefixItems", []))
    written = [write(one, f"{path}.prefixItems[{index}]") for index, one in first]
    is_cut = False in written or (most is not None and most < len(written))
    if is_cut:
        ends = [written.index(False)] if False in written else []
        written = written[: min([*ends, *(() if most is None else (most,))])]
    if written:
        schema["prefixItems"] = written
    else:
        schema.pop("prefixItems", None)
    items = schema.get("items")
    if isinstance(items, list):
        raise SchemaError(f"{path}.items", "must be one schema; a list of them is 'prefixItems'")
    if is_cut:
        schema["items"] = False
    elif "items" in schema:
        schema["items"] = write(items, f"{path}.items")
    elif not written or least > len(written):
        schema["items"] = {}
    if schema.get("items") is False and least > len(written):
        raise SchemaError(path, "nothing fits it: there cannot be as many items as 'minItems'")


def hold_object(
    schema: Schema, path: str, write: Write, followed: Callable[[Any, str], Any], budget: Budget
) -> None:
    """Put what is said of keys and their values in place.

    Args:
        followed: what a schema at a path leads to that may be a reference.
    """
    hold_counts(schema, "minProperties", "maxProperties", path)
    properties = dict(schema.get("properties", {}))
    patterns = dict(schema.get("patternProperties", {}))
    if "unevaluatedProperties" in schema:
        rest = schema.pop("unevaluatedProperties")
        schema.setdefault("additionalProperties", rest)
    if "propertyNames" in schema:
        names = followed(schema.pop("propertyNames"), f"{path}.propertyNames")
        if isinstance(names, dict):
            budget.spend(num_steps_of(names), f"{path}.propertyNames")
        if patterns:
            raise SchemaError(path, "'propertyNames' cannot stand beside 'patternProperties'")
        properties, patterns = _named(schema, properties, names, path)
    _check_patterns(schema, properties, patterns, path)
    required = _required(schema, properties, patterns, path)
    written = {name: write(one, at(path, "properties", name)) for name, one in properties.items()}
    _drop_impossible(schema, written, required, path)
    if written or "properties" in schema:
        schema["properties"] = written
    if patterns:
        schema["patternProperties"] = {
            enforceable_pattern(pattern, at(path, "patternProperties", pattern)): write(
                one, at(path, "patternProperties", pattern)
            )
            for pattern, one in patterns.items()
        }
        if False in schema["patternProperties"].values():
            raise SchemaError(path, "'patternProperties' cannot forbid keys; leave them out")
        schema.pop("additionalProperties", None)
    _write_rest(schema, written, patterns, path, write)
    _check_count(schema, written, patterns, required, path)


def at(path: str, keyword: str, name: str) -> str:
    """The path of a named schema."""
    is_word = len(name) <= 80 and name.replace("-", "_").replace("$", "_").isidentifier()
    return f"{path}.{keyword}.{name}" if is_word else f"{path}.{keyword}[{name[:80]!r}]"


def _named(
    schema: Schema, properties: dict[str, Any], names: Any, path: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Properties and patterns that say what `propertyNames` does; the rest is then forbidden."""
    where = f"{path}.propertyNames"
    demands = {} if names is True else names
    if isinstance(demands, dict):
        demands = {key: one for key, one in demands.items() if key not in (*_REMARKS, "format")}
        if demands.get("type") == "string":
            del demands["type"]
    if demands == {}:
        return properties, {}
    rest = schema.pop("additionalProperties", True)
    schema["additionalProperties"] = False
    if demands is False:
        allowed: Any = []
    elif demands.keys() <= {"enum", "const"} and len(demands) == 1:
        allowed = [demands["const"]] if "const" in demands else demands["enum"]
    elif demands.keys() == {"pattern"} and not properties:
        return {}, {} if rest is False else {demands["pattern"]: rest}
    else:
        raise SchemaError(
            where,
            "can be an 'enum', or a 'pattern' alone where there are no 'properties'; "
            "name the keys in 'properties'",
        )
    kept = {name: properties.get(name, rest) for name in allowed if isinstance(name, str)}
    return {name: one for name, one in kept.items() if one is not False}, {}


def _check_patterns(
    schema: Schema, properties: dict[str, Any], patterns: dict[str, Any], path: str
) -> None:
    if not patterns:
        return
    where = f"{path}.patternProperties"
    if properties or len(patterns) > 1:
        raise SchemaError(
            where,
            "can have one pattern, and no 'properties' beside it: whether a key is meant by both "
            "would not be seen",
        )
    if isinstance(schema.get("additionalProperties"), dict):
        raise SchemaError(
            where, "cannot stand beside a schema for 'additionalProperties'; say false there"
        )


def _required(
    schema: Schema, properties: dict[str, Any], patterns: dict[str, Any], path: str
) -> list[str]:
    """The names that must be there, each of which becomes one of the properties."""
    names = list(dict.fromkeys(schema.get("required", [])))
    if "required" in schema:
        schema["required"] = names
    missing = [name for name in names if name not in properties]
    rest = schema.get("additionalProperties", True)
    if missing and (patterns or rest is False):
        raise SchemaError(
            f"{path}.required",
            f"{missing[0][:80]!r} is not in 'properties', and what else there may be does not "
            "allow it; add it there, or leave it out",
        )
    properties |= dict.fromkeys(missing, rest)
    return names


def _drop_impossible(
    schema: Schema, written: dict[str, Any], required: list[str], path: str
) -> None:
    """Leave out properties that nothing fits, which means that they are forbidden."""
    needed = set(required)
    for name in [name for name, one in written.items() if one is False]:
        where = at(path, "properties", name)
        if name in needed:
            raise SchemaError(where, "nothing fits it, but it is required")
        if schema.get("additionalProperties", False) is not False:
            raise SchemaError(
                where, "a key cannot be forbidden where additional properties are allowed"
            )
        del written[name]


def _write_rest(
    schema: Schema,
    written: dict[str, Any],
    patterns: dict[str, Any],
    path: str,
    write: Write,
) -> None:
    """What other keys may have."""
    if "additionalProperties" in schema:
        rest = schema["additionalProperties"]
        if not isinstance(rest, bool):
            schema["additionalProperties"] = write(rest, f"{path}.additionalProperties")
    elif not patterns and not written and "properties" not in schema:
        schema["additionalProperties"] = True
    for name in written:
        if schema.get("additionalProperties", False) is not False and not _is_plain(name):
            raise SchemaError(
                at(path, "properties", name),
                "a name with quotes, backslashes or control characters can only be held where "
                "'additionalProperties' is false",
            )


def _is_plain(name: str) -> bool:
    """Whether JSON writes a name as it is."""
    return not any(character in '"\\' or character < " " for character in name)


def _check_count(
    schema: Schema,
    written: dict[str, Any],
    patterns: dict[str, Any],
    required: list[str],
    path: str,
) -> None:
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    is_open = bool(patterns) or schema.get("additionalProperties", False) is not False
    if least <= len(required):
        schema.pop("minProperties", None)
    elif is_open and least > 1:
        raise SchemaError(
            f"{path}.minProperties",
            "can be held where all keys are in 'properties' and 'additionalProperties' is false",
        )
    elif not is_open and least > len(written):
        raise SchemaError(f"{path}.minProperties", "nothing fits it: there are not as many keys")
    if most is not None and most < len(required):
        raise SchemaError(f"{path}.maxProperties", "nothing fits it: more keys are required")
