"""From a chat request to what is rendered, what is generated and how it is read: `plan_chat`.

Knows what tools, `tool_choice`, `response_format` and reasoning mean together. Does not render,
generate or stream: routes do, in this order:

    formats = ChatFormats.resolve(chat_template, special_tokens, …)   # once
    plan = plan_chat(formats, messages, tools=…, tool_choice=…, …)
    prompt = await engine.render_chat(plan.messages, tools=plan.tools,
                                      chat_template_kwargs=plan.chat_template_kwargs, …)
    output = plan.after_render(prompt["prompt"])
    params = …(structured_outputs=output.structured_outputs,
               skip_special_tokens=wanted and not output.needs_special_tokens)
    parser = output.new_parser()                      # one for each choice
    pieces = parser.feed(delta_text) …, parser.finish()
    reason = output.finish_reason(engine_reason, parser)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from engine.log import get_logger
from engine.server.openai.reasoning.registry import ReasoningFormat, find_reasoning_format
from engine.server.openai.tools.call_parser import CallParser
from engine.server.openai.tools.chat_output import ChatOutputParser
from engine.server.openai.tools.choice import Choice, Mode, check_choice
from engine.server.openai.tools.constraint import behind_reasoning, constraint_of, strict_calls
from engine.server.openai.tools.definitions import ToolsError, check_tools
from engine.server.openai.tools.formats import CallFormat, find_call_format
from engine.server.openai.tools.hermes_prompt import plain_messages, with_tools
from engine.server.openai.tools.pieces import new_call_id
from engine.server.openai.tools.template import TemplateFacts, read_template
from engine.server.openai.tools.whole_output import NamedCallParser, RequiredCallParser
from engine.structured.forms.params import StructuredOutputsParams
from engine.text.chat_messages import check_messages

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """How the served model writes calls and reasoning; the same for all requests.

    Attributes:
        calls: the form of calls; None: they are never read from text (`tool_call_parser="none"`).
        reasoning: the form of reasoning; None: there is none, or it is not to be read.
        template: what the chat template does by itself.
        special_tokens: texts of the tokens that `skip_special_tokens` leaves out.
    """

    calls: CallFormat | None
    reasoning: ReasoningFormat | None
    template: TemplateFacts
    special_tokens: frozenset[str]

    @classmethod
    def resolve(
        cls,
        chat_template: str,
        special_tokens: Iterable[str] = (),
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> "ChatFormats":
        """Find the formats by name, or by the template's text where the name is auto.

        Args:
            chat_template: the Jinja source in use; empty if there is none.
            special_tokens: texts of the tokens that `skip_special_tokens` leaves out.

        Raises:
            ConfigError: there is no format of that name; the message lists them.
        """
        facts = read_template(chat_template)
        return cls(
            find_call_format(tool_call_parser, facts),
            find_reasoning_format(reasoning_parser, facts),
            facts,
            frozenset(special_tokens),
        )


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What one request's chat is rendered from, and how the model is to answer.

    Attributes:
        messages: to be rendered; not those of the request where the template knows no tools.
        tools: for the template's variable `tools`; None where there is nothing to be rendered.
        chat_template_kwargs: the request's, with what tools and reasoning add to them.
        choice: the mode and the tools that may be called.
        constraint: the form that the answer is held to, reasoning apart; None leaves it free.
        reads_calls: whether answers can have calls: not where they are held to another form.
        max_calls: further calls are dropped; None is no limit.
        include_reasoning: whether reasoning is reported.
    """

    formats: ChatFormats
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any]
    choice: Choice
    constraint: StructuredOutputsParams | None
    reads_calls: bool
    max_calls: int | None
    include_reasoning: bool

    @property
    def field_names(self) -> dict[str, str]:
        """The request's fields by the engine's names, where tools gave the answer its form."""
        if self.constraint is None or not self.reads_calls:
            return {}
        is_named = self.choice.mode is Mode.NAMED
        place = self.choice.tools[0].place if is_named else "tools"
        kinds = ("", ".json", ".structural_tag")
        return {f"structured_outputs{kind}": place for kind in kinds}

    def new_call_parser(self) -> CallParser:
        """A fresh parser of the calls of one answer."""
        formats, tools = self.formats, self.choice.tools
        new_id = new_call_id if formats.calls is None else formats.calls.new_id
        if self.choice.mode is Mode.NAMED:
            return NamedCallParser(tools[0].name, new_id=new_id)
        if self.choice.mode is Mode.REQUIRED:
            names = [tool.name for tool in tools]
            return RequiredCallParser(names=names, max_calls=self.max_calls, new_id=new_id)
        assert formats.calls is not None
        return formats.calls.new_parser(
            tools, max_calls=self.max_calls, hidden=formats.special_tokens
        )

    def after_render(self, prompt: str) -> "OutputPlan":
        """How the output is constrained and read, now that the prompt is known.

        Where the answer is held to a form, reasoning is let through before it, unless the
        reasoning's tags are special tokens of the model, which no grammar can ask for: the form
        then holds from the first token on, and there is no reasoning.
        """
        formats, reasoning = self.formats, self.formats.reasoning
        constraint, is_open = self.constraint, False
        if reasoning is not None:
            is_open = reasoning.syntax.opens_in(prompt)
            if constraint is not None and formats.special_tokens.isdisjoint(reasoning.tags):
                if is_open or not reasoning.syntax.is_closed_in(prompt):
                    constraint = behind_reasoning(constraint, reasoning.syntax, is_open=is_open)
            elif constraint is not None:
                reasoning = None
        tags = () if reasoning is None else reasoning.tags
        if self.reads_calls and self.choice.mode is Mode.AUTO and formats.calls is not None:
            tags += formats.calls.tags
        return OutputPlan(
            structured_outputs=constraint,
            needs_special_tokens=not formats.special_tokens.isdisjoint(tags),
            plan=self,
            reasoning=reasoning,
            starts_in_reasoning=is_open,
        )


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How one request's output is constrained and read.

    Attributes:
        structured_outputs: for `SamplingParams`; None leaves the text free.
        needs_special_tokens: tags that the parser looks for are special tokens of this model:
            generate with `skip_special_tokens=False`.
        plan: where it comes from.
        reasoning: how reasoning is read; None: answers have none.
        starts_in_reasoning: answers begin within the reasoning.
    """

    structured_outputs: StructuredOutputsParams | None
    needs_special_tokens: bool
    plan: ChatPlan
    reasoning: ReasoningFormat | None
    starts_in_reasoning: bool

    def new_parser(self) -> ChatOutputParser:
        """A fresh parser, for one choice's text."""
        reasoning = self.reasoning
        return ChatOutputParser(
            self.plan.new_call_parser() if self.plan.reads_calls else None,
            None if reasoning is None else reasoning.new_parser(self.starts_in_reasoning),
            include_reasoning=self.plan.include_reasoning,
        )

    def finish_reason(self, reason: str | None, parser: ChatOutputParser) -> str | None:
        """What OpenAI's API calls the end: `tool_calls` where the model stopped having called.

        `stop` for a named function, which not the model decided on, and where a stop string broke
        the last call off amid its arguments: it is reported as far as it came, but is none to run.
        Whatever else ended the answer (length, error, abort) is passed on, also amid a call.
        """
        has_decided = parser.has_calls and self.plan.choice.mode is not Mode.NAMED
        is_called = has_decided and not parser.is_within_call
        return "tool_calls" if is_called and reason == "stop" else reason


