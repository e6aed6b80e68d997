"""Chat templates: rendered as Transformers does; bad conversations and templates refused."""

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.checkpoint.locate import resolve_model
from engine.errors import PromptError
from engine.text.chat_template import render_chat
from engine.text.tokenizer import Tokenizer, get_tokenizer

LLAMA = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Functions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}<|eot_id|>
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one tool call at a time") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n"
            + message.content | tojson + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN = """
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n') %}
            {%- set reasoning = reasoning.split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n')
            + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
    {%- if loop.index0 > 50 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)

PARTS = """
{% for message in messages %}
    <{{ message.role }}>
    {% if message.content is string %}
{{ message.content }}
    {% else %}
        {% for part in message.content %}
{{ part.text }}|
        {% endfor %}
    {% endif %}
{% endfor %}
"""

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "What is <b>2 & 3</b>? “é” 😀"}],
    "system": [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": "Hi\n\n"},
    ],
    "long": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello "},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "So long, \n", "name": None},
    ],
    "reasoning": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning": "be polite"},
    ],
}
TOOL_CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"a": "é<", "b": [1]}}}
        ],
    },
    {"role": "tool", "content": "sunny"},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "It's <ok>", "x": [1, None]}}
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return get_tokenizer(resolve_model(None))


def reference(
    template: str, messages: list[dict[str, Any]], variables: dict[str, Any], **options: Any
) -> str:
    """Transformers' rendering, with the None values dropped as its tokenizers do first."""
    chat = [{k: v for k, v in message.items() if v is not None} for message in messages]
    rendered, _ = render_jinja_template([chat], chat_template=template, **options, **variables)
    return rendered[0]


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_equals_transformers(tokenizer: Tokenizer, name: str, generation: bool) -> None:
    assert tokenizer.chat_template is not None
    messages = CONVERSATIONS[name]
    templates = [tokenizer.chat_template, LLAMA, QWEN, PARTS]
    if name != "system":
        templates.append(MISTRAL)
    for template in templates:
        for tools in (None, TOOLS):
            for extra in ({}, {"enable_thinking": False, "date_string": "1 May"}):
                options = {"add_generation_prompt": generation, "tools": tools}
                assert render_chat(
                    template, messages, variables={**VARIABLES, **extra}, **options
                ) == reference(template, messages, {**VARIABLES, **extra}, **options)


@pytest.mark.parametrize("name", ["one", "long"])
def test_continuing_the_final_message_equals_transformers(tokenizer: Tokenizer, name: str) -> None:
    messages = CONVERSATIONS[name]
    assert tokenizer.chat_template is not None
    for template in (tokenizer.chat_template, LLAMA, QWEN, MISTRAL):
        options = {"add_generation_prompt": False, "continue_final_message": True}
        text = render_chat(template, messages, variables=VARIABLES, **options)
        assert text == reference(template, messages, VARIABLES, **options)
        assert text.rstrip().endswith(messages[-1]["content"].rstrip())


def test_continuing_a_list_of_parts() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b ")]}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    for template in (PARTS, MISTRAL):
        text = render_chat(template, messages, variables=VARIABLES, **options)
        assert text.endswith("b ")
    assert render_chat(PARTS, messages, **options) == reference(PARTS, messages, {}, **options)


def test_the_caller_s_messages_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = json.dumps(messages)
    for template in (PARTS, MISTRAL):
        render_chat(
            template,
            messages,
            variables=VARIABLES,
            add_generation_prompt=False,
            continue_final_message=True,
        )
    assert json.dumps(messages) == before


