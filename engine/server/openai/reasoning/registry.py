"""The forms in which models write reasoning, by name; which one a chat template asks for.

Names are vLLM's. `REASONING_FORMATS` is the whole list.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.errors import ConfigError
from engine.server.openai.reasoning.tags import ReasoningParser, ReasoningSyntax


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One form of reasoning.

    Attributes:
        name: as `--reasoning-parser` takes it.
        syntax: its tags.
    """

    name: str
    syntax: ReasoningSyntax

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that its parser looks for; some are special tokens of some models."""
        return (*self.syntax.starts, *self.syntax.ends)

    def new_parser(self, is_open: bool) -> ReasoningParser:
        """A fresh parser for one answer, which begins within the reasoning or not."""
        return ReasoningParser(self.syntax, is_open=is_open)


class Template(Protocol):
    """What is known of a chat template."""

    @property
    def text(self) -> str:
        """Its Jinja source."""
        ...


_THINK = ("<think>",), ("</think>",)

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    name: ReasoningFormat(name, syntax)
    for name, syntax in {
        "deepseek_r1": ReasoningSyntax(*_THINK, begins_open=True),
        "qwen3": ReasoningSyntax(*_THINK),
        "mistral": ReasoningSyntax(("[THINK]",), ("[/THINK]",)),
        "granite": ReasoningSyntax(
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
        ),
    }.items()
}
"""Every form of reasoning by name."""

REASONING_FORMAT_NAMES = ("auto", "none", *REASONING_FORMATS)
"""What `--reasoning-parser` takes."""


def find_reasoning_format(name: str, template: Template) -> ReasoningFormat | None:
    """The form of that name; for auto the one whose tags the template shows, if any.

    `<think>` is read as `qwen3` has it: an answer begins within the reasoning where the prompt
    ends with the tag, and otherwise where the model writes it.

    Raises:
        ConfigError: there is no such form.
    """
    if name == "none":
        return None
    if name == "auto":
        if "[THINK]" in template.text:
            return REASONING_FORMATS["mistral"]
        if "<think>" in template.text or "</think>" in template.text:
            return REASONING_FORMATS["qwen3"]
        if "Here is my thought process:" in template.text:
            return REASONING_FORMATS["granite"]
        return None
    if name not in REASONING_FORMATS:
        raise ConfigError(
            f"reasoning_parser must be one of {', '.join(REASONING_FORMAT_NAMES)}, got {name!r}."
        )
    return REASONING_FORMATS[name]
