"""Which chat template a request gets, and what forms of calls and reasoning go with it.

Knows the server's own choice and what a client may choose. A template that a client sends is a
program: it is run in a sandbox, but nothing bounds its time, so that it needs the operator's leave.
"""

from pathlib import Path

from engine.errors import ConfigError, PromptError
from engine.server.config import ServerConfig
from engine.server.http.errors import ApiError
from engine.server.openai.tools.plan import ChatFormats
from engine.text.chat_template import check_template
from engine.text.tokenizer import Tokenizer


class ChatTemplates:
    """The templates of one server.

    Raises:
        ConfigError: the template's file cannot be read, or there is no parser of the given name.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._served = load_chat_template(config)
        self._formats: dict[str | None, ChatFormats] = {}
        self._resolve(self._served, ())

    def choose(
        self, wanted: str | None, tokenizer: Tokenizer, *, has_tools: bool
    ) -> tuple[str | None, ChatFormats]:
        """A request's template, None if the model has none, and its formats.

        Args:
            wanted: what the request asks for: a name of one of the model's templates, or a text.
            tokenizer: knows the model's templates.
            has_tools: some models have a template of their own for conversations with tools.

        Raises:
            ApiError: 400, the client may not bring a template.
        """
        of_model = tokenizer.chat_templates
        if wanted is None:
            template = self._served
            if template is None and has_tools:
                template = of_model.get("tool_use")
            template = template or tokenizer.chat_template
        elif wanted in of_model:
            template = of_model[wanted]
        elif self._config.trust_request_chat_template:
            return wanted, self._resolve(wanted, _special_tokens(tokenizer))
        else:
            names = ", ".join(sorted(of_model)) or "none"
            raise ApiError(
                400,
                "chat_template must be the name of a template of the model's "
                f"({names}); others need a server with --trust-request-chat-template",
                param="chat_template",
            )
        formats = self._formats.get(template)
        if formats is None:  # of the server or the model: there are few
            formats = self._resolve(template, _special_tokens(tokenizer))
            self._formats[template] = formats
        return template, formats

    def _resolve(self, template: str | None, special_tokens: tuple[str, ...]) -> ChatFormats:
        return ChatFormats.resolve(
            template or "",
            special_tokens,
            tool_call_parser=self._config.tool_call_parser,
            reasoning_parser=self._config.reasoning_parser,
        )


def load_chat_template(config: ServerConfig) -> str | None:
    """The template in place of the model's; None for the model's own.

    Raises:
        ConfigError: the file cannot be read, or what it has is no template.
    """
    given = config.chat_template
    if given is None:
        return None
    try:
        template = given if "{" in given else Path(given).read_text(encoding="utf-8")
        check_template(template)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: cannot read {given}: {error}") from error
    except PromptError as error:
        raise ConfigError(f"chat_template: {error}") from error
    return template


def _special_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    return tuple(tokenizer.id_to_token(token_id) for token_id in tokenizer.special_ids)
