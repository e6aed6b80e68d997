"""What the bodies of several routes share.

Knows names and JSON types. Ranges are checked where the values are used: by `SamplingParams`, by
the chat template, by the tokenizer. Types are strict: a number that comes as text is refused.

Fields that no version of the API has are accepted, as OpenAI's own clients send new ones before
servers know them; fields that are known and cannot be honoured are refused by name.
"""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import WithJsonSchema

from engine.log import get_logger

logger = get_logger(__name__)

JsonObject = Annotated[dict[str, Any], WithJsonSchema({"type": "object"})]

Texts = Annotated[list[str], Field(max_length=256)]
"""Each is looked for in every step, at everybody's cost."""

REQUEST_ID_PATTERN = r"^[!-.0-~]{1,256}$"
"""Visible ASCII without a slash: ids stand in logs, in traces and in paths."""


class FieldError(ValueError):
    """A field that contradicts another, or that this server cannot honour."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.field = name


class Body(BaseModel):
    """A request's body. Unknown fields are accepted, and named in the log at debug level."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields of OpenAI's and vLLM's that have no effect here, with values that ask for nothing."""

    @model_validator(mode="after")
    def _check_extras(self) -> "Body":
        extras = self.model_extra or {}
        for name, harmless in self.REFUSED.items():
            if name in extras and extras[name] is not None and extras[name] not in harmless:
                raise FieldError(name, f"{name} is not supported here; leave it out")
        unknown = sorted(extras.keys() - self.REFUSED.keys())
        if unknown:
            logger.debug("fields without a meaning here: %s", ", ".join(unknown)[:500])
        return self


class StreamOptions(BaseModel):
    """What a stream carries besides its text."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = Field(None, description="One last chunk with the token counts.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: the counts so far in every chunk."
    )


class SamplingFields(Body):
    """How tokens are chosen and when the output ends; None leaves it to the model's defaults."""

    n: int | None = Field(None, description="Outputs for each prompt.")
    temperature: float | None = Field(None, description="0: always the most likely token.")
    top_p: float | None = Field(
        None,
        description="Only the likeliest tokens, up to this probability together; above 0, up to 1.",
    )
    top_k: int | None = Field(None, description="0 or -1: all tokens.")
    min_p: float | None = Field(
        None,
        description="Only tokens at least this likely, as a share of the most likely one; 0 to 1.",
    )
    presence_penalty: float | None = Field(
        None, description="Taken off the logits of tokens that the output has; -2 to 2."
    )
    frequency_penalty: float | None = Field(
        None, description="Taken off a token's logit for each time the output has it; -2 to 2."
    )
    repetition_penalty: float | None = Field(
        None, description="Above 1 makes tokens of prompt and output less likely; above 0."
    )
    seed: int | None = Field(None, description="Makes the output repeatable.")
    stop: str | Texts | None = Field(None, description="Text that ends the output.")
    stop_token_ids: list[int] | None = Field(None, description="Tokens that end the output.")
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the text that ended the output; default: false."
    )
    ignore_eos: bool | None = Field(
        None, description="Go on behind the model's token for the end; default: false."
    )
    min_tokens: int | None = Field(None, description="No end before so many tokens; default: 0.")
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text; default: true."
    )
    spaces_between_special_tokens: bool | None = Field(
        None, description="Spaces between them in the text; default: true."
    )
    logit_bias: dict[str, float] | None = Field(
        None, description="Added to the logits of token ids."
    )
    allowed_token_ids: list[int] | None = Field(None, description="Only these tokens.")
    bad_words: Texts | None = Field(None, description="Words that the output may not have.")
    prompt_logprobs: int | None = Field(
        None, description="How many likely tokens to report for each place of the prompt."
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        description="Keep this many last tokens of the prompt; -1: as many as the context holds.",
    )
    vllm_xargs: JsonObject | None = Field(
        None, description="`extra_args`, which the server's own logits processors read."
    )
    response_format: JsonObject | None = Field(
        None,
        description='{"type": "text" | "json_object"} or {"type": "json_schema", "json_schema": '
        '{"schema": …}}; also types regex, choice, grammar and structural_tag, whose value is '
        "under the same name.",
    )
    structured_outputs: JsonObject | None = Field(
        None, description="One of json, regex, choice, grammar, json_object, structural_tag."
    )
    guided_json: str | JsonObject | None = Field(None, json_schema_extra={"deprecated": True})
    guided_regex: str | None = Field(None, json_schema_extra={"deprecated": True})
    guided_choice: list[str] | None = Field(None, json_schema_extra={"deprecated": True})
    guided_grammar: str | None = Field(None, json_schema_extra={"deprecated": True})


