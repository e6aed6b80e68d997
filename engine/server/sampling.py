"""From a body's fields to `SamplingParams`, and from what is wrong with them to the field's name.

Knows where the names of the API and of the engine differ. Does not know ranges.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from engine.api.async_llm import AsyncLLM
from engine.errors import (
    ConfigError,
    PromptError,
    QueueFullError,
    RequestError,
    SamplingParamsError,
)
from engine.server.errors import ApiError
from engine.server.protocol.common import SamplingFields
from engine.types.sampling import RequestOutputKind, SamplingParams

SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "truncate_prompt_tokens",
)
"""Fields that bodies and `SamplingParams` share, name and meaning."""

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_FORMATS = ("regex", "choice", "grammar", "structural_tag")
_PLACE = re.compile(r'messages\[\d+\](?:\["\w+"\]|\[\d+\])*')
_KEY = re.compile(r'\["(\w+)"\]')
_FIRST_WORD = re.compile(r"[a-z_]+(?:\.[a-z_]+)?")


def make_params(
    body: SamplingFields,
    engine: AsyncLLM,
    *,
    max_tokens: int | None,
    stream: bool,
    names: Mapping[str, str],
    **values: Any,
) -> SamplingParams:
    """The parameters of a request: the body's over the model's own.

    Args:
        body: what was sent.
        engine: knows the model's defaults and its context.
        max_tokens: as it is to be; None for the rest of the context.
        stream: deltas as they come, or everything at the end.
        names: the body's names of fields, by the engine's, where they differ.
        values: further parameters.

    Raises:
        ApiError: 400 with the field's name.
    """
    given = {name: getattr(body, name) for name in SAME_NAME}
    given = {name: value for name, value in given.items() if value is not None} | values
    if given.get("truncate_prompt_tokens") == -1:
        context = engine.config.model.max_model_len
        assert context is not None
        given["truncate_prompt_tokens"] = context - 1
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    with naming_fields(names):
        return engine.get_default_sampling_params().clone(
            **given, max_tokens=max_tokens, output_kind=kind
        )


def wanted_form(body: SamplingFields) -> tuple[str | None, dict[str, Any] | None]:
    """The field that says which form the output must have, and that as `structured_outputs`.

    Raises:
        ApiError: 400, several fields say it, or one says nothing that is known.
    """
    found: dict[str, dict[str, Any]] = {}
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs
    for name, key in _GUIDED.items():
        if (value := getattr(body, name)) is not None:
            found[name] = {key: value}
    if body.response_format is not None:
        form = _response_format(body.response_format)
        if form is not None:
            found["response_format"] = form
    if len(found) > 1:
        first, second, *_ = found
        raise ApiError(400, f"give one of {first} and {second}, not both", param=second)
    return next(iter(found.items()), (None, None))


def _response_format(value: dict[str, Any]) -> dict[str, Any] | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        wrapped = value.get("json_schema")
        if not isinstance(wrapped, dict) or not isinstance(wrapped.get("schema"), dict):
            raise ApiError(
                400,
                'response_format needs {"type": "json_schema", "json_schema": {"schema": {…}}}',
                param="response_format.json_schema",
            )
        return {"json": wrapped["schema"]}
    if kind in _FORMATS:
        wanted = {name: item for name, item in value.items() if name != "type"}
        if kind == "structural_tag" and "structural_tag" not in wanted:
            wanted = {"structural_tag": value}
        if set(wanted) != {kind}:
            raise ApiError(
                400,
                f'response_format of type {kind} needs "{kind}" and nothing else',
                param=f"response_format.{kind}",
            )
        return wanted
    raise ApiError(
        400,
        "response_format.type must be text, json_object, json_schema, "
        f"{', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}",
        param="response_format.type",
    )


@contextmanager
def naming_fields(names: Mapping[str, str], *, prompt: str = "prompt") -> Iterator[None]:
    """Answer the engine's errors about a request with 400 and the name of the field.

    Args:
        names: the body's names of fields, by the engine's, where they differ.
        prompt: the body's name of what the prompt is made of.
    """
    try:
        yield
    except QueueFullError:
        raise
    except SamplingParamsError as error:
        message = str(error)
        raise ApiError(400, message, param=field_of(message, names)) from error
    except PromptError as error:
        message = str(error)
        if message.startswith("request id"):
            raise ApiError(400, message, param="request_id") from error
        if message.startswith(("cache_salt", "priority", "chat_template_kwargs")):
            raise ApiError(400, message, param=field_of(message, names)) from error
        if message.startswith(("chat_template is", "the chat template is not")):
            raise ApiError(400, message, param="chat_template") from error
        code = "context_length_exceeded" if "the context of" in message else None
        raise ApiError(400, message, param=_part_of(message) or prompt, code=code) from error
    except RequestError as error:
        param = getattr(error, "param", None) or field_of(str(error), names)
        raise ApiError(400, str(error), param=param) from error
    except ConfigError as error:
        raise ApiError(400, str(error), param=field_of(str(error), names)) from error


def _part_of(message: str) -> str | None:
    """The message of a conversation, or the part of it, that an error begins with."""
    match = _PLACE.match(message)
    return None if match is None else _KEY.sub(r".\1", match[0])


def field_of(message: str, names: Mapping[str, str]) -> str | None:
    """The field that a message of the engine begins with."""
    if message.startswith("unknown structured output"):
        return names.get("structured_outputs", "structured_outputs")
    match = _FIRST_WORD.match(message)
    if match is None:
        return None
    name, dot, rest = match[0].partition(".")
    if names.get(name, name) != name:
        return names[name]
    known = name in SamplingParams.__struct_fields__ or name in ("priority", "cache_salt")
    return f"{name}{dot}{rest}" if known or name == "chat_template_kwargs" else None
