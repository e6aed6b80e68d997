"""The form that an output must have: a JSON schema, a regular expression, a choice, a grammar.

Checks what can be checked without a grammar library: types, sizes, that JSON is JSON, schemas by
`prepass`. Whether an expression, or a grammar, can be compiled is found there.
"""

import json as json_text
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, NoReturn, cast

import msgspec
from msgspec.structs import force_setattr

from engine.errors import SamplingParamsError
from engine.structured.forms.lark import flaw_of
from engine.structured.forms.prepass import prepared
from engine.structured.forms.references import Allowance
from engine.structured.forms.schema_shapes import SchemaError
from engine.structured.forms.structural_tags import prepared_tag
from engine.types.sampling_checks import NamedArguments, encodable, short

MAX_BYTES: Final = 256 * 1024
"""Longest schema, expression, grammar, or choice in all, as UTF-8."""
MAX_REGEX_LENGTH: Final = 32_768
"""Longest regular expression, in characters."""
MAX_WRITTEN_BYTES: Final = 4 * MAX_BYTES
"""Longest that a schema may be once names are added to close it."""
MAX_NESTING: Final = 64
"""How deep JSON may be nested."""
MAX_CHOICES: Final = 4096

KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The constraints; a request has exactly one."""


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=NamedArguments
):
    """The one constraint of a request's output.

    Field names are vLLM's. Construction checks what it can and raises `SamplingParamsError`.
    """

    NOUN: ClassVar[str] = "structured output"
    EXAMPLE: ClassVar[str] = 'json={"type": "object"}'
    PARAM: ClassVar[str] = "structured_outputs"
    REFUSED: ClassVar[Mapping[str, str]] = {
        "disable_additional_properties": "properties that a schema does not name are forbidden "
        "unless it says additionalProperties: leave that out of the schema",
        "whitespace_pattern": "disable_any_whitespace makes JSON compact, and a grammar may "
        "say what stands between its parts",
        "_backend": "there is one only; leave it out",
        "_backend_was_auto": "there is one only; leave it out",
    }

    json: str | dict[str, Any] | None = None
    """A JSON schema: a dictionary, its text, or a class with `model_json_schema` (pydantic). After
    construction the text of what is enforced, without remarks."""
    regex: str | None = None
    """An expression in Rust's syntax that the whole output matches."""
    choice: list[str] | None = None
    """The output is one of these."""
    grammar: str | None = None
    """A grammar that the whole output matches: Lark with the rule `start`, or GBNF with `root`."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with constrained parts between tags; the JSON text after construction."""
    _is_prepared: bool = False
    """Whether nothing is left to be checked: so it is after construction. What is read from a
    message is not worked through again."""
    disable_any_whitespace: bool = False
    """JSON with a space behind colons and commas and no other whitespace between its parts."""

    def __post_init__(self) -> None:
        """Normalise and check every field.

        Raises:
            SamplingParamsError: not exactly one constraint, or one that cannot be right.
        """
        if self._is_prepared:
            return
        if self.json_object is not None and not isinstance(self.json_object, bool):
            _reject("json_object", self.json_object, "True or False")
        if not isinstance(self.disable_any_whitespace, bool):
            _reject("disable_any_whitespace", self.disable_any_whitespace, "True or False")
        self._check_count()
        for name, remedy in (
            ("json", 'such as {"type": "object", "properties": {…}}'),
            ("structural_tag", 'such as {"type": "structural_tag", "format": {…}}'),
        ):
            value = getattr(self, name)
            if value is not None:
                force_setattr(self, name, _checked_object(name, value, remedy))
        if self.regex is not None:
            _check_text("regex", self.regex, "a regular expression that is not empty")
            if flaw := flaw_of(self.regex):
                raise _error("regex", f": {flaw}.")
            if len(self.regex) > MAX_REGEX_LENGTH:
                raise _error(
                    "regex",
                    f" must be at most {MAX_REGEX_LENGTH} characters long, got {len(self.regex)}.",
                )
        if self.grammar is not None:
            _check_text("grammar", self.grammar, "a grammar that is not empty")
            if "::=" not in self.grammar and ":" not in self.grammar:
                _reject(
                    "grammar",
                    self.grammar,
                    'Lark with a rule called start (start: "yes"), or GBNF with one called root '
                    '(root ::= "yes")',
                )
        if self.choice is not None:
            force_setattr(self, "choice", _checked_choice(self.choice))
        if self.disable_any_whitespace and self.kind not in ("json", "json_object"):
            raise SamplingParamsError(
                f"disable_any_whitespace is for json and json_object; leave it out of {self.kind}.",
                param=f"{self.PARAM}.disable_any_whitespace",
            )
        force_setattr(self, "_is_prepared", True)

    @classmethod
    def from_any(cls, value: object) -> "StructuredOutputsParams":
        """The value itself, or made of a dictionary of fields.

        Raises:
            SamplingParamsError: it is neither, or a field is wrong.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return cls(**value)
        raise SamplingParamsError(
            "structured_outputs must be StructuredOutputsParams, a dictionary of its fields "
            f"({', '.join(KINDS)}) or None, got {short(value)}.",
            param=cls.PARAM,
        )

    @classmethod
    def of_prepared(
        cls, kind: str, value: dict[str, Any], *, disable_any_whitespace: bool = False
    ) -> "StructuredOutputsParams":
        """A schema, or a structural tag, made of parts that are prepared; only its size is checked.

        Raises:
            SamplingParamsError: it is too long.
        """
        values = {
            kind: _written_text(kind, value),
            "disable_any_whitespace": disable_any_whitespace,
        }
        return cast(
            StructuredOutputsParams,
            msgspec.StructMeta.__call__(cls, _is_prepared=True, **values),
        )

    @property
    def kind(self) -> str:
        """Which constraint it is, one of `KINDS`."""
        return next(name for name in KINDS if _is_given(getattr(self, name)))

    @property
    def key(self) -> tuple[str, str, bool]:
        """The constraint as one hashable value: kind, text, disable_any_whitespace."""
        value = getattr(self, self.kind)
        text = value if isinstance(value, str) else json_text.dumps(value, ensure_ascii=False)
        return self.kind, text, self.disable_any_whitespace

    def _check_count(self) -> None:
        given = [name for name in KINDS if _is_given(getattr(self, name))]
        if len(given) != 1:
            raise SamplingParamsError(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}, got "
                f"{' and '.join(given) or 'none'}.",
                param=self.PARAM,
            )


def _is_given(value: object) -> bool:
    return value is not None and value is not False


def _reject(name: str, value: object, allowed: str) -> NoReturn:
    raise _error(name, f" must be {allowed}, got {short(value)}.")


def _error(place: str, said: str) -> SamplingParamsError:
    """The error that begins with a field of ours, or a place in one."""
    place = f"structured_outputs.{place}"
    return SamplingParamsError(f"{place}{said}", param=place)


def _check_text(name: str, value: object, allowed: str) -> None:
    if not isinstance(value, str) or not value:
        _reject(name, value, allowed)
    if not encodable(value):
        _reject(name, value, "text without lone surrogates")
    num_bytes = len(value.encode())
    if num_bytes > MAX_BYTES:
        raise _error(name, f" must be at most {MAX_BYTES} bytes long, got {num_bytes}.")


def _checked_object(name: str, value: Any, remedy: str) -> str:
    """The text of a JSON object that was given as text, dictionary or pydantic class."""
    allowed = f"a JSON object, {remedy}, or its text"
    describe = getattr(value, "model_json_schema", None)
    if callable(describe):
        try:
            value = describe()
        except Exception as error:  # somebody else's code
            raise _error(name, f": {short(value)} gave no schema: {error}") from error
    if isinstance(value, dict):
        _check_nesting(name, value)  # before anything recurses
        # Nor is anything long worked through, nor what is no JSON.
        given = _text_of(name, value, allow_nan=True)
        _check_text(name, given, allowed)
        value = json_text.loads(given)
    else:
        _check_text(name, value, allowed)
        assert isinstance(value, str)
        text = value
        try:
            value = json_text.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise _error(name, f" must be {allowed}; not JSON: {error}.") from error
        if not isinstance(value, dict):
            _reject(name, text, allowed)
        _check_nesting(name, value)
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = (
        prepared if name == "json" else _prepared_tag
    )
    try:
        return _written_text(name, prepare(value))
    except SchemaError as error:
        raise _error(f"{name}{error.path}", f": {error.message}.") from error


def _prepared_tag(value: dict[str, Any]) -> dict[str, Any]:
    allowance = Allowance()
    return prepared_tag(value, lambda schema: prepared(schema, allowance))


def _text_of(name: str, value: dict[str, Any], *, allow_nan: bool = False) -> str:
    try:
        text = json_text.dumps(value, ensure_ascii=False, allow_nan=allow_nan)
    except (TypeError, ValueError) as error:
        raise _error(name, f" must be a JSON object, or its text: {error}.") from error
    if not encodable(text):
        _reject(name, value, "text without lone surrogates")
    return text


def _written_text(name: str, value: dict[str, Any]) -> str:
    """The JSON of what is enforced, which may be longer than what was asked for."""
    text = _text_of(name, value)
    num_bytes = len(text.encode())
    if num_bytes > MAX_WRITTEN_BYTES:
        raise _error(
            name,
            f" takes {num_bytes} bytes with the names that close its objects, and may take "
            f"{MAX_WRITTEN_BYTES}; use fewer references and 'allOf'.",
        )
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_nesting(name: str, value: object) -> None:
    """Refuse what is nested deep, or holds itself; walks without recursion."""
    level: list[object] = [value]
    for _ in range(MAX_NESTING):
        level = [
            item
            for one in level
            if isinstance(one, dict | list | tuple)
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list | tuple)
        ]
        if not level:
            return
        if len(level) > MAX_BYTES:
            break  # it holds itself many times over, or is too long anyway
    raise _error(name, f" must not be nested deeper than {MAX_NESTING} levels.")


def _checked_choice(value: object) -> list[str]:
    """The distinct choices, in their order."""
    allowed = f"a list of 1 to {MAX_CHOICES} strings that are not empty"
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, list | tuple | set):
        _reject("choice", value, allowed)
    if not value or len(value) > MAX_CHOICES:
        _reject("choice", value, allowed)
    for item in value:
        _check_text("choice", item, allowed)
    choices = list(dict.fromkeys(value))
    num_bytes = sum(len(item.encode()) for item in choices)
    if num_bytes > MAX_BYTES:
        raise _error("choice", f" must be at most {MAX_BYTES} bytes in all, got {num_bytes}.")
    return choices