class GenerationFields(SamplingFields):
    """What both kinds of completion know besides."""

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_beam_search": (False,),
        "logits_processors": ([],),
        "length_penalty": (1,),
        "truncation_side": ("left",),
        "logprob_token_ids": ([],),
        "return_token_offsets": (False,),
        "return_prompt_text": (False,),
        "thinking_token_budget": (),
        "repetition_detection": (),
        "watermarking": (False,),
        "stream_interval": (1,),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
        "routed_experts_prompt_start": (0,),
    }

    model: str | None = Field(None, description="A name of /v1/models; the only one if left out.")
    stream: bool | None = Field(None, description="Answer with events as tokens come.")
    stream_options: StreamOptions | None = None
    request_id: str | None = Field(
        None,
        pattern=REQUEST_ID_PATTERN,
        description="Part of the answer's id, with more behind it while another has the same.",
    )
    priority: int | None = Field(
        None, description="Lower is sooner; needs --scheduling-policy priority."
    )
    cache_salt: str | None = Field(
        None, min_length=1, description="Cached prefixes are shared only under one salt."
    )
    return_token_ids: bool | None = Field(None, description="Answer with token ids, too.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Name tokens of logprobs "token_id:N".'
    )
    user: str | None = Field(None, description="Not used.")

    @property
    def include_usage(self) -> bool:
        """Whether the stream's last chunk has the token counts."""
        options = self.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has them."""
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options needs stream=true")
        if self.continuous_usage and not self.include_usage:
            raise FieldError("stream_options", "continuous_usage_stats needs include_usage=true")
        return self


class TemplateFields(BaseModel):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool | None = Field(
        None,
        description="End with the beginning of an assistant's message; default: unless "
        "continue_final_message is set.",
    )
    continue_final_message: bool | None = Field(None, description="Go on with the last message.")
    add_special_tokens: bool | None = Field(
        None, description="Special tokens besides the template's own; default: none."
    )
    chat_template: str | None = Field(
        None,
        description="Name of a template of the model's; a text needs a server with "
        "--trust-request-chat-template.",
    )
    chat_template_kwargs: JsonObject | None = Field(
        None, description="Further variables of the template, such as enable_thinking."
    )
    documents: list[dict[str, str]] | None = Field(
        None, description="A variable of the chat template: what is to be answered from."
    )
    tools: list[JsonObject] | None = Field(None, description="Functions that may be called.")


class PromptTokensDetails(BaseModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int = Field(description="Found in the prefix cache.")


class UsageInfo(BaseModel):
    """Tokens that a request has cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """An answer that is an error."""

    error: ErrorBody


_ERRORS = {
    400: "The request is wrong; param names the field.",
    401: "No valid key.",
    404: "The model is not served here.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "Too many requests are waiting.",
    500: "The server failed.",
    503: "The engine is starting, stopping, or dead.",
}


def answers(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """What a route may answer, for the description of the API."""
    found: dict[int | str, dict[str, Any]] = {200: {"model": model}}
    for status, description in _ERRORS.items():
        found[status] = {"model": ErrorResponse, "description": description}
    found["default"] = {"model": ErrorResponse, "description": "Another error, in this form."}
    return found
