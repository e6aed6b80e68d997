"""How calls amid free text are held to their schemas, form by form, as structural tags.

Knows xgrammar's structural tags and how each family writes its calls. What a parser beside this
file would take for a call is either one that fits, or is not let through at all. Forms that are not
here (Python's), and those that begin with a special token, cannot be held.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.server.openai.tools.choice import has_references
from engine.server.openai.tools.definitions import NO_PARAMETERS, Tool, ToolsError
from engine.server.openai.tools.parameter_values import Parameters, ParameterValues, WrittenForms
from engine.types.expression_parser import parse
from engine.types.grammar_messages import MAX_WHITESPACE
from engine.types.regular_expression import others, restricted, written
from engine.types.schema_values import Budget, SchemaError

Form = dict[str, Any]
_ANY_OBJECT: Form = {"type": "object"}
_TEXT_START = written(parse(r"[^\s{\[<]"))
_NO_ANGLE = others(((ord("<"), ord("<")),))
_NO_BRACKET = others(tuple((ord(one), ord(one)) for one in "<[{"))
_STEPS_OF_VALUE = 4
"""What it takes to write one alternative of a parameter, or one word."""
_ANY_TEXT: Form = {"type": "any_text", "excludes": ["</parameter>", "</function>"]}
_TEXT_OF_NO_JSON: tuple[Form, ...] = (
    {"type": "const_string", "value": ""},
    {
        "type": "sequence",
        "elements": [
            {"type": "regex", "pattern": written(parse(r"[ \t\r\n]*(?:[^\s{\[<]|<[^/<])"))},
            _ANY_TEXT,
        ],
    },
)
"""Texts that are no JSON object and no list, as they do not begin so."""


@dataclass(frozen=True, slots=True)
class StrictForm:
    """One family's calls as a structural tag's format.

    Attributes:
        trigger: what calls begin with; must be no special token. Empty: they begin the answer.
        make: from tools (schemas as they are held), and whether one call is the most, to a format.
    """

    trigger: str
    make: Callable[[Sequence[Tool], bool], Form]


def tagged(trigger: str, begin: str, end: str) -> StrictForm:
    """Each call on its own behind a tag.

    Args:
        begin: up to the arguments, with NAME for the function's name; starts with the trigger.
        end: what follows the arguments.
    """

    def make(tools: Sequence[Tool], is_single: bool) -> Form:
        return _triggered([trigger], [_call(tool, begin, end) for tool in tools], is_single)

    return StrictForm(trigger, make)


def listed(trigger: str, excludes: tuple[str, ...] = ()) -> StrictForm:
    """A list of calls behind a word; what is excluded could begin a call otherwise."""

    def make(tools: Sequence[Tool], is_single: bool) -> Form:
        calls = [_call(tool, '{"name": "NAME", "arguments": ', "}") for tool in tools]
        content = _separated(calls, ", ", is_single)
        tag = {"type": "tag", "begin": f"{trigger}[", "content": content, "end": "]"}
        return _triggered([trigger], [tag], is_single) | {"excludes": list(excludes)}

    return StrictForm(trigger, make)


def bare(key: str, separator: str, excludes: tuple[str, ...] = ()) -> StrictForm:
    """Calls that are the whole answer; any other begins neither with a bracket nor with a tag.

    Args:
        key: of the arguments.
        separator: between calls.
    """

    def make(tools: Sequence[Tool], is_single: bool) -> Form:
        calls = [_call(tool, f'{{"name": "NAME", "{key}": ', "}") for tool in tools]
        text = [
            {"type": "regex", "pattern": _TEXT_START},
            {"type": "any_text", "excludes": list(excludes)},
        ]
        sequence = {"type": "sequence", "elements": text}
        return {"type": "or", "elements": [_separated(calls, separator, is_single), sequence]}

    return StrictForm("", make)


def xml_parameters() -> StrictForm:
    """Functions and parameters as tags, as Qwen3-Coder writes them."""

    def make(tools: Sequence[Tool], is_single: bool) -> Form:
        tags = []
        budget = Budget()
        for tool in tools:
            content = _xml_arguments(tool, budget)
            for around, end in (("<tool_call>\n", "\n</tool_call>"), ("", "")):
                begin = f"{around}<function={tool.name}>\n"
                closing = f"</function>{end}"
                tags.append({"type": "tag", "begin": begin, "content": content, "end": closing})
        return _triggered(["<tool_call>", "<function="], tags, is_single)

    return StrictForm("<tool_call>", make)


def _call(tool: Tool, begin: str, end: str) -> Form:
    schema = tool.schema if tool.strict else _ANY_OBJECT
    return {
        "type": "tag",
        "begin": begin.replace("NAME", tool.name),
        "content": {
            "type": "json_schema",
            "json_schema": schema,
            "max_whitespace_cnt": MAX_WHITESPACE,
        },
        "end": end,
    }


def _triggered(triggers: list[str], tags: list[Form], is_single: bool) -> Form:
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": tags,
        "stop_after_first": is_single,
    }


def _separated(tags: list[Form], separator: str, is_single: bool) -> Form:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }


def _xml_arguments(tool: Tool, budget: Budget) -> Form:
    """The parameters between a function's tags, in their schema's order."""
    if not tool.strict:
        return {"type": "any_text", "excludes": ["</function>", "<tool_call>", "</tool_call>"]}
    schema = tool.schema
    is_plain = "properties" in schema or schema == NO_PARAMETERS
    if not is_plain or schema.get("additionalProperties") or schema.get("patternProperties"):
        raise ToolsError(
            "a strict function of this model's form of calls needs its parameters in 'properties'",
            param=tool.place,
        )
    for keyword in ("minProperties", "maxProperties"):
        if keyword in schema:
            raise ToolsError(
                "cannot be held in this model's form of calls; leave it out",
                param=f"{tool.place}.{keyword}",
            )
    elements: list[Form] = []
    parameters = Parameters(schema)
    for name in schema.get("properties", {}):
        place = f"{tool.place}.properties.{name}"
        values = parameters[name]
        try:
            budget.spend(_STEPS_OF_VALUE * values.num_parts, place)
        except SchemaError as error:
            raise ToolsError(error.message, param=place) from error
        element: Form = {
            "type": "tag",
            "begin": f"<parameter={name}>\n",
            "content": _xml_value(name, values, schema, place),
            "end": "\n</parameter>\n",
        }
        if name not in schema.get("required", []):
            element = {"type": "optional", "content": element}
        elements.append(element)
    return {"type": "sequence", "elements": elements or [{"type": "const_string", "value": ""}]}


def _xml_value(name: str, values: ParameterValues, root: Form, place: str) -> Form:
    """A parameter's text: strings as they are, everything else as JSON."""
    if set(name) & set("<>\n"):
        raise ToolsError("a parameter's name cannot have '<', '>' or line ends", param=place)
    if not values.has_texts:
        return _xml_json(root["properties"][name], root, place)
    forms = values.forms()
    if forms.is_free:
        texts = [_ANY_TEXT] if not forms.has_brackets else [*_TEXT_OF_NO_JSON]
        return texts[0] if len(texts) == 1 else _one_of([*texts, *_xml_others(forms, root, place)])
    texts = [_xml_text(one, place, has_brackets=forms.has_brackets) for one in forms.texts]
    if any("<" in word or word != word.strip("\n") for word in forms.words):
        raise ToolsError("a value cannot have '<', nor line ends around it", param=place)
    texts += [{"type": "const_string", "value": word} for word in forms.words]
    return _one_of([*texts, *_xml_others(forms, root, place)])


