"""A JSON schema, put so that its grammar holds all that it demands: `enforceable_schema`.

Knows the keywords of JSON Schema (draft 2020-12 and its forerunners), where schemas stand within
schemas, and of which demands the grammar library takes no notice. Those are said in another way,
which may allow less, never more; what cannot be said is refused, so that what comes back is what
was asked for.
"""

from collections.abc import Container, Iterator
from typing import Any, Final

from engine.types.schema_disjoint import Disjointness
from engine.types.schema_objects import hold_array, hold_object
from engine.types.schema_references import is_local, pointed_at
from engine.types.schema_shapes import Shapes
from engine.types.schema_values import (
    KEYWORDS,
    Budget,
    Schema,
    SchemaError,
    common_types,
    hold_number,
    hold_string,
    num_steps_of,
    type_of,
    types_of,
)

_UNENFORCED: Final = (
    *("not", "if", "dependentRequired", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef"),
)
_APPLICATORS: Final = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Of these the grammar library reads the first that is there, and nothing beside it."""
_DEMANDS: Final = frozenset(("type", *(word for words in KEYWORDS.values() for word in words)))
_SAYINGS: Final = _DEMANDS.union(_APPLICATORS, _UNENFORCED)
_IGNORED: Final = ("minContains", "maxContains")
"""Keywords that say nothing alone, but which the grammar library takes notice of."""
_MAX_PLACE: Final = 200
_DEFINITIONS: Final = ("$defs", "definitions")


def enforceable_schema(schema: Schema, budget: Budget | None = None) -> Schema:
    """The schema itself if all of it is held, else one that says the same, or less.

    `format` is a remark, as the standard has it, though some are held.

    Args:
        budget: what it may take, where several schemas share it.

    Raises:
        SchemaError: a demand that cannot be held, with its place; or it would take too long.
    """
    return _Writer(schema, budget or Budget()).write()


class _Writer:
    """Writes one schema, and the definitions that it refers to."""

    def __init__(self, root: Schema, budget: Budget) -> None:
        self._root = root
        self._budget = budget
        self._shapes = Shapes(budget)
        self._targets: dict[str, Any] = {}
        """What references point to, as it was given."""
        self._ends: dict[str, Any] = {}
        """What references lead to in the end."""
        self._num_moved = 0
        self._moved: dict[str, str] = {}
        """Names in `$defs` of what references point to elsewhere."""
        self._found: dict[str, Schema] = {}
        """What references point to, written anew, by where it will be."""
        self._left: list[tuple[str, Any]] = []

    def write(self) -> Schema:
        self._shapes.check(self._root, "")
        written = self.schema(self._root, "", is_root=True)
        if written is False:
            raise SchemaError("", "nothing fits it")
        while self._left:
            pointer, target = self._left.pop()
            place = _place(pointer)
            found = self.schema(target, place)
            if found is False:
                raise SchemaError(place, "nothing fits it")
            self._found[pointer] = found
        return self._with_definitions(written)

    def _with_definitions(self, written: Schema) -> Schema:
        groups: dict[str, dict[str, Schema]] = {}
        for pointer, schema in self._found.items():
            _, group, name = pointer.split("/", 2)
            groups.setdefault(group, {})[name] = schema
        for group, schemas in groups.items():
            written[group] = {**written.get(group, {}), **schemas}
        return written

    def schema(self, schema: Any, path: str, *, is_root: bool = False) -> Any:
        """The schema as it can be held; False if nothing fits it."""
        if isinstance(schema, bool):
            return {} if schema else False
        self._budget.spend(num_steps_of(schema), path)
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
            hold_object(schema, path, self.schema, self._followed, self._budget)
        given = schema.get("type")
        if given not in (types, types[0]):
            schema["type"] = types[0] if len(types) == 1 else types
        return schema

    def _values(self, schema: Schema, keyword: str, path: str) -> Any:
        self._check_alone(schema, keyword, path, but=("type",))
        values = schema[keyword] if keyword == "enum" else [schema[keyword]]
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
        if len(inner) != 1:
            raise SchemaError(
                path, "'allOf' is supported with one schema; merge its schemas into one"
            )
        found = self.schema(inner[0], f"{path}.allOf[0]")
        return found if found is False else schema | found

    def _any(self, schema: Schema, keyword: str, path: str) -> Any:
        where = f"{path}.{keyword}"
        options = list(self._distributed(schema, schema.pop(keyword), keyword, path))
        if keyword == "oneOf":
            self._check_disjoint(options, path)
        found = (self.schema(one, f"{where}[{index}]") for index, one in enumerate(options))
        possible = [one for one in found if one is not False]
        remarks = {key: value for key, value in schema.items() if key not in _DEMANDS}
        return remarks | {"anyOf": possible} if possible else False

    def _distributed(
        self, schema: Schema, options: list[Any], keyword: str, path: str
    ) -> Iterator[Any]:
        """The options with what stands beside them, which is said again in each."""
        self._check_alone(schema, keyword, path, but=_DEMANDS)
        beside = {key: value for key, value in schema.items() if key in _DEMANDS}
        for index, option in enumerate(options):
            if not beside or option is False:
                yield option
                continue
            option = {} if option is True else option
            demands = {
                key: value
                for key, value in (option.items() if isinstance(option, dict) else ())
                if key in _SAYINGS
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
                names = [*beside["required"], *option["required"]]
                self._budget.spend(len(names), path)
                yield {**option, **beside, "required": list(dict.fromkeys(names))}
            else:
                left = common_types(types_of(beside, path) or [], types_of(option, path) or [])
                yield {**option, "type": left if len(left) > 1 else left[0]} if left else False

    def _check_disjoint(self, options: list[Any], path: str) -> None:
        if (both := Disjointness(self._followed, self._budget).overlap(options, path)) is not None:
            raise SchemaError(
                f"{path}.oneOf",
                f"a value may fit both the schemas {both[0]} and {both[1]}; say 'anyOf', or "
                "require of each a property with a 'const' of its own",
            )

    def _check_alone(
        self, schema: Schema, keyword: str, path: str, but: Container[str] = ()
    ) -> None:
        others = [
            word
            for word in schema
            if word != keyword and word not in but and (word in _DEMANDS or word in _APPLICATORS)
        ]
        if others:
            raise SchemaError(
                path,
                f"{keyword!r} cannot stand beside {', '.join(map(repr, others))}; say it without",
            )

    # -- references --------------------------------------------------------------------------------

    def _reference(self, reference: str, path: str) -> str:
        """What to write for a reference; what it points to is written later."""
        self._followed({"$ref": reference}, path)
        if reference == "#":
            return "#"
        pointer, target = reference, self._at(reference, path)
        parts = pointer.split("/")
        is_simple = len(parts) == 3 and parts[1] in _DEFINITIONS and not {"~", "%"} & set(pointer)
        if not is_simple or not parts[2]:
            pointer = self._moved.get(pointer) or self._move(pointer)
        if pointer not in self._found:
            self._found[pointer] = {}
            self._left.append((pointer, target))
        return pointer

    def _move(self, pointer: str) -> str:
        """A place in `$defs` of its own for what a reference points to."""
        taken = self._root.get("$defs", {})
        while f"ref_{self._num_moved}" in taken:
            self._num_moved += 1
        self._moved[pointer] = f"#/$defs/ref_{self._num_moved}"
        self._num_moved += 1
        return self._moved[pointer]

    def _followed(self, schema: Any, path: str) -> Any:
        """What a schema leads to that may be a reference, to references even."""
        seen: set[str] = set()
        while isinstance(schema, dict):
            self._budget.spend(1, path)
            if "$ref" not in schema:
                inner = schema.get("allOf", ())
                if len(inner) != 1:
                    break
                schema = inner[0]
                continue
            reference = schema["$ref"]
            target = self._at(reference, path)
            if reference in seen:
                raise SchemaError(path, f"'$ref' leads to itself: {reference[:80]!r}")
            seen.add(reference)
            schema = self._ends.get(reference, target)
        self._ends |= dict.fromkeys(seen, schema)
        return schema

    def _at(self, reference: str, path: str) -> Any:
        if not is_local(reference):
            raise SchemaError(
                path, f"'$ref' must point into the schema itself (#/…), not to {reference[:80]!r}"
            )
        if reference in self._targets:
            return self._targets[reference]
        try:
            target = pointed_at(self._root, reference)
        except LookupError:
            raise SchemaError(path, f"'$ref' points to nothing: {reference[:80]!r}") from None
        self._shapes.check(target, _place(reference))
        self._targets[reference] = target
        return target


def _place(pointer: str) -> str:
    return pointer.removeprefix("#").replace("/", ".")[:_MAX_PLACE]
