"""What is refused by its length alone, before anybody looks into it.

Checking a list of millions of tokens item by item takes seconds, in which the event loop serves
nobody; that there are too many of them takes none. Knows the names of fields whose length has a
bound. What is in them is for `protocol` and the engine to check.
"""

from typing import Any

from fastapi import Request

from engine.frontend.input_processor import too_long
from engine.server.http.errors import ApiError
from engine.server.http.json_body import JsonRoute
from engine.server.http.served import Phase
from engine.server.openai.sampling import naming_fields
from engine.server.state import ServerState, server_of

MAX_MESSAGES = 4096
MAX_BAD_WORDS_CHARACTERS = 16_384
"""Of all of them together: each is tokenized, on the event loop, for each request."""


class BoundedRoute(JsonRoute):
    """A route whose lists are refused by their length before anybody looks into them."""

    def check(self, body: dict[str, Any], request: Request) -> None:
        """See `check_lengths`."""
        check_lengths(body, server_of(request))


def check_lengths(body: dict[str, Any], state: ServerState) -> None:
    """Refuse a decoded body whose prompts are too many or too long, whatever is in them.

    Raises:
        ApiError: 400, with the field's name.
    """
    _check_lists(body, state)
    prompts = body.get("prompt")
    if not isinstance(prompts, list) or not prompts:
        return
    if isinstance(prompts[0], int | float):
        _check_tokens(prompts, body, state)
        return
    most = state.config.max_prompts
    if len(prompts) > most:
        raise ApiError(
            400,
            f"{len(prompts)} prompts are too many; at most {most} outputs may be asked for at once "
            "(--max-prompts)",
            param="prompt",
        )
    for prompt in prompts:
        if isinstance(prompt, list):
            _check_tokens(prompt, body, state)


def _check_lists(body: dict[str, Any], state: ServerState) -> None:
    """Bound what is looked through entry by entry, or tokenized, for each request."""
    most: dict[str, int] = {"messages": MAX_MESSAGES}
    if state.phase is Phase.READY:
        vocab_size = state.engine.llm_engine.model_config.vocab_size
        most |= dict.fromkeys(("stop_token_ids", "allowed_token_ids", "logit_bias"), vocab_size)
    for name, limit in most.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise ApiError(
                400, f"{name} has {len(value)} entries; at most {limit} are allowed", param=name
            )
    words = body.get("bad_words")
    if isinstance(words, list):
        num_characters = sum(len(word) for word in words if isinstance(word, str))
        if num_characters > MAX_BAD_WORDS_CHARACTERS:
            raise ApiError(
                400,
                f"bad_words have {num_characters} characters together; at most "
                f"{MAX_BAD_WORDS_CHARACTERS} are allowed",
                param="bad_words",
            )


def _check_tokens(token_ids: list[Any], body: dict[str, Any], state: ServerState) -> None:
    if state.phase is not Phase.READY or body.get("truncate_prompt_tokens") is not None:
        return
    most = state.engine.config.model.max_model_len
    if most is not None and len(token_ids) >= most:
        with naming_fields({}), state.engine.llm_engine.counting_rejections():
            raise too_long(str(len(token_ids)), most)
