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
    TokenizerError,
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
_FLAGS = {
    'LLM(scheduling_policy="priority")': "a server with --scheduling-policy priority",
    "max_logprobs of the engine": "--max-logprobs of the server",
    "(max_model_len)": "(--max-model-len)",
    "(skip_tokenizer_init=True)": "(--skip-tokenizer-init)",
    "the argument of chat() of that name": "the field of that name",
}
"""What the engine's messages say to who writes Python, and what a client's operator can do."""
_JSON_WORDS = {
    "None": "null",
    "True": "true",
    "False": "false",
    "dictionary": "object",
    "dictionaries": "objects",
    "a ": "an ",
}
_PYTHON_WORD = re.compile(r"\b(?:(?:None|True|False|dictionary|dictionaries)\b|a (?=dictionary\b))")
_PLACE = re.compile(r'messages\[\d+\](?:\["\w+"\]|\[\d+\])*')
_KEY = re.compile(r'\["(\w+)"\]')
_FORM = re.compile(r"(structured_outputs\.[a-z_]+)((?:\.[\w$-]+|\[(?:\d+|'[^']*')\])*)(?=[: ])")
"""A form of the output at the beginning of a message, and the place in it."""
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
    if (kept := given.get("truncate_prompt_tokens")) is not None:
        given["truncate_prompt_tokens"] = _num_kept(kept, engine.config.model.max_model_len)
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


def form_names(field: str | None) -> dict[str, str]:
    """The body's names of `structured_outputs` and what is in it, for the field of a form."""
    if field is None or field == "structured_outputs":
        return {}
    names = {"structured_outputs": field}
    if field in _GUIDED:
        names[f"structured_outputs.{_GUIDED[field]}"] = field
    elif field == "response_format":
        names["structured_outputs.json"] = "response_format.json_schema.schema"
        names |= {f"structured_outputs.{name}": f"response_format.{name}" for name in _FORMATS}
    return names


def _num_kept(kept: int, context: int | None) -> int:
    """How many of a prompt's last tokens `truncate_prompt_tokens` keeps."""
    assert context is not None
    if kept == -1:
        return context - 1
    if not 1 <= kept < context:
        raise ApiError(
            400,
            f"truncate_prompt_tokens must be from 1 to {context - 1}, which is what the context of "
            f"{context} tokens holds beside an output token, or -1 for as many as that; got {kept}",
            param="truncate_prompt_tokens",
        )
    return kept


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
    except (RequestError, ConfigError, TokenizerError) as error:
        message = str(error)
        code = "context_length_exceeded" if "the context of" in message else None
        param = getattr(error, "param", None)
        if isinstance(error, TokenizerError):  # there is none
            param = prompt
        elif param is None and isinstance(error, PromptError):
            param = _part_of(message) or _other_field(message) or prompt
        elif param is None:
            param = field_of(message, names)
        raise ApiError(400, in_api_words(message, names), param=param, code=code) from error


def in_api_words(message: str, names: Mapping[str, str]) -> str:
    """A message of the engine as a client reads it: its fields, the server's flags, JSON's words.

    What it quotes of the request, behind "got", stays as it is.

    Args:
        names: the body's names of fields, by the engine's, where they differ.
    """
    if message.startswith("the chat template"):  # in whose own words it may go on
        return message
    for words, ours in _FLAGS.items():
        message = message.replace(words, ours)
    if (place := _PLACE.match(message)) is not None:
        message = _KEY.sub(r".\1", place[0]) + message[place.end() :]
    said, got, quoted = message.partition(", got ")
    for name in sorted(names, key=len, reverse=True):
        end = r"(?!\w)" if "." in name else r"(?![\w.])"  # of a schema a place in it may follow
        said = re.sub(rf"(?<![\w.]){re.escape(name)}{end}", names[name], said)
    if quoted.rstrip(".") == "None":
        quoted = quoted.replace("None", "null")
    return _PYTHON_WORD.sub(lambda match: _JSON_WORDS[match[0]], said) + got + quoted


def _part_of(message: str) -> str | None:
    """The message of a conversation, or the part of it, that an error begins with."""
    match = _PLACE.match(message)
    return None if match is None else _KEY.sub(r".\1", match[0])


def _other_field(message: str) -> str | None:
    """The field that is wrong with a prompt's request, if it is not the prompt."""
    if message.startswith("request id"):
        return "request_id"
    if message.startswith(("chat_template is", "the chat template is not")):
        return "chat_template"
    named = ("cache_salt", "priority", "chat_template_kwargs", "truncate_prompt_tokens")
    return field_of(message, {}) if message.startswith(named) else None


def field_of(message: str, names: Mapping[str, str]) -> str | None:
    """The field that a message of the engine begins with."""
    if message.startswith("unknown structured output"):
        return names.get("structured_outputs", "structured_outputs")
    match = _FORM.match(message)
    if match is not None:
        return names.get(match[1], names.get("structured_outputs", match[1])) + match[2]
    match = _FIRST_WORD.match(message)
    if match is None:
        return None
    name, dot, rest = match[0].partition(".")
    if names.get(name, name) != name:
        return names[name]
    known = name in SamplingParams.__struct_fields__ or name in ("priority", "cache_salt")
    return f"{name}{dot}{rest}" if known or name == "chat_template_kwargs" else None
