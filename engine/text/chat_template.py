"""Conversations to prompts: renders the model's Jinja template in a sandbox.

Knows what templates on the hub expect of their environment. Does not know tokenizers: a caller
passes `bos_token` and the like as variables. A template comes with a model and is foreign code: it
sees plain data only, and whatever goes wrong in it becomes a `PromptError`.

Conventions: https://huggingface.co/docs/transformers/chat_templating
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from engine.errors import PromptError
from engine.text.chat_messages import (
    check_messages,
    check_tools,
    developer_as_system,
    plain_data,
    text_of,
)


class _Compiled(NamedTuple):
    template: jinja2.Template
    reads_parts: bool
    """Whether the template goes through lists of content parts itself."""
    knows_developer: bool
    """Whether the template does anything about the role developer."""


def render_chat(
    chat_template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation.

    Args:
        chat_template: Jinja source.
        messages: each with "role", a string, and "content", a string or a list of parts
            `{"type": "text", "text": ...}` or `{"type": "refusal", "refusal": ...}`; an
            assistant's message may have no content. Other keys are passed on; those that are None
            count as missing. The role developer is system where the template does not know it.
        add_generation_prompt: end with the beginning of an assistant message.
        continue_final_message: end within the last message instead.
        tools: JSON schemas.
        variables: further variables, such as `bos_token` or `enable_thinking`.

    Raises:
        PromptError: a message is malformed, the arguments contradict each other, or the template
            cannot be read or refuses the conversation.
    """
    compiled = _compile(chat_template)
    chat = check_messages(messages)
    if not compiled.knows_developer:
        chat = developer_as_system(chat)
    if not compiled.reads_parts:
        for message in chat:
            message["content"] = text_of(message)
    marker = ""
    final_text = ""
    if continue_final_message:
        if add_generation_prompt:
            raise PromptError(
                "continue_final_message and add_generation_prompt exclude each other: turn "
                "add_generation_prompt off to go on with the last message"
            )
        # Its last character is white space, so that a template that trims messages is found out.
        marker = f"<{secrets.token_hex(16)}> "
        final_text = _mark_final_text(chat[-1], marker)
    values = {
        **plain_data(dict(variables or {}), "chat_template_kwargs"),
        "messages": chat,
        "tools": check_tools(tools),
        "add_generation_prompt": add_generation_prompt,
    }
    values.setdefault("documents", None)
    try:
        text = compiled.template.render(values)
    except Exception as error:  # foreign code: besides Jinja's errors any of Python's
        raise PromptError(
            f"the chat template refused the messages: {error or type(error).__name__}"
        ) from error
    return _cut_at(text, marker, final_text) if marker else text


def _mark_final_text(message: dict[str, Any], marker: str) -> str:
    """Put the marker behind the last message's text; returns that text."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + marker
        return content
    if not content:
        raise PromptError("continue_final_message is set but the last message has no content")
    text: str = content[-1]["text"]
    content[-1]["text"] = text + marker
    return text


def _cut_at(text: str, marker: str, final_text: str) -> str:
    position = text.rfind(marker.rstrip())
    if position < 0 or final_text.strip() not in text:
        raise PromptError(
            "continue_final_message is set but the chat template drops or changes the last message"
        )
    kept = text[:position]
    # A template that trimmed the marker would have trimmed the text's own white space, too.
    return kept if text.startswith(marker, position) else kept.rstrip()


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's text for training; here it only shows its body."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]  # Jinja has it unmarked

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without attributes that Python itself gives a meaning."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args  # so that namespace(self=...) works
        values = dict(*given, **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have an attribute {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a model should not see.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


@lru_cache(maxsize=1)
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda layout: datetime.now().strftime(layout),
        "dict": _make_dict,
        "namespace": _Namespace,
    }
    environment.globals.update(functions)
    return environment


def check_template(chat_template: str) -> None:
    """Compile a template, and keep it for the conversations that come.

    Raises:
        PromptError: it is not valid.
    """
    _compile(chat_template)


@lru_cache(maxsize=32)
def _compile(chat_template: str) -> _Compiled:
    environment = _environment()
    try:
        tree = environment.parse(chat_template)
        template = environment.from_string(chat_template)
    except jinja2.TemplateSyntaxError as error:
        raise PromptError(
            f"the chat template is not valid Jinja: {error} (line {error.lineno})",
            param="chat_template",
        ) from error
    except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
        # What Jinja makes of it is Python, with limits of its own: of nesting, of digits.
        raise PromptError(
            f"the chat template cannot be compiled: {error}", param="chat_template"
        ) from error
    return _Compiled(
        template,
        reads_parts=any(_names_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For)),
        knows_developer=any(
            node.value == "developer" for node in tree.find_all(jinja2.nodes.Const)
        ),
    )


def _names_content(expression: jinja2.nodes.Node) -> bool:
    """Whether an expression is, or is made from, a message's content."""
    nodes = [expression, *expression.find_all(jinja2.nodes.Node)]
    return any(
        (isinstance(node, jinja2.nodes.Name) and node.name == "content")
        or (isinstance(node, jinja2.nodes.Getattr) and node.attr == "content")
        or (
            isinstance(node, jinja2.nodes.Getitem)
            and isinstance(node.arg, jinja2.nodes.Const)
            and node.arg.value == "content"
        )
        for node in nodes
    )
