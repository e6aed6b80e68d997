"""Tools for templates that know none: into the system message, in Hermes' form.

Knows how models of the Hermes and Qwen kind are told of tools, and how calls and results look in
a conversation of theirs. The wording is this engine's own.
"""

import json
from collections.abc import Sequence
from typing import Any

from engine.server.openai.tools.definitions import Tool
from engine.text.chat_messages import text_of

Message = dict[str, Any]

_INTRODUCTION = """\
# Tools

You can call functions. Their signatures are JSON schemas between <tools> tags:
<tools>
{tools}
</tools>

To call a function, answer with its name and arguments as JSON between <tool_call> tags, once for \
each call:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>"""


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The conversation with the tools at the end of its system message, or in one of their own.

    Args:
        messages: checked, as `engine.text.chat_messages.check_messages` returns them.
    """
    definitions = [json.dumps(tool.definition, ensure_ascii=False) for tool in tools]
    text = _INTRODUCTION.format(tools="\n".join(definitions))
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text_of(first)}\n\n{text}"}, *messages[1:]]


def plain_messages(messages: Sequence[Message]) -> list[Message]:
    """The conversation with calls and their results as text.

    An assistant's calls follow its content between `<tool_call>` tags; results, one after the
    other, become one user's message between `<tool_response>` tags.

    Args:
        messages: checked, as `engine.text.chat_messages.check_messages` returns them.
    """
    plain: list[Message] = []
    is_result = False
    for message in messages:
        was_result, is_result = is_result, message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{text_of(message)}\n</tool_response>"
            if was_result:
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            parts = [text_of(message), *map(_call_text, message["tool_calls"])]
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            plain.append(kept | {"content": "\n".join(part for part in parts if part)})
        else:
            plain.append(message)
    return plain


def _call_text(call: dict[str, Any]) -> str:
    function = call.get("function", call)
    body = {"name": function.get("name"), "arguments": function.get("arguments") or {}}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"