def _one_of(elements: list[Form]) -> Form:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _xml_others(forms: WrittenForms, root: Form, place: str) -> list[Form]:
    if not forms.others:
        return []
    schema = forms.others[0] if len(forms.others) == 1 else {"anyOf": forms.others}
    return [_xml_json(schema, root, place)]


def _xml_json(schema: Form, root: Form, place: str) -> Form:
    alone = schema
    if has_references(schema):
        alone = schema | {key: root[key] for key in ("$defs", "definitions") if key in root}
    if _leads_to_whole(alone):
        raise ToolsError(
            "in this model's form of calls a parameter cannot refer to all of them ('#'); put what "
            "it refers to in '$defs'",
            param=place,
        )
    return {
        "type": "json_schema",
        "json_schema": alone,
        "max_whitespace_cnt": 1,
    }


def _leads_to_whole(schema: Any) -> bool:
    """Whether there may be a reference to the root."""
    if isinstance(schema, dict):
        return schema.get("$ref") == "#" or any(map(_leads_to_whole, schema.values()))
    return isinstance(schema, list) and any(map(_leads_to_whole, schema))


def _xml_text(schema: Form, place: str, *, has_brackets: bool) -> Form:
    """Text of a pattern, or of a length, has no angle bracket, so that its end is where it ends."""
    pattern = schema.get("pattern")
    if pattern is None:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        # No line end at either side: one is taken off when the text is read.
        pattern = rf"[^<\n]{{{least},{most}}}"
    node = restricted(parse(pattern), _NO_BRACKET if has_brackets else _NO_ANGLE)
    text = "" if node is None else written(node)
    if not text:
        needed = "a '<', '[' or '{'" if has_brackets else "a '<'"
        raise ToolsError(f"the pattern cannot be held: it needs {needed}", param=place)
    return {"type": "regex", "pattern": text}
