"""From a user's JSON schema to one that the grammar library takes as it is meant: `prepared`.

Closes objects, follows references, drops remarks, keeps what would take the library too long or
crash it out, and names the place of what is refused. What schemas mean is the library's affair.
"""

import enum
from decimal import Decimal
from typing import Any, Final

from engine.structured.forms.lark import flaw_of
from engine.structured.forms.references import (
    MAX_DEPTH,
    MAX_OPTIONAL_IN_ALL,
    SAME_VALUE,
    Allowance,
    References,
    place_of,
)
from engine.structured.forms.schema_shapes import SchemaError, at
from engine.structured.forms.schema_terms import KEYWORDS, Schema

MAX_OPTIONAL: Final = 500
"""Most properties of one object that may be left out: the library tries all ways to go on."""
MAX_PATTERN_PROPERTIES: Final = 40
MAX_DEFINITIONS: Final = 500
"""Schemas that references lead to: the library follows chains of them by recursion."""
MAX_PATTERN_LENGTH: Final = 4_096
MAX_PATTERNS: Final = 8
"""For one text."""
MAX_MULTIPLE: Final = 10_000
"""Product of the `multipleOf` of one number: the library counts remainders."""
_MAX_BOUND: Final = 10**18

_UNSUPPORTED: Final = (
    *("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef"),
)
_APPLICATORS: Final = frozenset((*SAME_VALUE, "$ref"))
_KEPT: Final = frozenset(
    (*(word for words in KEYWORDS.values() for word in words), "type", "const", "enum", "format")
) - {"unevaluatedItems", "unevaluatedProperties", "propertyNames", "uniqueItems", "contains"}
"""What the library is to see, references and applicators apart."""
_FORMATS: Final = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri"),
    )
)
"""Those that it knows; others are remarks."""


class _Mode(enum.Enum):
    """How a schema is to be written."""

    CLOSED = 0
    """Its objects have no properties that it does not name."""
    PART = 1
    """The same of what is within its objects; it is a part of a schema that is closed."""
    EXACT = 2
    """As it stands: that less would fit it could let more through elsewhere (`oneOf`)."""


def prepared(
    schema: Schema, allowance: Allowance | None = None, *, closes_objects: bool = True
) -> Schema:
    """The schema as the library is to have it; nested no deeper than a caller has checked.

    Args:
        allowance: what it may have, where several schemas share it.
        closes_objects: forbid properties that a schema does not name, unless it speaks of them,
            and take the type that keywords speak of for the type of the value.

    Raises:
        SchemaError: a part that cannot be enforced, with its place.
    """
    return _Writer(schema, allowance or Allowance(), closes_objects).write()


