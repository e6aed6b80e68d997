"""The messages of a conversation: what they must have, and the one form that templates are given.

Knows OpenAI's messages, and what templates read of them. Knows no template.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import PromptError

MAX_DEPTH = 64
"""How deep messages, tools and variables may be nested."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first, some the second."""


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A plain copy of the messages, checked.

    Raises:
        PromptError: says which message is wrong and how.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise _error("messages", f" must be a list of dictionaries, got {type(messages).__name__}")
    if not messages:
        raise _error("messages", " is empty; give at least one")
    return [_check_message(message, index) for index, message in enumerate(messages)]


def text_of(message: dict[str, Any]) -> str:
    """The text of a checked message's content; parts are put under each other."""
    content: str | list[dict[str, str]] = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def _check_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise _error(
            where, f' must be a dictionary with "role" and "content", got {type(message).__name__}'
        )
    given = {key: value for key, value in message.items() if value is not None}
    checked: dict[str, Any] = plain_data(given, where)
    role = checked.get("role")
    if not isinstance(role, str) or not role:
        raise _error(f"{where}.role", f' must be a string such as "user", got {role!r}')
    content = checked.get("content")
    if content is None:
        if role != "assistant":
            raise _error(where, ' has no "content"; only an assistant\'s message may have none')
        checked["content"] = ""  # it only called, or was cut off while it reasoned
    elif isinstance(content, list):
        checked["content"] = [
            _check_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)
        ]
    elif not isinstance(content, str):
        raise _error(
            f"{where}.content",
            f" must be a string or a list of text parts, got {type(content).__name__}",
        )
    if "tool_calls" in checked:
        _parse_arguments(checked["tool_calls"], where)
        if not checked["tool_calls"]:
            del checked["tool_calls"]  # templates ask whether it is there
    reasoning = next((checked[key] for key in REASONING_KEYS if key in checked), None)
    if reasoning is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    return checked


def _check_part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        shown = repr(kind) if isinstance(part, dict) else type(part).__name__
        raise _error(
            where,
            f' must be {{"type": "text", "text": ...}}, got a part of type {shown}; the engine '
            "reads text only",
        )
    if not isinstance(part.get(kind), str):
        raise _error(f"{where}.{kind}", f" must be a string, got {part.get(kind)!r}")
    return part if kind == "text" else {"type": "text", "text": part[kind]}


def _parse_arguments(tool_calls: Any, where: str) -> None:
    """Turn arguments that came as JSON text, as the OpenAI API has them, into data.

    What a model wrote may be no JSON, or no object. It counts as no arguments: if it were refused,
    the conversation that holds it could never go on.
    """
    if not isinstance(tool_calls, list):
        raise _error(f"{where}.tool_calls", f" must be a list, got {tool_calls!r}")
    for number, call in enumerate(tool_calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise _error(
                f"{where}.tool_calls[{number}]",
                f' must be a dictionary with "function", got {call!r}',
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        function["arguments"] = arguments if isinstance(arguments, dict) else {}


def developer_as_system(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation without the role developer.

    Where that makes several system messages, or one behind others, they become one at the
    beginning: many templates take no other.
    """
    if all(message["role"] != "developer" for message in chat):
        return chat
    told = [message for message in chat if message["role"] in ("system", "developer")]
    if len(told) == 1 and told[0] is chat[0]:
        return [{**chat[0], "role": "system"}, *chat[1:]]
    text = "\n\n".join(text for text in map(text_of, told) if text)
    others = [message for message in chat if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": text}, *others]


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as templates are given them.

    Raises:
        PromptError: they are no list of dictionaries of JSON's types.
    """
    if tools is None:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise _error(
            "tools", f" must be a list of JSON schemas (dictionaries), got {type(tools).__name__}"
        )
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise _error(
                f"tools[{index}]",
                f" must be a JSON schema (a dictionary), got {type(tool).__name__}",
            )
    plain: list[dict[str, Any]] = plain_data(list(tools), "tools")
    return plain


def plain_data(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of JSON's types only: objects have methods that no template should reach.

    Args:
        where: its place, for the error.

    Raises:
        PromptError: it holds something else, or is nested too deep.
    """
    if depth > MAX_DEPTH:
        raise _error(where, f" is nested deeper than {MAX_DEPTH} levels")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {
            plain_data(key, where, MAX_DEPTH): plain_data(item, where, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_data(item, where, depth + 1) for item in value]
    for base in (str, int, float):
        if isinstance(value, base):  # a subclass, such as an enumeration's member
            return base.__str__(value) if base is str else base(value)
    raise _error(where, f" holds a {type(value).__name__}; only JSON's types are allowed")


def _error(place: str, said: str) -> PromptError:
    """The error that begins with the place that it is about."""
    return PromptError(f"{place}{said}", param=place)
