"""The tools that a request offers, checked.

Knows OpenAI's form of a function's definition and what is too much of it. Does not know what a
grammar library makes of a schema: that is found where it is compiled.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import RequestError
from engine.structured.forms.prepass import prepared
from engine.structured.forms.references import Allowance
from engine.structured.forms.schema_shapes import SchemaError
from engine.types.sampling_checks import short

MAX_TOOLS = 128
"""Most tools of one request."""
MAX_TOOLS_BYTES = 192 * 1024
"""Longest definition of all tools together, as JSON in UTF-8."""
MAX_SCHEMA_DEPTH = 48
"""How deep a function's parameters may be nested."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolsError(RequestError):
    """Tools, or the choice among them, are wrong; a client is to get 400.

    Attributes:
        param: the field of the request, such as `tools[0].function.name`.
    """

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(f"{param}: {message}", param=param)


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that a model may call."""

    name: str
    schema: dict[str, Any]
    """JSON schema of its arguments, an object; `NO_PARAMETERS` where none was given."""
    strict: bool
    """Whether arguments must fit the schema even where the model is free to call or not."""
    definition: dict[str, Any]
    """As it was given, for the chat template."""
    place: str = "tools"
    """Where the request has its schema, such as `tools[0].function.parameters`."""

    def enforceable(self, allowance: Allowance) -> "Tool":
        """The tool with the schema that a grammar can enforce.

        Args:
            allowance: what all tools' schemas may have together.

        Raises:
            ToolsError: a part of the schema cannot be enforced; names its place.
        """
        try:
            schema = prepared(self.schema, allowance)
        except SchemaError as error:
            raise ToolsError(
                f"{error.message}; or let calls be free (tool_choice auto, without strict)",
                param=f"{self.place}{error.path}",
            ) from error
        return replace(self, schema=schema)


def check_tools(tools: object) -> list[Tool]:
    """The tools of a request; none for None.

    Raises:
        ToolsError: names the field that is wrong.
    """
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ToolsError(f"must be a list of functions, got {short(tools)}", param="tools")
    if not tools:
        raise ToolsError("must not be empty; leave it out to offer no tools", param="tools")
    if len(tools) > MAX_TOOLS:
        raise ToolsError(f"at most {MAX_TOOLS} tools, got {len(tools)}", param="tools")
    checked = [_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    seen: set[str] = set()
    for index, tool in enumerate(checked):
        if tool.name in seen:
            raise ToolsError(
                f"{tool.name!r} is the name of an earlier tool; names must differ",
                param=f"tools[{index}].function.name",
            )
        seen.add(tool.name)
    num_bytes = len(json.dumps([tool.definition for tool in checked], ensure_ascii=False).encode())
    if num_bytes > MAX_TOOLS_BYTES:
        raise ToolsError(
            f"at most {MAX_TOOLS_BYTES} bytes of JSON in all, got {num_bytes}", param="tools"
        )
    return checked


def _check_tool(tool: object, where: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise ToolsError(f'must be {{"type": "function", …}}, got {short(tool)}', param=where)
    if tool.get("type", "function") != "function":
        raise ToolsError(
            f'only "function" is supported, got {short(tool.get("type"))}', param=f"{where}.type"
        )
    function = tool.get("function")
    where = f"{where}.function"
    if not isinstance(function, Mapping):
        raise ToolsError(
            f'must be an object with "name" and "parameters", got {short(function)}', param=where
        )
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ToolsError(
            f"must be 1 to 128 letters, digits, underscores, dots or hyphens, got {short(name)}",
            param=f"{where}.name",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise ToolsError(
            f"must be a string, got {short(description)}", param=f"{where}.description"
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ToolsError(f"must be true or false, got {short(strict)}", param=f"{where}.strict")
    place = f"{where}.parameters"
    schema = _check_schema(function.get("parameters"), place)
    given = {key: value for key, value in function.items() if value is not None}
    definition = {"type": "function", "function": given}
    return Tool(name, schema, bool(strict), definition, place)


def _check_schema(schema: object, where: str) -> dict[str, Any]:
    if schema is None:
        return NO_PARAMETERS
    if not isinstance(schema, dict):
        raise ToolsError(
            f'must be a JSON schema such as {{"type": "object", "properties": {{…}}}}, '
            f"got {short(schema)}",
            param=where,
        )
    if schema.get("type", "object") != "object":
        raise ToolsError(
            f'arguments are an object: "type" must be "object", got {short(schema["type"])}',
            param=f"{where}.type",
        )
    _check_depth(schema, where)
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(
        isinstance(value, dict | bool) for value in properties.values()
    ):
        raise ToolsError("must map names to schemas", param=f"{where}.properties")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ToolsError("must be a list of property names", param=f"{where}.required")
    return {"type": "object", **schema} if schema else NO_PARAMETERS


def _check_depth(schema: dict[str, Any], where: str) -> None:
    """Refuse what is nested deep; walks without recursion."""
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise ToolsError(f"must not be nested deeper than {MAX_SCHEMA_DEPTH} levels", param=where)
