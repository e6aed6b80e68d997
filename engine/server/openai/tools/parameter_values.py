"""Parameters whose values are written as text: what is a string as it stands, and what is JSON.

Knows the rules by which a text is read, for the forms of calls that write strings without quotes.
Both the parsers of these forms and the grammars that hold strict calls ask here, so that what a
grammar lets through is read as what the schema allows. Knows no form and no grammar.
"""

import json
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.server.openai.tools.call_parser import dump_arguments
from engine.server.openai.tools.python_source import parse_python, read_literal
from engine.server.openai.tools.schema_options import (
    Option,
    SchemaOptions,
    own_types,
    own_values,
    types_of_option,
)
from engine.structured.forms.schema_terms import KEYWORDS, MAX_INTEGER, Schema, type_of

_ORDER: Final = ("null", "integer", "number", "boolean", "object", "array", "string")
"""In which types are tried; vLLM's order. What is left is text."""
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
_BOOLEANS: Final = ("true", "false", "1", "0")
_BOUNDS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
_OF_STRINGS: Final = (*KEYWORDS["string"], "format")
_ERRORS: Final = (ValueError, SyntaxError, RecursionError, MemoryError)
"""Of texts that cannot be read as something."""


class Parameters:
    """The parameters of one function, by name.

    Args:
        schema: of the function's arguments.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._options = SchemaOptions(schema)
        self._found: dict[str, ParameterValues] = {}

    def __getitem__(self, name: str) -> "ParameterValues":
        """The values of one parameter, which the schema need not know."""
        if name not in self._found:
            ways = self._options.of(self._schema) or [()]
            said = [{"allOf": [_said(one, name) for one in way]} for way in ways]
            self._found[name] = ParameterValues(self._options.of({"anyOf": said}))
        return self._found[name]


def _said(schema: Schema, name: str) -> Any:
    """What one schema of objects says of the value at a key."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    patterns = schema.get("patternProperties")
    others = schema.get("additionalProperties")
    inner = list(patterns.values()) if isinstance(patterns, dict) else []
    inner += [others] if isinstance(others, dict) else []
    # Which of the patterns it matches is left open: they are a client's, and may take for ever.
    return {"anyOf": inner} if inner else True


@dataclass(frozen=True, slots=True)
class WrittenForms:
    """In which ways the values of a parameter are written, some of which are strings.

    Attributes:
        is_free: whether any string will do; what a text is read as then fits, unless
            `has_brackets`.
        texts: schemas of strings, which are written as they are.
        words: single strings, written as they are; those that are read as something else left out.
        others: schemas of what is written as JSON.
        has_brackets: a text that begins with a bracket might be read as one of the others, which
            it need not fit.
    """

    is_free: bool
    texts: list[Schema]
    words: list[str]
    others: list[Schema]
    has_brackets: bool


class ParameterValues:
    """The values that a parameter can have, and how a text is read as one of them.

    Where it can be a string, a text is something else only where it is spelled as JSON spells it
    (`null`, `true` and `false` in any case), and fits; it can then not be that string. Where it
    cannot, Python's and other spellings do, too. A parameter of which nothing is said is JSON.

    Args:
        options: what a value may fit, any one of them; None: anything.
    """

    def __init__(self, options: list[Option] | None) -> None:
        self._options = [(option, types_of_option(option)) for option in options or ()]
        self._is_any = options is None or () in options
        found = {name for _, types in self._options for name in types}
        self._types = tuple(name for name in _ORDER if name in found)
        self._is_free = any("string" in types and _is_free(way) for way, types in self._options)

    @property
    def has_texts(self) -> bool:
        """Whether some values are strings that are written as they are; else all are JSON."""
        return not self._is_any and "string" in self._types

    @property
    def num_parts(self) -> int:
        """How many alternatives there are, and values that they list."""
        schemas = [schema for option, _ in self._options for schema in option]
        return 1 + sum(1 + len(own_values(schema) or ()) for schema in schemas)

    def as_json(self, text: str) -> str:
        """A text as JSON: what the schema says, else whatever it can be read as.

        Text that is no literal of any kind is a string, also where the schema wants something
        else: the client then sees what the model wrote.
        """
        if self._types == ("string",) and not self._is_any:
            return dump_arguments(text)
        spelled = text if "string" in self._types else text.strip()
        readings = [] if self._is_any else self._readings(spelled)
        for value in (*filter(self._fits, readings), *readings):
            try:
                return _dumped(value, spelled)
            except _ERRORS:
                continue
        for read in (_json, _python):
            try:
                return dump_arguments(read(spelled))
            except _ERRORS:
                continue
        return dump_arguments(text)

    def forms(self) -> WrittenForms | None:
        """How values are written, for a schema that `has_texts`; None where several must fit."""
        texts: list[Schema] = []
        words: list[str] = []
        others: list[Schema] = []
        for option, _ in self._options:
            if len(option) > 1:
                return None
            (schema,) = option
            values = own_values(schema)
            if values is not None:
                words += [one for one in values if isinstance(one, str) and self._is_read(one)]
                rest = [value for value in values if not isinstance(value, str)]
                others += [{"enum": rest}] if rest else []
                continue
            types = own_types(schema) or []
            if "string" in types:
                texts.append(schema | {"type": "string"})
            left = [name for name in types if name != "string"]
            demands = {key: schema[key] for key in schema if key not in _OF_STRINGS}
            others += [demands | {"type": left if len(left) > 1 else left[0]}] if left else []
        has_brackets = any(map(_is_held_inside, others))
        return WrittenForms(self._is_free, texts, words, others, has_brackets)

    def _is_read(self, word: str) -> bool:
        """Whether a word that is one of the values is read as itself."""
        return self._readings(word) == [word] or self.as_json(word) == dump_arguments(word)

    def _readings(self, text: str) -> list[Any]:
        """As what the text can be read, of the types that there are, in order."""
        found = []
        for name in self._types:
            try:
                found.append(_read(name, text, is_exact="string" in self._types))
            except _ERRORS:
                continue
        return found

    def _fits(self, value: Any) -> bool:
        if isinstance(value, float) and not math.isfinite(value) and self._is_free:
            return False  # many clients cannot read such a number, and it may be a string
        return any(_fits(value, option, types) for option, types in self._options)


