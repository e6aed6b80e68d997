"""What a chat template does with tools and reasoning, told by its text.

Knows the words that templates of the model families use. Does not render them, and does not parse
Jinja: a template is searched for what it writes and for the variables that its tags name.
"""

import re
from dataclasses import dataclass

_LITERAL = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_JINJA_TAG = re.compile(r"\{[{%](?:(?![%}]\}).)*[%}]\}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """One chat template.

    Attributes:
        text: its Jinja source.
        tools_variable: the variable that it takes tools from; None if it knows no tools.
        knows_calls: whether it also writes an assistant's calls and takes their results.
    """

    text: str
    tools_variable: str | None
    knows_calls: bool


def read_template(chat_template: str) -> TemplateFacts:
    """Find out what a template does; an empty one does nothing."""
    code = "\n".join(_JINJA_TAG.findall(chat_template))
    variables = _LITERAL.sub("", code)
    tools = next((name for name in ("tools", "xml_tools") if _names(variables, name)), None)
    return TemplateFacts(
        text=chat_template,
        tools_variable=tools,
        knows_calls=tools is not None and _names(code, "tool_calls"),
    )


def _names(code: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", code) is not None