class _Writer:
    def __init__(self, root: Schema, allowance: Allowance, closes_objects: bool) -> None:
        self._root = root
        self._allowance = allowance
        self._mode = _Mode.CLOSED if closes_objects else _Mode.EXACT
        self._references = References(root, allowance)
        self._names: dict[tuple[str, _Mode], str] = {}
        """Of what references lead to, by the place there and how it is written."""
        self._left: list[tuple[str, _Mode]] = []

    def write(self) -> Schema:
        written = self._schema(self._root, "", self._mode)
        definitions: dict[str, Any] = {}
        while self._left:
            reference, mode = self._left.pop()
            place = place_of(reference)
            target = self._references.target(reference, place)
            name = self._names[reference, mode]
            definitions[name] = self._schema(target, place, mode)
        if definitions:
            written = written | {"$defs": definitions}
        return written

    def _schema(self, schema: Any, path: str, mode: _Mode, depth: int = 0) -> Any:
        self._allowance.step(path)
        if isinstance(schema, bool):
            return schema
        if depth > MAX_DEPTH:
            raise SchemaError(path, f"must not be nested deeper than {MAX_DEPTH} levels")
        schema = self._plain(schema, path)
        self._check_supported(schema, path)
        parts = self._check_parts(schema, path)
        options = self._references.options_word(schema.get("oneOf"), path)
        applicators = _APPLICATORS & schema.keys()
        beside = [word for word in schema if word in _KEPT and word not in ("type", "format")]
        is_wrapper = len(applicators) == 1 and not beside and options == "anyOf"
        is_wrapper = is_wrapper and not ("allOf" in schema and len(schema["allOf"]) > 1)
        if mode is _Mode.CLOSED and not is_wrapper:
            schema = _closed(schema, parts)
        same = _Mode.PART if mode is _Mode.CLOSED and not is_wrapper else mode
        within = mode if mode is _Mode.EXACT else self._mode
        written: Schema = {}
        for keyword, value in schema.items():
            where = f"{path}.{keyword}"
            if keyword == "$ref":
                written["$ref"] = self._reference(value, where, same)
            elif keyword in (*SAME_VALUE, "prefixItems"):
                inner = within if keyword == "prefixItems" else same
                if keyword == "oneOf":
                    keyword, inner = options, inner if options == "anyOf" else _Mode.EXACT
                    if keyword in schema:  # beside an `anyOf` of its own
                        keyword, inner = "oneOf", _Mode.EXACT
                written[keyword] = [
                    self._schema(one, f"{where}[{index}]", inner, depth + 1)
                    for index, one in enumerate(value)
                ]
            elif keyword in ("properties", "patternProperties"):
                written[keyword] = {
                    name: self._schema(one, at(path, keyword, name), within, depth + 1)
                    for name, one in value.items()
                }
            elif keyword in ("items", "additionalProperties"):
                written[keyword] = self._schema(value, where, within, depth + 1)
            elif keyword in _KEPT:
                written[keyword] = value
        self._check_object(written, path)
        if mode is not _Mode.EXACT and not applicators:
            _give_type(written)
        return written

    # -- one schema --------------------------------------------------------------------------------

    def _check_supported(self, schema: Schema, path: str) -> None:
        for keyword in _UNSUPPORTED:
            if keyword in schema and not (keyword == "if" and not {"then", "else"} & set(schema)):
                raise SchemaError(
                    path, f"{keyword!r} is not supported; leave it out, or say it otherwise"
                )
        if "$id" in schema and path:
            raise SchemaError(path, "'$id' within a schema is not supported; leave it out")
        if schema.get("uniqueItems") is True:
            raise SchemaError(path, "'uniqueItems' is not supported; leave it out")
        if schema.get("unevaluatedItems", True) is not True:
            raise SchemaError(path, "'unevaluatedItems' is not supported; say what 'items' are")
        rest = schema.get("unevaluatedProperties", True)
        if rest is not True and not _APPLICATORS.isdisjoint(schema):
            raise SchemaError(
                path,
                "'unevaluatedProperties' is not supported beside schemas for the same value; use "
                "'additionalProperties'",
            )
        if len(schema.get("patternProperties", ())) > MAX_PATTERN_PROPERTIES:
            raise SchemaError(
                f"{path}.patternProperties",
                f"at most {MAX_PATTERN_PROPERTIES} patterns, got "
                f"{len(schema['patternProperties'])}",
            )
        for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", ())):
            if len(pattern) > MAX_PATTERN_LENGTH:
                raise SchemaError(
                    path,
                    f"a pattern may have {MAX_PATTERN_LENGTH} characters, got {len(pattern)}",
                )
            if flaw := flaw_of(pattern):
                raise SchemaError(f"{path}.pattern" if "pattern" in schema else path, flaw)

    def _plain(self, schema: Schema, path: str) -> Schema:
        """The same in keywords that the library has."""
        if "propertyNames" in schema:
            schema = self._with_names(schema, f"{path}.propertyNames")
        if schema.get("unevaluatedProperties", True) is not True:
            schema = {"additionalProperties": schema["unevaluatedProperties"]} | schema
        if isinstance(schema.get("items"), list):  # as drafts before 2020-12 have it
            first, rest = schema["items"], schema.get("additionalItems", True)
            schema = schema | {"prefixItems": first, "items": rest}
        if schema.get("format") not in _FORMATS:
            schema = {key: value for key, value in schema.items() if key != "format"}
        bounds = {}
        for keyword, sign in (("minimum", 1), ("maximum", -1)):
            for name in (keyword, f"exclusive{keyword.capitalize()}"):
                if name in schema and abs(schema[name]) > _MAX_BOUND:
                    if sign * schema[name] > 0:
                        raise SchemaError(f"{path}.{name}", f"may be {sign * _MAX_BOUND} at most")
                    bounds[name] = -sign * _MAX_BOUND
        return schema | bounds

    def _with_names(self, schema: Schema, path: str) -> Schema:
        """What `propertyNames` says, said by `properties` or `patternProperties`."""
        names = schema["propertyNames"]
        schema = {key: value for key, value in schema.items() if key != "propertyNames"}
        for _ in range(MAX_DEPTH):
            if not (isinstance(names, dict) and "$ref" in names):
                break
            names = self._references.target(names["$ref"], path)
        said = {
            key: value
            for key, value in (names if isinstance(names, dict) else {"enum": []}).items()
            if key in _KEPT and key != "format" and (key, value) != ("type", "string")
        }
        if names is True or not said:
            return schema
        rest = schema.get("additionalProperties", True)
        properties = schema.get("properties", {})
        if said.keys() == {"pattern"} and not properties and "patternProperties" not in schema:
            patterns = {said["pattern"]: rest}
            return schema | {"patternProperties": patterns, "additionalProperties": False}
        allowed: list[Any] = [said["const"]] if said.keys() == {"const"} else said.get("enum", [])
        if (said.keys() | {"enum"}) - {"const"} != {"enum"} or "patternProperties" in schema:
            raise SchemaError(
                path,
                "can be an 'enum', or a 'pattern' where there are no 'properties'; name the keys "
                "in 'properties'",
            )
        kept = {name: properties.get(name, rest) for name in allowed if isinstance(name, str)}
        return schema | {"properties": kept, "additionalProperties": False}

    def _check_object(self, written: Schema, path: str) -> None:
        properties, required = written.get("properties", {}), set(written.get("required", ()))
        num_optional = len(properties.keys() - required)
        self._allowance.num_optional -= num_optional
        if num_optional > MAX_OPTIONAL or self._allowance.num_optional < 0:
            raise SchemaError(
                f"{path}.properties",
                f"at most {MAX_OPTIONAL} properties of an object may be optional, and "
                f"{MAX_OPTIONAL_IN_ALL} in all; require some",
            )
        least = written.get("minProperties", 0)
        is_open = "patternProperties" in written or written.get("additionalProperties") is not False
        if least <= len(required):
            written.pop("minProperties", None)
        elif is_open and least > len(required) + 1:
            raise SchemaError(
                f"{path}.minProperties",
                "can be enforced where all keys are in 'properties' and 'additionalProperties' is "
                "false: other keys may come twice",
            )

    # -- schemas for the same value ----------------------------------------------------------------

    def _check_parts(self, schema: Schema, path: str) -> list[Schema]:
        """All schemas that may speak of the same value; this one first."""
        is_alone = _APPLICATORS.isdisjoint(schema)
        parts = [schema] if is_alone else list(self._references.parts(schema, path))
        product = 1
        for one in parts:
            exact = Decimal(str(one.get("multipleOf", 1))).normalize()
            product *= int(exact.scaleb(max(0, -int(exact.as_tuple().exponent))))
            if product > MAX_MULTIPLE:
                raise SchemaError(
                    f"{path}.multipleOf",
                    f"may be {MAX_MULTIPLE} at most, its decimal point left out; of several for "
                    "the same number their product",
                )
        if len({one["pattern"] for one in parts if "pattern" in one}) > MAX_PATTERNS:
            raise SchemaError(path, f"at most {MAX_PATTERNS} patterns for the same text")
        return parts

    # -- references --------------------------------------------------------------------------------

    def _reference(self, reference: str, path: str, mode: _Mode) -> str:
        key = reference, mode
        if key not in self._names:
            self._references.target(reference, path)
            if len(self._names) >= MAX_DEFINITIONS:
                raise SchemaError(path, f"at most {MAX_DEFINITIONS} schemas may be referred to")
            self._names[key] = f"s{len(self._names)}"
            self._left.append(key)
        return f"#/$defs/{self._names[key]}"


