"""`POST /v1/chat/completions`: a conversation to go on with.

Knows how a body becomes a prompt and parameters. What tools, reasoning and `tool_choice` mean is
decided in `engine.server.openai.tools`; the answers are made in `chat_answers`.
"""

import time
from collections.abc import Mapping
from functools import partial

from fastapi import APIRouter, Request, Response

from engine.api.async_llm import AsyncLLM
from engine.frontend.request_tracer import CHAT
from engine.server.openai.chat_answers import ChatAnswerPlan, ChatCollector, ChatWriter
from engine.server.openai.conversations import Conversation
from engine.server.openai.limits import BoundedRoute
from engine.server.openai.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from engine.server.openai.protocol.common import answers
from engine.server.openai.sampling import (
    check_max_tokens,
    form_names,
    make_params,
    naming_fields,
    wanted_form,
)
from engine.server.openai.streaming import EventStream, WholeAnswer
from engine.server.openai.submission import Origin, Submission, check_num_outputs
from engine.server.openai.tools.plan import ChatPlan, OutputPlan, plan_chat
from engine.server.state import server_of
from engine.structured.forms.params import StructuredOutputsParams
from engine.types.sampling import SamplingParams

router = APIRouter(route_class=BoundedRoute)


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses=answers(ChatCompletionResponse),
)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Make the next message of a conversation; with `stream`, as server-sent events."""
    state = server_of(request)
    state.require_ready()
    model, engine = state.check_model(body.model), state.engine
    check_num_outputs(state.config, 1, body.n)
    origin = Origin.of(request, engine, "chatcmpl", body.request_id)
    with origin.reserve(state, 1, CHAT, prompt="messages", n=body.n) as room:
        size = request.state.num_body_bytes  # schemas in it may take a while to check
        names, form = await engine.with_texts(partial(_form, body), num_characters=size)
        with naming_fields(names, prompt="messages"):
            conversation = Conversation.of(body, body.messages, request)
            may_choose = state.config.enable_auto_tool_choice
            chat = await engine.with_texts(
                partial(_plan_chat, conversation, form, may_choose), num_characters=size
            )
            prompt = await conversation.render(chat)
        output = chat.after_render(prompt["prompt"])
        if body.cache_salt is not None:
            prompt["cache_salt"] = body.cache_salt
        names, params = chat_params(body, engine, output, names | chat.field_names)
        plan = _plan(body, params, origin, model, engine, output)
        submission = Submission(body, params, origin, CHAT, names, "messages")
        streams = await submission.send(engine, request, [prompt], room)
    if body.stream:
        return EventStream(state, streams, ChatWriter(plan), names)
    return WholeAnswer(state, streams, ChatCollector(plan), names)


def _form(
    body: ChatCompletionRequest,
) -> tuple[dict[str, str], StructuredOutputsParams | None]:
    """The field that asks for a form of the answer, by the engine's name, and that form."""
    field, form = wanted_form(body)
    names = form_names(field)
    with naming_fields(names):
        return names, None if form is None else StructuredOutputsParams.from_any(form)


def _plan_chat(
    conversation: Conversation, form: StructuredOutputsParams | None, may_choose: bool
) -> ChatPlan:
    body = conversation.body
    assert isinstance(body, ChatCompletionRequest)
    variables = conversation.variables
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return plan_chat(
        conversation.formats,
        conversation.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        structured_outputs=form,
        include_reasoning=body.include_reasoning,
        chat_template_kwargs=variables,
        enable_auto_tool_choice=may_choose,
    )


def chat_params(
    body: ChatCompletionRequest,
    engine: AsyncLLM,
    output: OutputPlan,
    names: Mapping[str, str],
) -> tuple[dict[str, str], SamplingParams]:
    """Names of fields by the engine's names, and the parameters.

    Raises:
        ApiError: 400, with the field's name.
    """
    names = {"logprobs": "top_logprobs", "extra_args": "vllm_xargs", **names}
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens, names["max_tokens"] = body.max_completion_tokens, "max_completion_tokens"
    check_max_tokens(engine, max_tokens, name=names.get("max_tokens", "max_tokens"))
    if max_tokens is None and engine.config.model.generation_config != "vllm":
        max_tokens = engine.llm_engine.model_config.generation_defaults.get("max_new_tokens")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return names, make_params(
        body,
        engine,
        max_tokens=max_tokens,
        stream=bool(body.stream),
        names=names,
        logprobs=logprobs,
        structured_outputs=output.structured_outputs,
        **({"skip_special_tokens": False} if output.needs_special_tokens else {}),
    )


def _plan(
    body: ChatCompletionRequest,
    params: SamplingParams,
    origin: Origin,
    model: str,
    engine: AsyncLLM,
    output: OutputPlan,
) -> ChatAnswerPlan:
    return ChatAnswerPlan(
        response_id=origin.response_id,
        created=int(time.time()),
        model=model,
        tokenizer=engine.get_tokenizer(),
        output=output,
        echo=_echo(body),
        num_top_logprobs=params.logprobs,
        wants_prompt_logprobs=body.prompt_logprobs is not None,
        returns_token_ids=bool(body.return_token_ids),
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )


def _echo(body: ChatCompletionRequest) -> str:
    """The assistant's message that is gone on with, if it is to be repeated."""
    return str(body.messages[-1]["content"]) if body.echo else ""