def plan_chat(
    formats: ChatFormats,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: object = None,
    tool_choice: object = None,
    parallel_tool_calls: bool | None = None,
    structured_outputs: StructuredOutputsParams | None = None,
    include_reasoning: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    enable_auto_tool_choice: bool = True,
    is_answered: bool = True,
) -> ChatPlan:
    """Decide what a chat request means, before it is rendered.

    Args:
        messages, tools, tool_choice, parallel_tool_calls: as in the request.
        structured_outputs: made of `response_format` or the like; None leaves the answer free.
        include_reasoning: False drops the reasoning from the answer.
        chat_template_kwargs: as in the request.
        enable_auto_tool_choice: the server's setting.
        is_answered: False where the prompt is all that is wanted, so that nothing needs to be read.

    Raises:
        PromptError: a message is malformed.
        ToolsError: tools or the choice are wrong; its `param` names the field.
    """
    checked = check_tools(tools)
    choice = check_choice(tool_choice, checked)
    if is_answered:
        _check_together(choice, structured_outputs, formats, enable_auto_tool_choice)
    max_calls = 1 if parallel_tool_calls is False else None
    facts = formats.template
    chat = check_messages(messages)
    kwargs = dict(chat_template_kwargs or {})
    rendered: list[dict[str, Any]] | None = None
    if not facts.knows_calls:
        chat = plain_messages(chat)
    if choice.tools and facts.tools_variable is None:
        chat = with_tools(chat, choice.tools)
    elif choice.tools:
        rendered = [tool.definition for tool in choice.tools]
        if facts.tools_variable != "tools":
            kwargs.setdefault(str(facts.tools_variable), rendered)
            rendered = None
    return ChatPlan(
        formats=formats,
        messages=chat,
        tools=rendered,
        chat_template_kwargs=kwargs,
        choice=choice,
        constraint=structured_outputs or _constraint(formats, choice, max_calls),
        reads_calls=choice.mode is not Mode.NONE and structured_outputs is None,
        max_calls=max_calls,
        include_reasoning=include_reasoning is not False,
    )


def _constraint(
    formats: ChatFormats, choice: Choice, max_calls: int | None
) -> StructuredOutputsParams | None:
    """The form that the choice of tools gives the output."""
    calls = formats.calls
    if choice.mode is not Mode.AUTO or calls is None:
        return constraint_of(choice, max_calls=max_calls)
    if not any(tool.strict for tool in choice.tools):
        return None
    if calls.strict is None or calls.strict.trigger in formats.special_tokens:
        _warn_that_strict_is_not_held(calls.name)
        return None
    return strict_calls(choice, calls.strict, max_calls=max_calls)


@lru_cache
def _warn_that_strict_is_not_held(form: str) -> None:
    """Say once for each form of calls what cannot be said in an answer."""
    _log.warning(
        "a request has strict tools and tool_choice auto, but with this model calls of the form "
        "%s cannot be held to their schemas amid free text; clients should check arguments, or "
        "set tool_choice to required or a function",
        form,
    )


def _check_together(
    choice: Choice,
    form: StructuredOutputsParams | None,
    formats: ChatFormats,
    enable_auto_tool_choice: bool,
) -> None:
    if choice.mode in (Mode.REQUIRED, Mode.NAMED) and form is not None:
        raise ToolsError(
            "a call that is required and another form of the answer exclude each other; leave out "
            "structured_outputs, or set tool_choice to auto or none",
            param="tool_choice",
        )
    if choice.mode is Mode.AUTO and not (enable_auto_tool_choice and formats.calls):
        raise ToolsError(
            "this server does not read calls from a model's free text (it runs with "
            "--no-enable-auto-tool-choice or --tool-call-parser none); name a function, or set "
            "tool_choice to required or none",
            param="tool_choice",
        )