def _is_held_inside(schema: Schema) -> bool:
    """Whether it demands something of what is in an object or a list."""
    types, words = own_types(schema) or [], schema.keys()
    return any(
        name in types and not words.isdisjoint(KEYWORDS[name]) for name in ("object", "array")
    )


def _is_free(option: Option) -> bool:
    """Whether nothing is demanded of strings beside being one."""
    demands = {"const", "enum", *KEYWORDS["string"]}
    return all(demands.isdisjoint(schema) for schema in option)


def _fits(value: Any, option: Option, types: Sequence[str]) -> bool:
    """Whether a value fits, apart from what is in objects and lists, and from a string's form."""
    kind = type_of(value)
    if kind not in types and not (kind == "integer" and "number" in types):
        return False
    for schema in option:
        values = own_values(schema)
        if values is not None and not any(type_of(v) == kind and v == value for v in values):
            return False
        if kind in ("integer", "number") and not _is_within(value, schema):
            return False
    return True


def _is_within(value: int | float, schema: Schema) -> bool:
    """Whether a number lies within the bounds; those of another shape are none."""
    for keyword, holds in _BOUNDS.items():
        bound = schema.get(keyword)
        is_bound = isinstance(bound, int | float) and not isinstance(bound, bool)
        if is_bound and not holds(value, bound):
            return False
    step: Any = schema.get("multipleOf")
    # Fractions are left out: binary ones are not what was written, and a grammar holds none.
    is_step = isinstance(step, int | float) and 0 < step <= MAX_INTEGER and step % 1 == 0
    return not is_step or value % int(step) == 0


def _read(name: str, text: str, *, is_exact: bool) -> Any:
    """A text as a value of one type.

    Args:
        is_exact: no other spellings than JSON's, as the text may also be a string.

    Raises:
        ValueError, SyntaxError, RecursionError, MemoryError: it is none.
    """
    if name == "string":
        return text
    word = text.lower()
    if name == "null" and (word == "null" or (word == "none" and not is_exact)):
        return None
    if name == "boolean" and word in (_BOOLEANS[:2] if is_exact else _BOOLEANS):
        return word in ("true", "1")
    if name in ("integer", "number"):
        return _number(text, name, is_exact=is_exact)
    if name in ("object", "array"):
        kind = dict if name == "object" else list
        for read in (_json,) if is_exact else (_json, _python):
            try:
                value = read(text)
            except _ERRORS:
                continue
            if isinstance(value, kind):
                return value
    raise ValueError(f"not of type {name}")


def _number(text: str, name: str, *, is_exact: bool) -> int | float:
    if is_exact:
        match = _NUMBER.fullmatch(text)
        if match is None or (name == "integer" and match.lastindex):
            raise ValueError("not spelled as JSON's numbers are")
    if name == "integer":
        return int(text)
    try:
        return int(text)
    except ValueError:
        return float(text)


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(word: str) -> None:
    raise ValueError(f"JSON does not have {word}")


def _python(text: str) -> Any:
    return read_literal(parse_python(text))


def _dumped(value: Any, text: str) -> str:
    """The value as JSON; a number without an end as it is written, if JSON can be written so.

    Raises:
        ValueError, RecursionError: it cannot.
    """
    try:
        return dump_arguments(value)
    except ValueError:
        _json(text)
        return text
