"""What a chat request means: what is rendered, how the output is constrained, how it is read."""

import json
from typing import Any

import pytest

from engine.checkpoint.locate import resolve_model
from engine.errors import ConfigError, PromptError
from engine.server.openai.tools.definitions import ToolsError
from engine.server.openai.tools.pieces import ChatOutput
from engine.server.openai.tools.plan import ChatFormats, ChatPlan, plan_chat
from engine.structured.forms.params import StructuredOutputsParams
from engine.text.chat_template import render_chat
from engine.text.tokenizer import Tokenizer, get_tokenizer
from tests.support.grammar_walks import lets_through

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
THINKER = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
ANY_JSON = StructuredOutputsParams(json_object=True)
USER = [{"role": "user", "content": "Weather in Paris?"}]
NOW = {"type": "function", "function": {"name": "now"}}
WEATHER = {"type": "function", "function": {"name": "weather"}}
HISTORY: list[dict[str, Any]] = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
            },
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
]


def render(plan: ChatPlan) -> str:
    return render_chat(
        plan.formats.template.text,
        plan.messages,
        tools=plan.tools,
        variables=plan.chat_template_kwargs,
    )


def answer(plan: ChatPlan, text: str) -> ChatOutput:
    return plan.after_render(render(plan)).new_parser().parse(text)


def calls(output: ChatOutput) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in output.tool_calls]


# -- rendering -------------------------------------------------------------------------------------


def test_a_template_that_knows_tools_gets_them() -> None:
    plan = plan_chat(ChatFormats.resolve(QWEN), USER, tools=TOOLS)
    assert plan.tools == TOOLS
    assert json.dumps(TOOLS[0]) in render(plan)


def test_tools_are_not_rendered_where_none_may_be_called() -> None:
    for template in (QWEN, CHATML):
        formats = ChatFormats.resolve(template)
        plan = plan_chat(formats, USER, tools=TOOLS, tool_choice="none")
        assert render(plan) == render(plan_chat(formats, USER))
        text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
        assert answer(plan, text) == ChatOutput(content=text)


