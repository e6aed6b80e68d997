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
from engine.server.http.errors import ApiError
from engine.server.openai.protocol.common import SamplingFields
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
_EXAMPLES = {
    "regex": '"[0-9]{4}"',
    "choice": '["yes", "no"]',
    "grammar": r'"root ::= \"yes\" | \"no\""',
    "structural_tag": "{…}",
}
_FORMATS = tuple(_EXAMPLES)
_FLAGS = {
    'LLM(scheduling_policy="priority")': "a server with --scheduling-policy priority",
    "max_logprobs of the engine": "--max-logprobs of the server",
    "(max_model_len)": "(--max-model-len)",
    "(skip_tokenizer_init=True)": "(--skip-tokenizer-init)",
    "the argument of chat() of that name": "the field of that name",
}
"""What the engine's messages say to who writes Python, and what a client's operator can do."""
_JSON_WORDS = {
    "None or ": "null or ",
    "None, ": "null, ",
    "True or False": "true or false",
    "a dictionary": "an object",
}


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
    given = {name: getattr(body, name) for name in SAME_NAME} | {"extra_args": body.vllm_xargs}
    given = {name: value for name, value in given.items() if value is not None} | values
    if (kept := given.get("truncate_prompt_tokens")) is not None:
        given["truncate_prompt_tokens"] = _num_kept(kept, _context(engine))
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    with naming_fields(names):
        return engine.get_default_sampling_params().clone(
            **given, max_tokens=max_tokens, output_kind=kind
        )


def check_max_tokens(engine: AsyncLLM, max_tokens: int | None, *, name: str = "max_tokens") -> None:
    """Refuse more output tokens than the context holds without a prompt; others are cut to fit.

    Args:
        name: the body's.

    Raises:
        ApiError: 400.
    """
    context = _context(engine)
    if max_tokens is not None and max_tokens > context:
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens, and {name}={max_tokens} "
            "asks for more. Ask for fewer; what does not fit behind the prompt is cut.",
            param=name,
            code="context_length_exceeded",
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


def _context(engine: AsyncLLM) -> int:
    context = engine.config.model.max_model_len
    assert context is not None  # the engine runs
    return context


def _num_kept(kept: int, context: int) -> int:
    """How many of a prompt's last tokens `truncate_prompt_tokens` keeps."""
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
                f'response_format of type {kind} needs "{kind}" and nothing else, such as '
                f'{{"type": "{kind}", "{kind}": {_EXAMPLES[kind]}}}',
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
        message, param = str(error), getattr(error, "param", None)
        if param is not None:
            message, param = in_api_words(message, names), _renamed(param, names)
        else:  # it may go on in the words of a chat template or a logits processor
            message = _with_flags(message)
            param = prompt if isinstance(error, PromptError | TokenizerError) else None
        raise ApiError(400, message, param=param, code=getattr(error, "code", None)) from error


def in_api_words(message: str, names: Mapping[str, str]) -> str:
    """A message of the engine as a client reads it: its fields, the server's flags, JSON's words.

    What it quotes of the request, behind "got", stays as it is.

    Args:
        names: the body's names of fields, by the engine's, where they differ.
    """
    said, got, quoted = message.partition(", got ")
    said = _renamed(said, names)
    for words, ours in _JSON_WORDS.items():
        said = said.replace(words, ours)
    if quoted.rstrip(".") == "None":
        quoted = quoted.replace("None", "null")
    return _with_flags(said + got + quoted)


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """A text with the body's names of fields."""
    for name in sorted(names, key=len, reverse=True):
        end = r"(?!\w)" if "." in name else r"(?![\w.])"  # of a schema a place in it may follow
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}{end}", names[name], text)
    return text


def _with_flags(message: str) -> str:
    for words, ours in _FLAGS.items():
        message = message.replace(words, ours)
    return message