def test_tool_calls() -> None:
    expected = reference(
        LLAMA, TOOL_CONVERSATION, VARIABLES, tools=TOOLS, add_generation_prompt=True
    )
    assert '{"a": "é<", "b": [1]}' in expected
    rendered = render_chat(LLAMA, TOOL_CONVERSATION, tools=TOOLS, variables=VARIABLES)
    assert rendered == expected
    # The OpenAI API carries the arguments as JSON text.
    as_text = json.loads(json.dumps(TOOL_CONVERSATION))
    function = as_text[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    assert render_chat(LLAMA, as_text, tools=TOOLS, variables=VARIABLES) == expected


@pytest.mark.parametrize(
    "arguments", ['{"city": "Par', "", "no", "[1]", "null", "[" * 100_000, [1], 5, None]
)
def test_arguments_that_are_no_object_count_as_none(arguments: Any) -> None:
    """A model's own broken call, which every later turn brings again."""
    function = {"name": "f", "arguments": arguments}
    messages = [*TOOL_CONVERSATION]
    messages[1] = messages[1] | {"tool_calls": [{"type": "function", "function": function}]}
    assert '{"name": "f", "parameters": {}}' in render_chat(LLAMA, messages, variables=VARIABLES)
    assert function["arguments"] == arguments


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"content": None, "refusal": "No."},
        {"content": None, "reasoning_content": "hm"},
        {"content": None, "tool_calls": []},
        {"content": None, "function_call": {"name": "f", "arguments": "{}"}},
    ],
)
def test_an_assistant_may_have_said_nothing(message: dict[str, Any]) -> None:
    rest = {"role": "user", "content": "Go on."}
    for template in (LLAMA, QWEN, MISTRAL, PARTS):
        said, silent = (
            render_chat(
                template,
                [rest, {"role": "assistant", **said}, rest],
                variables=VARIABLES,
            )
            for said in ({"content": ""}, message)
        )
        assert silent == said
    silent = render_chat(QWEN, [rest, {"role": "assistant", **message}])
    assert ("<think>\nhm\n</think>" in silent) == ("reasoning_content" in message)


def test_tool_calls_without_content_have_an_empty_one() -> None:
    template = "{% for message in messages %}{{ '[' + message['content'] + ']' }}{% endfor %}"
    assert render_chat(template, TOOL_CONVERSATION) == "[Weather?][][sunny]"


def test_a_refusal_is_text() -> None:
    parts = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]
    as_text = [{"type": "text", "text": "Well."}, {"type": "text", "text": "No."}]
    for template in (QWEN, PARTS):
        refused, told = (
            render_chat(template, [{"role": "assistant", "content": content}])
            for content in (parts, as_text)
        )
        assert refused == told
        assert "No." in told


STRICT = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
HARMONY = "{% if messages[0].role in ['system', 'developer'] %}{{ messages[0].role }}{% endif %}"


def test_a_developer_is_a_system_where_the_template_knows_none() -> None:
    def told(role: str, text: Any = "Be brief.") -> dict[str, Any]:
        return {"role": role, "content": text}

    developer, system, user = told("developer"), told("system"), told("user", "Hi")
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    for template in (LLAMA, STRICT, QWEN, PARTS, STRICT + "as a developer"):
        for text in ("Be brief.", parts):
            assert render_chat(
                template, [told("developer", text), user], variables=VARIABLES
            ) == render_chat(template, [told("system", text), user], variables=VARIABLES)
    for told_so in ("system", "developer"):
        assert render_chat(HARMONY, [told(told_so)]) == told_so
    # Several become one; without a developer among them they stay as they are.
    for messages in (
        [system, told("developer", parts), user],
        [user, system, told("developer", ""), told("developer", parts)],
    ):
        text = "system: Be brief.\n\nOne\nTwo\nuser: Hi\n"
        assert render_chat(STRICT, messages) == text
    assert render_chat(STRICT, [user, developer]) == "system: Be brief.\nuser: Hi\n"
    with pytest.raises(PromptError, match="must come first"):
        render_chat(STRICT, [user, system])


def test_parts_become_a_string_unless_the_template_reads_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    assert render_chat(MISTRAL, messages, variables=VARIABLES) == "<s>[INST] one\ntwo [/INST]"
    options = {"add_generation_prompt": True}
    assert render_chat(PARTS, messages) == reference(PARTS, messages, {}, **options)
    assert "one|" in render_chat(PARTS, messages)


