"""`/v1/chat/completions`: its body and its answers."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator
from pydantic.json_schema import WithJsonSchema

from engine.server.openai.protocol.common import (
    FieldError,
    GenerationFields,
    JsonObject,
    TemplateFields,
    UsageInfo,
)

MESSAGES_SCHEMA = {
    "title": "Messages",
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "minLength": 1},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "anyOf": [
                                {
                                    "type": "object",
                                    "required": ["type", kind],
                                    "properties": {
                                        "type": {"const": kind},
                                        kind: {"type": "string"},
                                    },
                                }
                                for kind in ("text", "refusal")
                            ]
                        },
                    },
                    {"type": "null"},
                ]
            },
            "name": {"type": "string"},
            "tool_call_id": {"type": "string"},
            "tool_calls": {"type": "array", "items": {"type": "object"}},
            "reasoning_content": {"type": ["string", "null"]},
            "reasoning": {"type": ["string", "null"]},
        },
    },
}


def check_message_list(value: Any) -> Any:
    """A list of objects; what is in them is for the chat template to say."""
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of at least one message")
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"message {index} must be an object with role and content")
    return value


MessagesField = Annotated[Any, AfterValidator(check_message_list), WithJsonSchema(MESSAGES_SCHEMA)]


class ChatCompletionRequest(GenerationFields, TemplateFields):
    """A conversation to go on with."""

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = GenerationFields.REFUSED | {
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"], []),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "verbosity": ("medium",),
        "mm_processor_kwargs": ({},),
        "best_of": (1,),
    }

    messages: MessagesField
    max_completion_tokens: int | None = Field(
        None,
        description="Most tokens to make; the rest of the context if left out. What the context "
        "cannot hold behind the prompt is cut.",
    )
    max_tokens: int | None = Field(None, json_schema_extra={"deprecated": True})
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="Needs logprobs=true.")
    tool_choice: str | JsonObject | None = Field(
        None, description='"none", "auto", "required" or {"type": "function", "function": …}.'
    )
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description="A variable of the chat template.")
    include_reasoning: bool | None = Field(None, description="Answer with the reasoning, too.")
    echo: bool | None = Field(
        None, description="Put the last message, which is the assistant's, in front of the answer."
    )

    @model_validator(mode="before")
    @classmethod
    def _check_route(cls, value: Any) -> Any:
        if isinstance(value, dict) and "prompt" in value and "messages" not in value:
            raise FieldError(
                "prompt", "this route takes messages; a prompt goes to /v1/completions"
            )
        return value

    @model_validator(mode="after")
    def _check_together(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and self.top_logprobs != 0 and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs=true")
        limits = {self.max_completion_tokens, self.max_tokens} - {None}
        if len(limits) > 1:
            raise FieldError(
                "max_tokens", "max_tokens and max_completion_tokens differ; give one of them"
            )
        last = self.messages[-1]
        if self.echo and not (last.get("role") == "assistant" and last.get("content")):
            raise FieldError("echo", "echo needs a last message of the assistant's, with content")
        if self.echo and not isinstance(last["content"], str):
            raise FieldError("echo", "echo needs a last message whose content is text, no parts")
        return self


class TopLogprob(BaseModel):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that was chosen."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry a token."""

    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None = None


class ChatMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(BaseModel):
    """One output."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = Field(description="The stop text or token that was hit.")
    token_ids: list[int] | None = None


class ChatCompletionResponse(BaseModel):
    """All outputs."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(BaseModel):
    """What is new of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChunkChoice(BaseModel):
    """What is new of one output."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
