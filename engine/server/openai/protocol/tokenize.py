"""`/tokenize` and `/detokenize`: their bodies and answers."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator
from pydantic.json_schema import WithJsonSchema

from engine.server.openai.protocol.chat import MESSAGES_SCHEMA, check_message_list
from engine.server.openai.protocol.common import Body, FieldError, TemplateFields

OptionalMessages = Annotated[
    Any,
    AfterValidator(lambda value: None if value is None else check_message_list(value)),
    WithJsonSchema(MESSAGES_SCHEMA),
]


class TokenizeRequest(Body, TemplateFields):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: OptionalMessages = None
    add_special_tokens: bool | None = Field(
        None, description="Let the tokenizer add its own; default: to a text, yes."
    )
    return_token_strs: bool | None = Field(None, description="Answer with the tokens' spelling.")

    @model_validator(mode="after")
    def _check_kind(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "give either prompt or messages")
        if self.prompt is not None:
            for name in TemplateFields.model_fields.keys() - {"add_special_tokens"}:
                if getattr(self, name) not in (None, False, [], {}):
                    raise FieldError(name, f"{name} belongs to messages; a prompt is not rendered")
        return self


class TokenizeResponse(BaseModel):
    """The tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(BaseModel):
    """The text; special tokens are in it."""

    prompt: str


class TokenizerInfo(BaseModel):
    """What a client needs to tokenize here as if it had the tokenizer."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    vocab_size: int
    max_model_len: int
