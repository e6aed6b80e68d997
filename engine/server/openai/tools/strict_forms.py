"""How calls amid free text are made to fit their schemas, form by form, as structural tags.

Knows structural tags and how each family writes its calls. What a parser beside this file would
take for a call is either one that fits, or is not let through at all. Forms that are not here
(Python's), and those that begin with a special token, cannot be enforced.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.server.openai.tools.choice import has_references
from engine.server.openai.tools.definitions import NO_PARAMETERS, Tool, ToolsError
from engine.server.openai.tools.parameter_values import Parameters, ParameterValues, WrittenForms

Form = dict[str, Any]
_ANY_OBJECT: Form = {"type": "object"}
_MAX_VALUES = 50_000
"""Alternatives of all parameters of all functions, and words, that may be written out."""
_ANY_TEXT: Form = {"type": "any_text", "excludes": ["</parameter>", "</function>"]}
_TEXT_OF_NO_JSON: tuple[Form, ...] = (
    {"type": "const_string", "value": ""},
    {
        "type": "sequence",
        "elements": [
            {"type": "text", "matches": [r"[ \t\r\n]*(?:[^\s{\[<]|<[^/<])"]},
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
        make: from tools (schemas as enforced), and whether one call is the most, to a format.
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
            {"type": "text", "matches": [r"[^\s{\[<]"]},
            {"type": "any_text", "excludes": list(excludes)},
        ]
        sequence = {"type": "sequence", "elements": text}
        return {"type": "or", "elements": [_separated(calls, separator, is_single), sequence]}

    return StrictForm("", make)


def xml_parameters() -> StrictForm:
    """Functions and parameters as tags, as Qwen3-Coder writes them."""

    def make(tools: Sequence[Tool], is_single: bool) -> Form:
        tags = []
        num_left = _MAX_VALUES
        for tool in tools:
            content, num_left = _xml_arguments(tool, num_left)
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
        "content": {"type": "json_schema", "json_schema": schema},
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


def _xml_arguments(tool: Tool, num_left: int) -> tuple[Form, int]:
    """The parameters between a function's tags, in their schema's order.

    Args:
        num_left: values that may still be written out; also what it returns behind the form.
    """
    if not tool.strict:
        excludes = ["</function>", "<tool_call>", "</tool_call>"]
        return {"type": "any_text", "excludes": excludes}, num_left
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
                "cannot be enforced in this model's form of calls; leave it out",
                param=f"{tool.place}.{keyword}",
            )
    elements: list[Form] = []
    parameters = Parameters(schema)
    for name in schema.get("properties", {}):
        place = f"{tool.place}.properties.{name}"
        values = parameters[name]
        num_left -= values.num_parts
        if num_left < 0:
            raise ToolsError(
                f"at most {_MAX_VALUES} values may be written out for all parameters", param=place
            )
        element: Form = {
            "type": "tag",
            "begin": f"<parameter={name}>\n",
            "content": _xml_value(name, values, schema, place),
            "end": "\n</parameter>\n",
        }
        if name not in schema.get("required", []):
            element = {"type": "optional", "content": element}
        elements.append(element)
    empty: Form = {"type": "const_string", "value": ""}
    return {"type": "sequence", "elements": elements or [empty]}, num_left


def _xml_value(name: str, values: ParameterValues, root: Form, place: str) -> Form:
    """A parameter's text: strings as they are, everything else as JSON."""
    if set(name) & set("<>\n"):
        raise ToolsError("a parameter's name cannot have '<', '>' or line ends", param=place)
    if not values.has_texts:
        return _xml_json(root["properties"][name], root)
    forms = values.forms()
    if forms is None:
        raise ToolsError(
            "in this model's form of calls, what may be a string cannot have to fit several "
            "schemas; merge them into one",
            param=place,
        )
    if forms.is_free:
        texts = [_ANY_TEXT] if not forms.has_brackets else [*_TEXT_OF_NO_JSON]
        return texts[0] if len(texts) == 1 else _one_of([*texts, *_xml_others(forms, root)])
    texts = [_xml_text(one, has_brackets=forms.has_brackets) for one in forms.texts]
    if any("<" in word or word != word.strip("\n") for word in forms.words):
        raise ToolsError("a value cannot have '<', nor line ends around it", param=place)
    texts += [{"type": "const_string", "value": word} for word in forms.words]
    return _one_of([*texts, *_xml_others(forms, root)])


def _one_of(elements: list[Form]) -> Form:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _xml_others(forms: WrittenForms, root: Form) -> list[Form]:
    if not forms.others:
        return []
    schema = forms.others[0] if len(forms.others) == 1 else {"anyOf": forms.others}
    return [_xml_json(schema, root)]


def _xml_json(schema: Form, root: Form) -> Form:
    alone = schema
    if has_references(schema):  # all lead to `$defs` by now
        alone = schema | {"$defs": root["$defs"]}
    return {"type": "json_schema", "json_schema": alone, "max_whitespace_cnt": 1}


def _xml_text(schema: Form, *, has_brackets: bool) -> Form:
    """Text of a pattern, or of a length, has no angle bracket, so that its end is where it ends."""
    text: Form = {"type": "text", "excludes": ["<", "[", "{"] if has_brackets else ["<"]}
    if "pattern" in schema:
        text["patterns"] = [_whole(schema["pattern"])]
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    # No line end at either side: one is taken off when the text is read.
    if least or most != "" or "pattern" not in schema:
        text["matches"] = [rf"[^\n]{{{least},{most}}}"]
    return text


def _whole(pattern: str) -> str:
    """A schema's pattern, which may be found anywhere, as one of whole texts; maybe of fewer."""
    start = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern) else "(?s:.*)"
    return f"{start}{pattern}{end}"
