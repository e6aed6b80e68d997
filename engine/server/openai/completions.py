"""`POST /v1/completions`: text to go on with.

Knows how a body becomes prompts and parameters. The answers are made in `completion_answers`.
"""

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from engine.api.async_llm import AsyncLLM
from engine.frontend.input_processor import Prompt
from engine.frontend.request_tracer import TEXT_COMPLETION
from engine.server.http.errors import ApiError
from engine.server.openai.completion_answers import (
    CompletionCollector,
    CompletionPlan,
    CompletionWriter,
)
from engine.server.openai.limits import BoundedRoute
from engine.server.openai.protocol.common import answers
from engine.server.openai.protocol.completion import CompletionRequest, CompletionResponse
from engine.server.openai.sampling import check_max_tokens, form_names, make_params, wanted_form
from engine.server.openai.streaming import EventStream, WholeAnswer
from engine.server.openai.submission import Origin, Submission, check_num_outputs
from engine.server.state import server_of
from engine.types.sampling import SamplingParams

router = APIRouter(route_class=BoundedRoute)


@router.post(
    "/v1/completions",
    response_model=None,
    responses=answers(CompletionResponse),
)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Go on with one text or several; with `stream`, as server-sent events."""
    state = server_of(request)
    state.require_ready()
    model, engine = state.check_model(body.model), state.engine
    num_prompts = len(body.prompts)
    check_num_outputs(state.config, num_prompts, body.n)
    if body.echo and engine.llm_engine.tokenizer is None:
        raise ApiError(400, "echo needs a tokenizer, and the engine has none", param="echo")
    origin = Origin.of(request, engine, "cmpl", body.request_id, num_prompts=num_prompts)
    with origin.reserve(state, num_prompts, TEXT_COMPLETION, prompt="prompt", n=body.n) as room:
        size = request.state.num_body_bytes  # a schema in it may take a while to check
        names, params = await engine.with_texts(
            partial(completion_params, body, engine), num_characters=size
        )
        prompts = _prompts(body)
        plan = _plan(body, params, origin, model, engine)
        submission = Submission(body, params, origin, TEXT_COMPLETION, names, "prompt")
        streams = await submission.send(engine, request, prompts, room)
    if body.stream:
        return EventStream(state, streams, CompletionWriter(plan), names)
    return WholeAnswer(state, streams, CompletionCollector(plan, num_prompts), names)


def completion_params(
    body: CompletionRequest, engine: AsyncLLM
) -> tuple[dict[str, str], SamplingParams]:
    """Names of fields by the engine's names, and the parameters.

    Raises:
        ApiError: 400, with the field's name.
    """
    field, form = wanted_form(body)
    names = {"extra_args": "vllm_xargs", **form_names(field)}
    values: dict[str, Any] = {"logprobs": body.logprobs, "structured_outputs": form}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        values["prompt_logprobs"] = body.logprobs
    check_max_tokens(engine, body.max_tokens)
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0:
        if not body.echo:
            raise ApiError(
                400,
                "max_tokens must be at least 1, or 0 with echo, which answers with the prompt "
                "alone; got 0",
                param="max_tokens",
            )
        max_tokens = 1  # which is not shown
    return names, make_params(
        body, engine, max_tokens=max_tokens, stream=bool(body.stream), names=names, **values
    )


def _prompts(body: CompletionRequest) -> list[Prompt]:
    """The body's prompts as the engine takes them."""
    salt = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
    adds = {} if body.add_special_tokens is not False else {"add_special_tokens": False}
    return [
        {"prompt": prompt, **adds, **salt}
        if isinstance(prompt, str)
        else {"prompt_token_ids": prompt, **salt}
        for prompt in body.prompts
    ]


def _plan(
    body: CompletionRequest,
    params: SamplingParams,
    origin: Origin,
    model: str,
    engine: AsyncLLM,
) -> CompletionPlan:
    return CompletionPlan(
        response_id=origin.response_id,
        created=int(time.time()),
        model=model,
        n=params.n,
        tokenizer=engine.llm_engine.tokenizer,
        echo=bool(body.echo),
        drops_output=body.max_tokens == 0,
        num_logprobs=params.logprobs,
        wants_prompt_logprobs=body.prompt_logprobs is not None,
        returns_token_ids=bool(body.return_token_ids),
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        skips_special_tokens=params.skip_special_tokens,
        truncates=params.truncate_prompt_tokens is not None,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
