"""`POST /tokenize` and `POST /detokenize`: what the model's tokenizer makes of a text."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from engine.api.async_llm import AsyncLLM
from engine.server.conversations import Conversation
from engine.server.json_body import JsonRoute, json_response
from engine.server.protocol.common import answers
from engine.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from engine.server.sampling import naming_fields
from engine.server.state import server_of
from engine.server.tools.plan import plan_chat

router = APIRouter(route_class=JsonRoute)


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
    ids = await _ids(state.engine, body, request)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": state.engine.config.model.max_model_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        tokenizer = state.engine.get_tokenizer()
        answer["token_strs"] = [tokenizer.id_to_token(token_id) for token_id in ids]
    return json_response(answer)


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


async def _ids(engine: AsyncLLM, body: TokenizeRequest, request: Request) -> list[int]:
    text, adds = body.prompt, body.add_special_tokens is not False
    if text is None:
        with naming_fields({}, prompt="messages"):
            conversation = Conversation.of(body, body.messages, request)
            plan = plan_chat(
                conversation.formats,
                body.messages,
                tools=body.tools,
                chat_template_kwargs=body.chat_template_kwargs,
                is_answered=False,
            )
            prompt = await conversation.render(plan)
        text, adds = prompt["prompt"], prompt.get("add_special_tokens", True)
    with naming_fields({}):
        encode = partial(engine.get_tokenizer().encode, text, add_special_tokens=adds)
        return await engine.with_texts(encode, text)
