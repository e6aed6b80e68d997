"""The forms in which models write calls, by name; which one a chat template asks for.

Names are vLLM's. `CALL_FORMATS` is the whole list.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from engine.server.openai.tools.call_parser import CallParser
from engine.server.openai.tools.definitions import Tool
from engine.server.openai.tools.json_calls import JsonCallParser, JsonSyntax
from engine.server.openai.tools.pieces import new_call_id, new_short_call_id
from engine.server.openai.tools.pythonic import PythonicCallParser
from engine.server.openai.tools.qwen_xml import QwenXmlCallParser
from engine.server.openai.tools.strict_forms import (
    StrictForm,
    bare,
    listed,
    tagged,
    xml_parameters,
)
from engine.server.openai.tools.template import TemplateFacts


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One form of calls.

    Attributes:
        name: as `--tool-call-parser` takes it.
        tags: texts that its parser looks for; some are special tokens of some models.
        make: makes a parser of the tools and of `CallParser`'s options.
        new_id: makes ids of calls, as the family's templates want them.
        strict: how a grammar holds calls amid free text to their schemas; None where none can.
    """

    name: str
    tags: tuple[str, ...]
    make: Callable[..., CallParser]
    new_id: Callable[[], str] = new_call_id
    strict: StrictForm | None = None

    def new_parser(
        self,
        tools: Sequence[Tool],
        *,
        max_calls: int | None = None,
        hidden: frozenset[str] = frozenset(),
    ) -> CallParser:
        """A fresh parser for one answer; arguments as `CallParser` has them."""
        return self.make(
            tools,
            names=[tool.name for tool in tools],
            max_calls=max_calls,
            new_id=self.new_id,
            hidden=hidden,
        )


def _json(name: str, syntax: JsonSyntax, **more: Any) -> CallFormat:
    def make(tools: Sequence[Tool], **options: Any) -> CallParser:
        return JsonCallParser(syntax, **options)

    return CallFormat(name, syntax.tags, make, **more)


def _pythonic(name: str, tags: tuple[str, str] | None = None) -> CallFormat:
    def make(tools: Sequence[Tool], **options: Any) -> CallParser:
        return PythonicCallParser(tags, **options)

    return CallFormat(name, tags or (), make)


_HERMES = JsonSyntax(prefixes=("<tool_call>",), end_tag="</tool_call>")
_HERMES_STRICT = tagged(
    "<tool_call>", '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"
)
_LLAMA = JsonSyntax(prefixes=("<|python_tag|>",), is_bare=True)
_LLAMA_STRICT = bare("parameters", "; ", excludes=("<|python_tag|>",))
_GRANITE_20B = JsonSyntax(prefixes=("<function_call>",))
_QWEN_XML_TAGS = ("<tool_call>", "</tool_call>", "<function=")

CALL_FORMATS: dict[str, CallFormat] = {
    one.name: one
    for one in (
        _json("hermes", _HERMES, strict=_HERMES_STRICT),
        _json("qwen3_json", _HERMES, strict=_HERMES_STRICT),
        _json("llama3_json", _LLAMA, strict=_LLAMA_STRICT),
        _json("llama4_json", _LLAMA, strict=_LLAMA_STRICT),
        _json(
            "mistral",
            JsonSyntax(prefixes=("[TOOL_CALLS]",), names_first=True),
            new_id=new_short_call_id,
        ),
        _json("granite", JsonSyntax(prefixes=("<|tool_call|>", "<tool_call>"), is_bare=True)),
        _json(
            "phi4_mini_json",
            JsonSyntax(prefixes=("functools", "<|tool_call|>"), end_tag="<|/tool_call|>"),
            strict=listed("functools", excludes=("<|tool_call|>",)),
        ),
        _json(
            "granite-20b-fc",
            _GRANITE_20B,
            strict=tagged("<function_call>", '<function_call>{"name": "NAME", "arguments": ', "}"),
        ),
        _json("json", JsonSyntax(is_bare=True), strict=bare("arguments", "; ")),
        _pythonic("pythonic"),
        _pythonic("llama4_pythonic", ("<|python_start|>", "<|python_end|>")),
        CallFormat("qwen3_coder", _QWEN_XML_TAGS, QwenXmlCallParser, strict=xml_parameters()),
        CallFormat("qwen3_xml", _QWEN_XML_TAGS, QwenXmlCallParser, strict=xml_parameters()),
    )
}
"""Every form of calls by name."""

CALL_FORMAT_NAMES = ("auto", "none", *CALL_FORMATS)
"""What `--tool-call-parser` takes."""

_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("functools[", "phi4_mini_json"),
    ("<|/tool_call|>", "phi4_mini_json"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<function_call>", "granite-20b-fc"),
    ("<|python_start|>[", "llama4_pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters":', "llama3_json"),
)
"""What a template writes, and the form that goes with it; the first that is found counts."""


def find_call_format(name: str, template: TemplateFacts) -> CallFormat | None:
    """The form of that name; for auto the one whose signs the template shows.

    A template without any sign gets `json` if it renders tools, else `hermes`, in whose form tools
    are then rendered for it.

    Raises:
        ConfigError: there is no such form.
    """
    if name == "none":
        return None
    if name == "auto":
        if template.tools_variable is None:
            return CALL_FORMATS["hermes"]
        signs = (form for sign, form in _SIGNS if sign in template.text)
        return CALL_FORMATS[next(signs, "json")]
    if name not in CALL_FORMATS:
        raise ConfigError(
            f"tool_call_parser must be one of {', '.join(CALL_FORMAT_NAMES)}, got {name!r}."
        )
    return CALL_FORMATS[name]
