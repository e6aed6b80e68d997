"""A JSON schema, put so that the grammar made of it holds all that it demands: `held_schema`.

Knows the keywords of JSON Schema (draft 2020-12 and its forerunners), where schemas stand within
schemas, and of which demands the grammar library takes no notice. Those are said in another way,
which may allow less, never more; what cannot be said is refused, so that what comes back is what
was asked for.
"""

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

from engine.types.schema_disjoint import are_disjoint
from engine.types.schema_objects import hold_array, hold_object
from engine.types.schema_values import (
    KEYWORDS,
    Schema,
    SchemaError,
    check_value,
    hold_number,
    hold_string,
    type_of,
    types_of,
)

_UNENFORCED: Final = (
    *("not", "if", "dependentRequired", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef"),
)
_APPLICATORS: Final = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Of these the grammar library reads the first that is there, and nothing beside it."""
_DEMANDS: Final = frozenset(word for words in KEYWORDS.values() for word in words)
_IGNORED: Final = ("minContains", "maxContains")
"""Keywords that say nothing alone, but which the grammar library takes notice of."""
_DEFINITIONS: Final = ("$defs", "definitions")


def held_schema(schema: Schema) -> Schema:
    """The schema itself if all of it is held, else one that says the same, or less.

    `format` is a remark, as the standard has it, though some are held.

    Raises:
        SchemaError: a demand that cannot be held, with its place.
    """
    return _Writer(schema).write()


class _Writer:
    """Writes one schema, and the definitions that it refers to."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._moved: dict[str, str] = {}
        """Names in `$defs` of what references point to elsewhere."""
        self._found: dict[str, Schema] = {}
        """What references point to, written anew, by where it will be."""
        self._left: list[tuple[str, Any]] = []

    def write(self) -> Schema:
        written = self.schema(self._root, "", is_root=True)
        if written is False:
            raise SchemaError("", "nothing fits it")
        while self._left:
            pointer, target = self._left.pop()
            place = pointer.removeprefix("#").replace("/", ".")
            found = self.schema(target, place)
            if found is False:
                raise SchemaError(place, "nothing fits it")
            self._found[pointer] = found
        return self._with_definitions(written)

    def _with_definitions(self, written: Schema) -> Schema:
        for pointer, schema in self._found.items():
            _, group, name = pointer.split("/", 2)
            written[group] = {**written.get(group, {}), name: schema}
        return written

    def schema(self, schema: Any, path: str, *, is_root: bool = False) -> Any:
        """The schema as it can be held; False if nothing fits it."""
        if isinstance(schema, bool):
            return {} if schema else False
        if not isinstance(schema, dict):
            raise SchemaError(path, "must be a schema: an object, true or false")
        for keyword in _UNENFORCED:
            if keyword in schema:
                raise SchemaError(
                    path, f"{keyword!r} is not supported; leave it out, or say it otherwise"
                )
        if "$id" in schema and not is_root:
            raise SchemaError(path, "'$id' within a schema is not supported; leave it out")
        schema = {
            key: value
            for key, value in schema.items()
            if key not in _IGNORED and not (key == "uniqueItems" and value is False)
        }
        for keyword, write in (
            ("$ref", self._referring),
            ("const", self._values),
            ("enum", self._values),
            ("anyOf", self._any),
            ("oneOf", self._any),
            ("allOf", self._all),
        ):
            if keyword in schema:
                return write(schema, keyword, path)
        return self._typed(schema, path)

    def _referring(self, schema: Schema, keyword: str, path: str) -> Any:
        self._check_alone(schema, keyword, path)
        return schema | {"$ref": self._reference(schema["$ref"], path)}

    def _typed(self, schema: Schema, path: str) -> Any:
        types = types_of(schema, path)
        if types is None:
            return schema
        if {"integer", "number"} & set(types):
            types = hold_number(schema, types, path)
        if "string" in types:
            hold_string(schema, path)
        if "array" in types and any(word in schema for word in KEYWORDS["array"]):
            hold_array(schema, path, self.schema)
        if "object" in types and any(word in schema for word in KEYWORDS["object"]):
            hold_object(schema, path, self.schema, self._followed)
        given = schema.get("type")
        if given not in (types, types[0]):
            schema["type"] = types[0] if len(types) == 1 else types
        return schema

    def _values(self, schema: Schema, keyword: str, path: str) -> Any:
        self._check_alone(schema, keyword, path, but=("type",))
        where = f"{path}.{keyword}"
        values = schema[keyword] if keyword == "enum" else [schema[keyword]]
        if not isinstance(values, list) or not values:
            raise SchemaError(where, "must be a list of values that is not empty")
        for value in values:
            check_value(value, where)
        if "type" in schema:
            types = set(types_of(schema, path) or ())
            values = [
                value
                for value in values
                if type_of(value) in types or (type_of(value) == "integer" and "number" in types)
            ]
        if not values:
            return False
        return schema | {keyword: values if keyword == "enum" else values[0]}

    def _all(self, schema: Schema, keyword: str, path: str) -> Any:
        self._check_alone(schema, keyword, path)
        inner = schema.pop(keyword)
        if not isinstance(inner, list) or len(inner) != 1:
            raise SchemaError(
                path, "'allOf' is supported with one schema; merge its schemas into one"
            )
        found = self.schema(inner[0], f"{path}.allOf[0]")
        return found if found is False else schema | found

    def _any(self, schema: Schema, keyword: str, path: str) -> Any:
        options = schema.pop(keyword)
        where = f"{path}.{keyword}"
        if not isinstance(options, list) or not options:
            raise SchemaError(where, "must be a list of schemas that is not empty")
        options = list(self._distributed(schema, options, keyword, path))
        if keyword == "oneOf":
            self._check_disjoint(options, path)
        found = (self.schema(one, f"{where}[{index}]") for index, one in enumerate(options))
        possible = [one for one in found if one is not False]
        remarks = {key: value for key, value in schema.items() if key not in (*_DEMANDS, "type")}
        return remarks | {"anyOf": possible} if possible else False

    def _distributed(
        self, schema: Schema, options: list[Any], keyword: str, path: str
    ) -> Iterator[Any]:
        """The options with what stands beside them, which is said again in each."""
        self._check_alone(schema, keyword, path, but=(*_DEMANDS, "type"))
        beside = {key: value for key, value in schema.items() if key in (*_DEMANDS, "type")}
        for index, option in enumerate(options):
            if not beside or option is False:
                yield option
                continue
            option = {} if option is True else option
            demands = {
                key: value
                for key, value in (option.items() if isinstance(option, dict) else ())
                if key in (*_DEMANDS, *_APPLICATORS, *_UNENFORCED, "type")
            }
            mine = set(beside) & set(demands)
            is_type = set(beside) == {"type"} and "$ref" not in demands
            if not (isinstance(option, dict) and (set(demands) <= {"required"} or is_type)):
                raise SchemaError(
                    f"{path}.{keyword}[{index}]",
                    f"beside {', '.join(map(repr, sorted(beside)))} it can only say 'required'; "
                    f"say all in each schema of {keyword!r}",
                )
            if not mine:
                yield {**option, **beside}
            elif mine == {"required"}:
                names = [*_list(beside["required"]), *_list(option["required"])]
                yield {**option, **beside, "required": list(dict.fromkeys(names))}
            else:
                left = set(types_of(beside, path) or ()) & set(types_of(option, path) or ())
                yield {**option, "type": sorted(left)} if left else False

    def _check_disjoint(self, options: list[Any], path: str) -> None:
        for later in range(1, len(options)):
            for former in range(later):
                if not are_disjoint(options[former], options[later], self._followed):
                    raise SchemaError(
                        f"{path}.oneOf",
                        f"a value may fit both the schemas {former} and {later}; say 'anyOf', or "
                        "require of each a property with a 'const' of its own",
                    )

    def _check_alone(
        self, schema: Schema, keyword: str, path: str, but: tuple[str, ...] = ()
    ) -> None:
        others = [
            word
            for word in schema
            if word != keyword
            and word not in but
            and (word in _DEMANDS or word in _APPLICATORS or word == "type")
        ]
        if others:
            raise SchemaError(
                path,
                f"{keyword!r} cannot stand beside {', '.join(map(repr, others))}; say it without",
            )

    # -- references --------------------------------------------------------------------------------

    def _reference(self, reference: Any, path: str) -> str:
        """What to write for a reference; what it points to is written later."""
        self._followed({"$ref": reference}, path)
        if reference == "#":
            return "#"
        pointer, target = str(reference), self._at(reference, path)
        parts = pointer.split("/")
        is_simple = len(parts) == 3 and parts[1] in _DEFINITIONS and not {"~", "%"} & set(pointer)
        if not is_simple or not parts[2]:
            taken = self._root.get("$defs", {})
            number = len(self._moved)
            while f"ref_{number}" in taken:
                number += 1
            pointer = self._moved.setdefault(pointer, f"#/$defs/ref_{number}")
        if pointer not in self._found:
            self._found[pointer] = {}
            self._left.append((pointer, target))
        return pointer

    def _followed(self, schema: Any, path: str) -> Any:
        """What a schema leads to that may be a reference, to references even."""
        seen: list[Any] = []
        while isinstance(schema, dict) and "$ref" in schema:
            reference = schema["$ref"]
            if reference in seen:
                raise SchemaError(path, f"'$ref' leads to itself: {str(reference)[:80]!r}")
            seen.append(reference)
            schema = self._at(reference, path)
        return schema

    def _at(self, reference: Any, path: str) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise SchemaError(
                path,
                f"'$ref' must point into the schema itself (#/…), not to {str(reference)[:80]!r}",
            )
        target: Any = self._root
        for part in unquote(reference).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise SchemaError(path, f"'$ref' points to nothing: {reference[:80]!r}")
        return target


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
