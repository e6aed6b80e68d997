"""`/v1/completions`: its body and its answers."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator
from pydantic.json_schema import WithJsonSchema

from engine.server.openai.protocol.common import FieldError, GenerationFields, UsageInfo

_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "title": "Prompt",
    "description": "Text, token ids, or a list of either.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ],
}


def _check_prompt(value: Any) -> Any:
    """One of the four forms; whether the token ids exist is for the engine to say."""
    allowed = "must be text, a list of token ids, or a list of one of these"
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(allowed)
    if not value:
        raise ValueError(f"{allowed}; the list is empty")
    if all(isinstance(item, str) for item in value) or _are_integers(value):
        return value
    if all(isinstance(item, list) and _are_integers(item) for item in value):
        return value
    raise ValueError(allowed)


def _are_integers(values: list[Any]) -> bool:
    """Whether there is nothing else, booleans included; the event loop waits for the answer."""
    return set(map(type, values)) <= {int}


PromptField = Annotated[Any, AfterValidator(_check_prompt), WithJsonSchema(_PROMPT_SCHEMA)]


class CompletionRequest(GenerationFields):
    """Text to go on with."""

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = GenerationFields.REFUSED | {
        "suffix": ("",),
        "prompt_embeds": ([],),
    }

    prompt: PromptField
    max_tokens: int | None = Field(
        None,
        description="16 if left out; 0 only with echo. What the context cannot hold behind the "
        "prompt is cut.",
    )
    echo: bool | None = Field(None, description="Put the prompt in front of the text.")
    logprobs: int | None = Field(None, description="Most likely tokens to report.")
    best_of: int | None = Field(None, description="Must be n: candidates are not ranked here.")
    add_special_tokens: bool | None = Field(
        None, description="Let the tokenizer put its begin token in front of a text (default)."
    )

    @model_validator(mode="before")
    @classmethod
    def _check_route(cls, value: Any) -> Any:
        if isinstance(value, dict) and "messages" in value and "prompt" not in value:
            raise FieldError(
                "messages", "this route takes a prompt; messages go to /v1/chat/completions"
            )
        return value

    @model_validator(mode="after")
    def _check_best_of(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise FieldError("best_of", f"best_of must be equal to n={self.n or 1}, or be left out")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, always as a list."""
        value = self.prompt
        if isinstance(value, str) or isinstance(value[0], int):
            return [value]
        return list(value)


class CompletionLogprobs(BaseModel):
    """One entry a token, in parallel lists."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One output."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = Field(description="The stop text or token that was hit.")
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionResponse(BaseModel):
    """The outputs of all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo


class CompletionChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None
