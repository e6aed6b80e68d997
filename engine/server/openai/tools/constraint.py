"""The form that an output is held to: by the choice of tools, and behind reasoning.

Knows xgrammar's structural tags as far as reasoning needs them: free text up to the closing tag,
and the constraint from there on.
"""

import json
from typing import Any, Final

from engine.errors import SamplingParamsError
from engine.server.openai.reasoning.tags import ReasoningSyntax
from engine.server.openai.tools.choice import Choice, Mode, required_schema
from engine.server.openai.tools.definitions import ToolsError
from engine.server.openai.tools.strict_forms import StrictForm
from engine.types.expression_parser import parse
from engine.types.grammar_messages import MAX_WHITESPACE
from engine.types.regular_expression import written
from engine.types.schema_values import Budget
from engine.types.structured_outputs import StructuredOutputsParams

_SPACE: Final = written(parse(r"[ \n]{0,4}"))


def constraint_of(choice: Choice, *, max_calls: int | None) -> StructuredOutputsParams | None:
    """What `tool_choice` holds the output to; None leaves it free.

    A named function: its arguments. Required: a list of calls, see `required_schema`.

    Raises:
        ToolsError: a schema cannot be held, or they are too long together.
    """
    if choice.mode not in (Mode.NAMED, Mode.REQUIRED):
        return None
    budget = Budget()
    tools = [tool.enforceable(budget) for tool in choice.tools]
    is_named = choice.mode is Mode.NAMED
    schema = tools[0].schema if is_named else required_schema(tools, max_calls)
    # Calls are for programs: white space would only be tokens to wait for.
    return _made("json", schema, disable_any_whitespace=True)


def strict_calls(
    choice: Choice, form: StrictForm, *, max_calls: int | None
) -> StructuredOutputsParams | None:
    """What holds calls amid free text to the schemas of strict tools.

    A model that opens a call can then only name one of the tools; arguments of those that are not
    strict are any JSON object.

    Raises:
        ToolsError: a schema cannot be held, or they are too long together.
    """
    budget = Budget()
    tools = [tool.enforceable(budget) if tool.strict else tool for tool in choice.tools]
    inner = form.make(tools, max_calls == 1)
    return _made("structural_tag", {"type": "structural_tag", "format": inner})


def behind_reasoning(
    constraint: StructuredOutputsParams, syntax: ReasoningSyntax, *, is_open: bool
) -> StructuredOutputsParams:
    """The constraint for an output that may reason before it begins.

    Args:
        is_open: the prompt ends within the reasoning, which the output then has to close.
    """
    if constraint.kind == "structural_tag":
        inner = json.loads(str(constraint.structural_tag)).get("format")
        if not isinstance(inner, dict):
            return constraint  # the older form, of which nothing can be made a part
    else:
        inner = _format_of(constraint)
    starts = ("",) if is_open else syntax.starts
    thoughts = [
        {"type": "tag", "begin": start, "content": {"type": "any_text"}, "end": end}
        for start in starts
        for end in syntax.ends
    ]
    thought = thoughts[0] if len(thoughts) == 1 else {"type": "or", "elements": thoughts}
    space = {"type": "regex", "pattern": _SPACE}
    reasoned: dict[str, Any] = {"type": "sequence", "elements": [thought, space, inner]}
    whole = reasoned if is_open else {"type": "or", "elements": [reasoned, inner]}
    return StructuredOutputsParams.of_enforceable(
        "structural_tag", {"type": "structural_tag", "format": whole}
    )


def _format_of(constraint: StructuredOutputsParams) -> dict[str, Any]:
    """A constraint as a part of a structural tag."""
    kind = constraint.kind
    if kind == "regex":
        return {"type": "regex", "pattern": constraint.regex}
    if kind == "grammar":
        return {"type": "grammar", "grammar": constraint.grammar}
    if kind == "choice":
        choices = [{"type": "const_string", "value": one} for one in constraint.choice or ()]
        return choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}
    schema = {"type": "object"} if kind == "json_object" else json.loads(str(constraint.json))
    is_compact = constraint.disable_any_whitespace
    return _json_format(schema, max_whitespace=1 if is_compact else MAX_WHITESPACE)


def _json_format(schema: dict[str, Any], max_whitespace: int = MAX_WHITESPACE) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": schema,
        "max_whitespace_cnt": max_whitespace,
    }


def _made(kind: str, form: dict[str, Any], **options: bool) -> StructuredOutputsParams:
    """The constraint; that it is too long is the tools' fault."""
    try:
        return StructuredOutputsParams.of_enforceable(kind, form, **options)
    except SamplingParamsError as error:
        raise ToolsError(f"the output cannot be held to it: {error}", param="tools") from error
