"""`POST /tokenize` and `POST /detokenize`: what the model's tokenizer makes of a text."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from engine.server.http.json_body import json_response
from engine.server.openai.conversations import Conversation
from engine.server.openai.limits import BoundedRoute
from engine.server.openai.protocol.common import answers
from engine.server.openai.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from engine.server.openai.sampling import naming_fields
from engine.server.openai.tools.plan import ChatPlan, plan_chat
from engine.server.state import server_of
from engine.text.tokenizer import Tokenizer

router = APIRouter(route_class=BoundedRoute)


@router.post(
    "/tokenize",
    response_model=None,
    responses=answers(TokenizeResponse),
)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text, or of a conversation as the chat template renders it."""
    state = server_of(request)
    state.require_ready()
    state.check_model(body.model)
    engine, text, adds = state.engine, body.prompt, body.add_special_tokens is not False
    if text is None:
        with naming_fields({}, prompt="messages"):
            conversation = Conversation.of(body, body.messages, request)
            size = request.state.num_body_bytes  # tools in it may take a while to look through
            plan = await engine.with_texts(partial(_plan, conversation), num_characters=size)
            prompt = await conversation.render(plan)
        text, adds = prompt["prompt"], prompt.get("add_special_tokens", True)
    answer = partial(
        _answer,
        engine.get_tokenizer(),
        text,
        add_special_tokens=adds,
        with_strings=bool(body.return_token_strs),
        max_model_len=engine.config.model.max_model_len,
    )
    with naming_fields({}):
        return await engine.with_texts(answer, text)


@router.post(
    "/detokenize",
    response_model=None,
    responses=answers(DetokenizeResponse),
)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids."""
    state = server_of(request)
    state.require_ready()
    state.check_model(body.model)
    with naming_fields({}, prompt="tokens"):
        tokenizer = state.engine.get_tokenizer()
        text = await state.engine.with_texts(
            partial(tokenizer.decode, body.tokens, skip_special_tokens=False), body.tokens
        )
    return json_response({"prompt": text})


@router.get("/tokenizer_info", response_model=TokenizerInfo)
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """Special tokens and the chat template."""
    state = server_of(request)
    state.require_ready()
    tokenizer = state.engine.get_tokenizer()
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    template, _ = state.chat_templates.choose(None, tokenizer, has_tools=False)
    return {name: tokenizer.special_tokens.get(name) for name in names} | {
        "tokenizer_class": type(tokenizer).__name__,
        "chat_template": template,
        "vocab_size": tokenizer.vocab_size,
        "max_model_len": state.engine.config.model.max_model_len,
    }


def _plan(conversation: Conversation) -> ChatPlan:
    return plan_chat(
        conversation.formats,
        conversation.messages,
        tools=conversation.body.tools,
        chat_template_kwargs=conversation.variables,
        is_answered=False,
    )


def _answer(
    tokenizer: Tokenizer,
    text: str,
    *,
    add_special_tokens: bool,
    with_strings: bool,
    max_model_len: int | None,
) -> Response:
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids}
    if with_strings:
        answer["token_strs"] = [tokenizer.id_to_token(token_id) for token_id in ids]
    return json_response(answer)