def test_a_template_without_tools_gets_them_in_a_system_message() -> None:
    plan = plan_chat(ChatFormats.resolve(CHATML), USER, tools=TOOLS)
    assert plan.tools is None
    prompt = render(plan)
    assert prompt.startswith("<|im_start|>system\n# Tools")
    for tool in TOOLS:
        assert f"\n{json.dumps(tool)}\n" in prompt
    assert prompt.endswith("<|im_start|>user\nWeather in Paris?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_tools_follow_the_requests_own_system_message(content: object) -> None:
    messages = [{"role": "system", "content": content}, *USER]
    plan = plan_chat(ChatFormats.resolve(CHATML), messages, tools=TOOLS)
    assert render(plan).startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert messages[0]["content"] == content


def test_another_variable_for_tools_is_used() -> None:
    plan = plan_chat(ChatFormats.resolve(QWEN.replace("tools", "xml_tools")), USER, tools=TOOLS)
    assert plan.tools is None
    assert json.dumps(TOOLS[0]) in render(plan)


def test_calls_and_results_go_round_through_a_template_that_knows_them() -> None:
    plan = plan_chat(ChatFormats.resolve(QWEN), HISTORY, tools=TOOLS)
    prompt = render(plan)
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>' in prompt
    assert '<tool_call>{"name": "now", "arguments": {}}</tool_call>' in prompt
    assert "<|im_start|>tool\nrain<|im_end|>" in prompt


def test_calls_and_results_become_text_for_a_template_that_does_not() -> None:
    prompt = render(plan_chat(ChatFormats.resolve(CHATML), HISTORY))
    assert prompt == (
        "<|im_start|>user\nWeather in Paris?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n"
        "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert HISTORY[1]["content"] is None


def test_a_template_that_writes_calls_but_no_tools_gets_all_of_it_as_text() -> None:
    """As DeepSeek-R1's distilled models have it, which also wants arguments as text."""
    template = CHATML.replace(
        "{{ m.content }}",
        "{% for call in m['tool_calls'] or [] %}{{ 'x' + call['function']['arguments'] }}"
        "{% endfor %}{{ m.content }}",
    )
    plan = plan_chat(ChatFormats.resolve(template), HISTORY, tools=TOOLS)
    assert render(plan) == render(plan_chat(ChatFormats.resolve(CHATML), HISTORY, tools=TOOLS))


def test_what_is_written_for_a_template_is_what_is_read() -> None:
    plan = plan_chat(ChatFormats.resolve(CHATML), HISTORY, tools=TOOLS)
    written = plan.messages[2]["content"]
    assert calls(answer(plan, written)) == [("weather", '{"city": "Paris"}'), ("now", "{}")]


def test_malformed_messages_are_refused() -> None:
    with pytest.raises(PromptError, match=r"messages\[0\]"):
        plan_chat(ChatFormats.resolve(CHATML), [{"content": "x"}], tools=TOOLS)


def test_a_broken_call_goes_back_without_arguments() -> None:
    broken = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    text = render(plan_chat(ChatFormats.resolve(CHATML), [broken]))
    assert '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>' in text


def test_tools_go_to_the_developer_s_message() -> None:
    formats = ChatFormats.resolve(CHATML)
    told = [{"role": role, "content": "Be brief."} for role in ("system", "developer")]
    by_system, by_developer = (
        render(plan_chat(formats, [message, *USER], tools=TOOLS)) for message in told
    )
    assert by_developer == by_system
    assert "<tools>" in by_system


# -- reading ---------------------------------------------------------------------------------------


def test_free_text_is_read_for_calls() -> None:
    plan = plan_chat(ChatFormats.resolve(QWEN), USER, tools=TOOLS)
    output = plan.after_render(render(plan))
    assert output.structured_outputs is None
    parser = output.new_parser()
    found = parser.parse('Hm.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    assert (found.content, calls(found)) == ("Hm.", [("now", "{}")])
    assert output.finish_reason("stop", parser) == "tool_calls"
    assert output.finish_reason("length", parser) == "length"
    quiet = output.new_parser()
    quiet.parse("No.")
    assert output.finish_reason("stop", quiet) == "stop"
    broken = output.new_parser()
    found = broken.parse('<tool_call>\n{"name": "weather", "arguments": {"city": "Par')
    assert calls(found) == [("weather", '{"city": "Par')]
    assert output.finish_reason("stop", broken) == "stop"  # by a stop string
    assert output.finish_reason("length", broken) == "length"
    assert output.finish_reason(None, quiet) is None


def test_a_required_call() -> None:
    plan = plan_chat(ChatFormats.resolve(QWEN), USER, tools=TOOLS, tool_choice="required")
    output = plan.after_render(render(plan))
    assert output.structured_outputs is not None
    parser = output.new_parser()
    text = '[{"name": "weather", "parameters": {"city": "Paris"}}, {"name":"now","parameters":{}}]'
    found = parser.parse(text)
    assert found.content is None
    assert calls(found) == [("weather", '{"city": "Paris"}'), ("now", "{}")]
    assert output.finish_reason("stop", parser) == "tool_calls"
    assert output.finish_reason("length", parser) == "length"


def test_a_named_call() -> None:
    plan = plan_chat(ChatFormats.resolve(CHATML), USER, tools=TOOLS, tool_choice=WEATHER)
    output = plan.after_render(render(plan))
    constraint = output.structured_outputs
    assert constraint is not None
    assert json.loads(str(constraint.json)) == CITY | {"additionalProperties": False}
    parser = output.new_parser()
    assert calls(parser.parse(' {"city": "Paris"}\n')) == [("weather", '{"city": "Paris"}')]
    assert output.finish_reason("stop", parser) == "stop"  # as OpenAI has it
    nothing = output.new_parser().parse("")
    assert calls(nothing) == [("weather", "")]
    assert '"name": "now"' not in render(plan)


def test_no_parallel_calls() -> None:
    two = '<tool_call>{"name": "now", "arguments": {}}</tool_call>' * 2
    formats = ChatFormats.resolve(QWEN)
    one = plan_chat(formats, USER, tools=TOOLS, parallel_tool_calls=False)
    assert len(answer(one, two).tool_calls) == 1
    many = plan_chat(formats, USER, tools=TOOLS, parallel_tool_calls=True)
    assert len(answer(many, two).tool_calls) == 2
    required = plan_chat(
        formats, USER, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    assert required.constraint is not None
    assert json.loads(str(required.constraint.json))["maxItems"] == 1


def test_an_answer_of_another_form_has_no_calls() -> None:
    plan = plan_chat(ChatFormats.resolve(CHATML), USER, tools=TOOLS, structured_outputs=ANY_JSON)
    output = plan.after_render(render(plan))
    assert output.structured_outputs is not None
    assert not plan.reads_calls
    text = '{"name": "now", "arguments": {}}'
    assert output.new_parser().parse(text) == ChatOutput(content=text)
    for choice in ("required", NOW):
        with pytest.raises(ToolsError, match=r"leave out structured_outputs, or set"):
            plan_chat(
                ChatFormats.resolve(CHATML),
                USER,
                tools=TOOLS,
                tool_choice=choice,
                structured_outputs=ANY_JSON,
            )


def test_servers_that_read_no_calls_still_take_required_ones() -> None:
    formats = ChatFormats.resolve(QWEN, tool_call_parser="none")
    for options in ({}, {"enable_auto_tool_choice": False}):
        chosen = formats if not options else ChatFormats.resolve(QWEN)
        with pytest.raises(ToolsError, match="tool-call-parser none") as caught:
            plan_chat(chosen, USER, tools=TOOLS, **options)
        assert caught.value.param == "tool_choice"
        unread = plan_chat(chosen, USER, tools=TOOLS, is_answered=False, **options)
        assert render(unread) == render(plan_chat(ChatFormats.resolve(QWEN), USER, tools=TOOLS))
        plan = plan_chat(chosen, USER, tools=TOOLS, tool_choice=NOW, **options)
        assert calls(answer(plan, "{}")) == [("now", "{}")]


# -- reasoning -------------------------------------------------------------------------------------


def test_reasoning_then_calls() -> None:
    plan = plan_chat(ChatFormats.resolve(QWEN), USER, tools=TOOLS)
    text = '<think>\nHm.\n</think>\n\nOk.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    found = answer(plan, text)
    assert (found.reasoning, found.content, calls(found)) == ("Hm.", "Ok.", [("now", "{}")])
    inside = "<think>" + text.removeprefix("<think>\nHm.\n</think>")
    assert answer(plan, inside).tool_calls == []


def test_reasoning_that_the_prompt_opens_or_closes() -> None:
    opened = plan_chat(ChatFormats.resolve(THINKER), USER)
    found = answer(opened, "Hm.</think>Ok.")
    assert (found.reasoning, found.content) == ("Hm.", "Ok.")
    formats = ChatFormats.resolve(QWEN)
    closed = plan_chat(formats, USER, chat_template_kwargs={"enable_thinking": False})
    assert answer(closed, "Ok.") == ChatOutput(content="Ok.")


def test_reasoning_can_be_left_out() -> None:
    for include, wanted in ((False, None), (None, "Hm."), (True, "Hm.")):
        plan = plan_chat(ChatFormats.resolve(THINKER), USER, include_reasoning=include)
        found = answer(plan, "Hm.</think>Ok.")
        assert (found.reasoning, found.content) == (wanted, "Ok.")
    off = ChatFormats.resolve(THINKER, reasoning_parser="none")
    assert answer(plan_chat(off, USER), "Hm.</think>Ok.").content == "Hm.</think>Ok."


def accepts(plan: ChatPlan, text: str) -> bool:
    """Whether the plan's constraint is met by the whole text."""
    constraint = plan.after_render(render(plan)).structured_outputs
    assert constraint is not None
    assert constraint.kind == "structural_tag"
    return lets_through(constraint, text)


def test_a_required_form_lets_the_model_reason_first() -> None:
    call = '[{"name": "now", "parameters": {}}]'
    opened = plan_chat(ChatFormats.resolve(THINKER), USER, tools=TOOLS, tool_choice="required")
    assert accepts(opened, f'a {{"b" </thin\n</think>\n\n{call}')
    assert not accepts(opened, call)
    assert not accepts(opened, f"a</think>\n\nSure: {call}")
    assert calls(answer(opened, f"a</think>\n\n{call}")) == [("now", "{}")]
    free = plan_chat(ChatFormats.resolve(QWEN), USER, tools=TOOLS, tool_choice="required")
    assert accepts(free, f"<think>a</think>{call}")
    assert accepts(free, call)
    assert not accepts(free, f"<think>a{call}")


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"json": CITY}, '{"city": "Paris"}', "{}"),
        ({"json_object": True}, '{"a": [1]}', "[1]"),
        ({"regex": "[a-c]+"}, "abc", "d"),
        ({"choice": ["yes", "no"]}, "no", "n"),
        ({"choice": ["yes"]}, "yes", "no"),
        ({"grammar": 'root ::= "x" "y"'}, "xy", "x"),
        (
            {
                "structural_tag": {
                    "type": "structural_tag",
                    "format": {"type": "const_string", "value": "z"},
                }
            },
            "z",
            "y",
        ),
    ],
)
def test_every_form_lets_the_model_reason_first(form: dict[str, Any], good: str, bad: str) -> None:
    plan = plan_chat(
        ChatFormats.resolve(THINKER), USER, structured_outputs=StructuredOutputsParams(**form)
    )
    assert accepts(plan, f"Hm.\n</think>\n\n{good}")
    assert not accepts(plan, f"Hm.\n</think>\n\n{bad}")
    found = answer(plan, f"Hm.\n</think>\n\n{good}")
    assert (found.reasoning, found.content) == ("Hm.", good)