def test_apply_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "The capital of France?"}]
    text = tokenizer.apply_chat_template(messages)
    assert isinstance(text, str)
    assert text.endswith(
        "<|im_start|>user\nThe capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(messages, tokenize=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    template = "{{ bos_token }}{{ eos_token }}{{ mood }}"
    assert tokenizer.apply_chat_template(messages, chat_template=template, mood="calm") == (
        "<|im_start|><|im_end|>calm"
    )


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "empty"),
        ("hello", "must be a list"),
        ({"role": "user", "content": "x"}, "must be a list"),
        (["hello"], r"messages\[0\] must be a dictionary"),
        ([{"content": "x"}], r"\.role must be a string"),
        ([{"role": 3, "content": "x"}], r"\.role must be a string"),
        ([{"role": "", "content": "x"}], r"\.role must be a string"),
        ([{"role": "user"}], 'has no "content"'),
        ([{"role": "user", "content": None}], 'has no "content"'),
        ([{"role": "user", "content": 3}], "must be a string or a list of text parts, got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'"),
        ([{"role": "user", "content": [3]}], "a part of type int"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"\.text must be a string"),
        ([{"role": "user", "content": "x", "extra": object()}], "holds a object"),
        ([{"role": "assistant", "tool_calls": "f()"}], "must be a list"),
        ([{"role": "assistant", "tool_calls": ["f()"]}], "must be a dictionary"),
        ([{"role": "tool", "content": None}], 'has no "content"'),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}],
            r"\.refusal must be a string, got None",
        ),
        (
            [{"role": "user", "content": "x"}, {"role": "user", "content": 1.5}],
            r"messages\[1\]",
        ),
    ],
)
def test_bad_messages(messages: Any, complaint: str) -> None:
    with pytest.raises(PromptError, match=complaint) as caught:
        render_chat(MISTRAL, messages, variables=VARIABLES)
    assert str(caught.value).split()[0].rstrip(":") == caught.value.param


def test_nesting_without_end() -> None:
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(PromptError, match="nested deeper"):
        render_chat(MISTRAL, [{"role": "user", "content": "x", "extra": nested}])


def test_bad_arguments() -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(PromptError, match="exclude each other"):
        render_chat(MISTRAL, messages, variables=VARIABLES, continue_final_message=True)
    with pytest.raises(PromptError, match=r"tools\[0\] must be a JSON schema"):
        render_chat(MISTRAL, messages, variables=VARIABLES, tools=[print])  # type: ignore[list-item]
    for template in ("{{ messages | length }}", "{{ messages[0].content | upper }}"):
        with pytest.raises(PromptError, match="drops or changes the last message"):
            render_chat(
                template, messages, add_generation_prompt=False, continue_final_message=True
            )
    for template, final in ((LLAMA, TOOL_CONVERSATION[1]), (PARTS, messages[0] | {"content": []})):
        with pytest.raises(PromptError, match=r"drops or changes|has no content"):
            render_chat(template, [final], add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% for x in %}", "not valid Jinja"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "cannot be compiled"),
        ("{{ " + "-" * 100_000 + "1 }}", "cannot be compiled"),
        ("{% if 1 %}" * 400 + "{% endif %}" * 400, "cannot be compiled"),
        ("{% for i in 'a' %}" * 150 + "{% endfor %}" * 150, "cannot be compiled"),
        ("{{ " + "1" * 5000 + " }}", "cannot be compiled"),
        ("{{ raise_exception('no ' + messages[0].role) }}", "refused the messages: no user"),
        ("{{ messages[0].missing.deeper }}", "refused"),
        ("{{ messages[0].content + 3 }}", "refused"),
        ("{{ messages.append(3) }}", "refused"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refused"),
        ("{{ raise_exception.__globals__.keys() }}", "refused"),
        ("{% set ns = namespace(__class__=1) %}", "refused"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "refused"),
        ("{% for i in range(10**9) %}{% endfor %}", "refused"),
        ("{{ ''.__class__ }}{% include 'x' %}", "refused"),
    ],
)
def test_bad_templates(template: str, complaint: str) -> None:
    with pytest.raises(PromptError, match=complaint):
        render_chat(template, [{"role": "user", "content": "x"}])


def test_what_templates_are_given() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert (
        render_chat("{{ {'b': '<é>', 'a': none} | tojson }}", messages) == '{"b": "<é>", "a": null}'
    )
    assert render_chat("{{ dict(a=1) | tojson(sort_keys=true, indent=1) }}", messages) == (
        '{\n "a": 1\n}'
    )
    assert render_chat("{{ documents is none }}{{ tools is none }}", messages) == "TrueTrue"
    variables = {"documents": [{"text": "é"}]}
    assert render_chat("{{ documents[0].text }}", messages, variables=variables) == "é"
    year = render_chat("{{ strftime_now('%Y') }}", messages)
    assert year.isdigit()
    assert int(year) >= 2024
    assert render_chat("{{ namespace(self=2).self }}", messages) == "2"
