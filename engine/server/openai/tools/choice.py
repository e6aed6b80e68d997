"""`tool_choice`: which functions may, or must, be called, and the form that this gives the output.

Knows OpenAI's forms of the choice and JSON schema as far as one can be put inside another.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.server.openai.tools.definitions import Tool, ToolsError
from engine.types.sampling_checks import short

_NAMED = '{"type": "function", "function": {"name": …}}'
_ALLOWED = '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
_DATA_KEYS = frozenset(("const", "enum", "default", "examples"))
"""Keywords of a schema whose values are data and no schemas."""


class Mode(enum.Enum):
    """What a model is to do with tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Choice:
    """The mode, and the tools that it leaves: for NAMED exactly one, for NONE none."""

    mode: Mode
    tools: tuple[Tool, ...]


def check_choice(tool_choice: object, tools: Sequence[Tool]) -> Choice:
    """A request's `tool_choice`; without one the model may call if there are tools.

    Raises:
        ToolsError: it is no choice, there are no tools, or none of that name.
    """
    if tool_choice is None:
        return Choice(Mode.AUTO if tools else Mode.NONE, tuple(tools))
    if tool_choice == "none":
        return Choice(Mode.NONE, ())
    if not tools:
        raise ToolsError(
            f"{short(tool_choice)} needs tools; give some, or leave tool_choice out",
            param="tool_choice",
        )
    if tool_choice in ("auto", "required"):
        return Choice(Mode(tool_choice), tuple(tools))
    if not isinstance(tool_choice, Mapping):
        raise ToolsError(
            f'must be "none", "auto", "required", {_NAMED} or {_ALLOWED}, got {short(tool_choice)}',
            param="tool_choice",
        )
    if tool_choice.get("type") == "allowed_tools":
        return _check_allowed(tool_choice.get("allowed_tools"), tools)
    return Choice(Mode.NAMED, (_find_tool(tool_choice, tools, "tool_choice"),))


def _check_allowed(allowed: object, tools: Sequence[Tool]) -> Choice:
    where = "tool_choice.allowed_tools"
    if not isinstance(allowed, Mapping) or allowed.get("mode") not in ("auto", "required"):
        raise ToolsError(f"must be as in {_ALLOWED}, got {short(allowed)}", param=where)
    given = allowed.get("tools")
    if not isinstance(given, list) or not given:
        raise ToolsError(
            f"must be a list of tools such as {_NAMED}, got {short(given)}", param=f"{where}.tools"
        )
    chosen = [_find_tool(one, tools, f"{where}.tools[{index}]") for index, one in enumerate(given)]
    return Choice(Mode(allowed["mode"]), tuple({tool.name: tool for tool in chosen}.values()))


def _find_tool(reference: object, tools: Sequence[Tool], where: str) -> Tool:
    """The tool that `{"type": "function", "function": {"name": …}}` names."""
    function = reference.get("function") if isinstance(reference, Mapping) else None
    if (
        not isinstance(reference, Mapping)
        or reference.get("type") != "function"
        or not isinstance(function, Mapping)
    ):
        raise ToolsError(f"must be as in {_NAMED}, got {short(reference)}", param=where)
    name = function.get("name")
    for tool in tools:
        if tool.name == name:
            return tool
    raise ToolsError(
        f"there is no tool {short(name)}; there is {', '.join(tool.name for tool in tools)}",
        param=f"{where}.function.name",
    )


def required_schema(tools: Sequence[Tool], max_calls: int | None = None) -> dict[str, Any]:
    """The schema of a list of at least one call, `{"name": …, "parameters": {…}}`, of any tool.

    Args:
        max_calls: the list is not longer.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for index, tool in enumerate(tools):
        parameters: dict[str, Any] = tool.schema
        if has_references(parameters):
            # Its references start at its own root, which is no longer that of the document.
            place = f"tool_{index}"
            definitions[place] = _moved(parameters, f"#/$defs/{place}")
            parameters = {"$ref": f"#/$defs/{place}"}
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [tool.name]},
                    "parameters": parameters,
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if max_calls is not None:
        schema["maxItems"] = max_calls
    if definitions:
        schema["$defs"] = definitions
    return schema


def has_references(schema: object) -> bool:
    """Whether a schema, or one within it, refers to another."""
    if isinstance(schema, dict):
        return isinstance(schema.get("$ref"), str) or any(
            has_references(value) for key, value in schema.items() if key not in _DATA_KEYS
        )
    return isinstance(schema, list) and any(has_references(item) for item in schema)


def _moved(schema: Any, place: str) -> Any:
    """A copy whose references to its own root (`#…`) point to where it will be."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key in _DATA_KEYS:
            moved[key] = value
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        else:
            moved[key] = _moved(value, place)
    return moved