def test_strict_tools_hold_calls_amid_free_text_to_their_schemas() -> None:
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    odd = '<tool_call>\n{"name": "now", "arguments": {"zone": [1]}}\n</tool_call>'
    plan = plan_chat(ChatFormats.resolve(QWEN), USER, tools=tools)
    assert accepts(plan, "No.")
    assert accepts(plan, f"Hm < x <tool >.\n{call}\n{odd} Done.")
    assert accepts(plan, f"<think>a</think>\n\n{call}")
    assert accepts(plan, f"<think>no <tool_call> yet</think>\n\n{call}"), "thoughts are free"
    assert not accepts(plan, f"<think>a</think>\n\n<tool_call>{call}")
    for wrong in (("Paris", 'Paris", "x": "y'), ("city", "town"), ("weather", "other")):
        assert not accepts(plan, call.replace(*wrong))
    assert not accepts(plan, "<tool_call>no")
    assert calls(answer(plan, call)) == [("weather", '{"city": "Paris"}')]
    one = plan_chat(ChatFormats.resolve(CHATML), USER, tools=tools, parallel_tool_calls=False)
    assert accepts(one, f"So: {call}")
    assert not accepts(one, f"{call}\n{call}")
    special = ChatFormats.resolve(QWEN, ["<tool_call>"])
    assert plan_chat(special, USER, tools=tools).constraint is None


