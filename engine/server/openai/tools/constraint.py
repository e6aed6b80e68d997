"""The form that an output must have: by the choice of tools, and behind reasoning.

Knows structural tags as far as reasoning needs them: free text up to the closing tag, and the
constraint from there on.
"""

import json
from typing import Any, Final

from engine.errors import SamplingParamsError
from engine.server.openai.reasoning.tags import ReasoningSyntax
from engine.server.openai.tools.choice import Choice, Mode, required_schema
from engine.server.openai.tools.definitions import ToolsError
from engine.server.openai.tools.strict_forms import StrictForm
from engine.structured.forms.params import StructuredOutputsParams
from engine.structured.forms.references import Allowance
from engine.structured.forms.schema_shapes import SchemaError
from engine.structured.forms.structural_tags import lark_of_tag

_SPACE: Final = {"type": "text", "matches": [r"[ \n]{0,4}"]}


def constraint_of(choice: Choice, *, max_calls: int | None) -> StructuredOutputsParams | None:
    """What `tool_choice` makes of the output; None leaves it free.

    A named function: its arguments. Required: a list of calls, see `required_schema`.

    Raises:
        ToolsError: a schema cannot be enforced, or they are too long together.
    """
    if choice.mode not in (Mode.NAMED, Mode.REQUIRED):
        return None
    allowance = Allowance()
    tools = [tool.enforceable(allowance) for tool in choice.tools]
    is_named = choice.mode is Mode.NAMED
    schema = tools[0].schema if is_named else required_schema(tools, max_calls)
    # Calls are for programs: white space would only be tokens to wait for.
    return _made("json", schema, disable_any_whitespace=True)


def strict_calls(
    choice: Choice, form: StrictForm, *, max_calls: int | None
) -> StructuredOutputsParams | None:
    """What makes calls amid free text fit the schemas of strict tools.

    A model that opens a call can then only name one of the tools; arguments of those that are not
    strict are any JSON object.

    Raises:
        ToolsError: a schema cannot be enforced, or they are too long together.
    """
    allowance = Allowance()
    tools = [tool.enforceable(allowance) if tool.strict else tool for tool in choice.tools]
    tag = {"type": "structural_tag", "format": form.make(tools, max_calls == 1)}
    try:
        lark_of_tag(tag)
    except SchemaError as error:
        raise ToolsError(f"calls cannot be enforced: {error.message}", param="tools") from error
    return _made("structural_tag", tag)


def behind_reasoning(
    constraint: StructuredOutputsParams, syntax: ReasoningSyntax, *, is_open: bool
) -> StructuredOutputsParams:
    """The constraint for an output that may reason before it begins.

    Args:
        is_open: the prompt ends within the reasoning, which the output then has to close.
    """
    inner = _format_of(constraint)
    starts = ("",) if is_open else syntax.starts
    thoughts = [
        {"type": "tag", "begin": start, "content": {"type": "any_text"}, "end": end}
        for start in starts
        for end in syntax.ends
    ]
    thought = thoughts[0] if len(thoughts) == 1 else {"type": "or", "elements": thoughts}
    reasoned: dict[str, Any] = {"type": "sequence", "elements": [thought, _SPACE, inner]}
    whole = reasoned
    if not is_open:
        if inner["type"] == "triggered_tags":
            # Free text that opens the reasoning is reasoning, and not text that a call ends.
            inner = inner | {"excludes": [*inner.get("excludes", []), *starts]}
        whole = {"type": "or", "elements": [reasoned, inner]}
    return StructuredOutputsParams.of_prepared(
        "structural_tag", {"type": "structural_tag", "format": whole}
    )


def _format_of(constraint: StructuredOutputsParams) -> dict[str, Any]:
    """A constraint as a part of a structural tag."""
    kind = constraint.kind
    if kind == "structural_tag":
        return dict(json.loads(str(constraint.structural_tag))["format"])
    if kind == "regex":
        return {"type": "regex", "pattern": constraint.regex}
    if kind == "grammar":
        return {"type": "grammar", "grammar": constraint.grammar}
    if kind == "choice":
        choices = [{"type": "const_string", "value": one} for one in constraint.choice or ()]
        return {"type": "or", "elements": choices}
    schema = {"type": "object"} if kind == "json_object" else json.loads(str(constraint.json))
    is_compact = constraint.disable_any_whitespace
    return {"type": "json_schema", "json_schema": schema, "is_compact": is_compact}


def _made(kind: str, form: dict[str, Any], **options: bool) -> StructuredOutputsParams:
    """The constraint; that it is too long is the tools' fault."""
    try:
        return StructuredOutputsParams.of_prepared(kind, form, **options)
    except SamplingParamsError as error:
        raise ToolsError(f"the output cannot be constrained: {error}", param="tools") from error