def _closed(schema: Schema, parts: list[Schema]) -> Schema:
    """The schema without properties that no part of it names, unless one speaks of others."""
    named: Schema = {}
    patterns: Schema = {}
    words = [*schema]
    first = min((words.index(word) for word in (*SAME_VALUE, "$ref") if word in words), default=0)
    if "properties" in words[first:]:  # properties come in the order in which they are read
        parts = [*parts[1:], parts[0]]
    for one in parts:
        if "additionalProperties" in one or "unevaluatedProperties" in one:
            return schema
        names = (*one.get("properties", ()), *one.get("required", ()))
        named |= dict.fromkeys((name for name in names if isinstance(name, str)), True)
        patterns |= dict.fromkeys(one.get("patternProperties", ()), True)
    if not named and not patterns and not any("properties" in one for one in parts):
        return schema
    own = {"properties": named | schema.get("properties", {}), "additionalProperties": False}
    if patterns:
        own["patternProperties"] = patterns | schema.get("patternProperties", {})
    return own | {key: value for key, value in schema.items() if key not in own}


def _give_type(written: Schema) -> None:
    """The type that keywords speak of, where they speak of one only."""
    if any(word in written for word in ("type", "const", "enum")):
        return
    types = [name for name, words in KEYWORDS.items() if any(word in written for word in words)]
    if len(types) == 1:
        written["type"] = types[0]