def test_where_reasoning_cannot_come_the_form_holds_from_the_start() -> None:
    form = StructuredOutputsParams(regex="a+")
    closed = plan_chat(
        ChatFormats.resolve(QWEN),
        USER,
        structured_outputs=form,
        chat_template_kwargs={"enable_thinking": False},
    )
    # Special tokens are nothing that a grammar could let through.
    special = plan_chat(
        ChatFormats.resolve(THINKER, ["<think>", "</think>"]), USER, structured_outputs=form
    )
    for plan in (closed, special):
        output = plan.after_render(render(plan))
        assert output.structured_outputs is not None
        assert output.structured_outputs.regex == "a+"
        assert output.new_parser().parse("aa") == ChatOutput(content="aa")


def test_special_tokens_are_kept_only_where_they_are_looked_for() -> None:
    special = ["<tool_call>", "<|im_end|>"]
    formats = ChatFormats.resolve(QWEN, special)

    def needs(formats: ChatFormats, **options: Any) -> bool:
        plan = plan_chat(formats, USER, **options)
        return plan.after_render(render(plan)).needs_special_tokens

    assert needs(formats, tools=TOOLS)
    assert not needs(formats)
    assert not needs(formats, tools=TOOLS, tool_choice="required")
    assert not needs(ChatFormats.resolve(QWEN, ["<|im_end|>"]), tools=TOOLS)
    assert needs(ChatFormats.resolve(QWEN, ["</think>"]))


# -- the models' own -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Of the embedded model."""
    return get_tokenizer(resolve_model(None))


def test_the_embedded_model_knows_neither_tools_nor_reasoning(tokenizer: Tokenizer) -> None:
    special = map(tokenizer.id_to_token, tokenizer.special_ids)
    formats = ChatFormats.resolve(str(tokenizer.chat_template), special)
    assert formats.calls is not None
    assert formats.calls.name == "hermes"
    assert formats.reasoning is None
    assert formats.template.tools_variable is None
    assert "<|im_end|>" in formats.special_tokens
    plan = plan_chat(formats, HISTORY, tools=TOOLS)
    prompt = tokenizer.apply_chat_template(plan.messages, tools=plan.tools)
    assert isinstance(prompt, str)
    assert "<tool_response>\nrain" in prompt
    assert not plan.after_render(prompt).needs_special_tokens


def test_a_template_of_ones_own_decides() -> None:
    formats = ChatFormats.resolve("[TOOL_CALLS][THINK]{{ tools }}")
    assert formats.calls is not None
    assert formats.reasoning is not None
    assert (formats.calls.name, formats.reasoning.name) == ("mistral", "mistral")
    with pytest.raises(ConfigError):
        ChatFormats.resolve(CHATML, tool_call_parser="gpt")
