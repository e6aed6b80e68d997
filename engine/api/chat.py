"""Conversations as prompts.

Knows what may be handed to a chat template, and by which argument.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from engine.errors import PromptError
from engine.frontend.input_processor import Prompt
from engine.text.tokenizer import Tokenizer
from engine.types.sampling_checks import short

Messages = Sequence[Mapping[str, Any]]

_TEMPLATE_ARGUMENTS = frozenset(
    (
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "chat_template",
        "tokenize",
        "tokenizer",
        "self",
    )
)
"""Names that the template gets, or its renderer takes, from elsewhere."""


def chat_prompt(tokenizer: Tokenizer, messages: Messages, /, **options: Any) -> Prompt:
    """A conversation as a prompt of the engine; `options` as in `Tokenizer.apply_chat_template`.

    Raises:
        PromptError: the messages do not fit the template, or there is none.
    """
    text = tokenizer.apply_chat_template(messages, **options)
    assert isinstance(text, str)  # nobody asked for token ids
    # The template has written the special tokens already.
    return {"prompt": text, "add_special_tokens": False}


def template_variables(variables: Any) -> dict[str, Any]:
    """What a caller adds to the chat template's variables.

    Raises:
        PromptError: not a dictionary by name, or a name that has a meaning of its own.
    """
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise PromptError(
            f"chat_template_kwargs must be a dictionary with string keys, got {short(variables)}",
            param="chat_template_kwargs",
        )
    if taken := sorted(_TEMPLATE_ARGUMENTS & set(variables)):
        raise PromptError(
            f"chat_template_kwargs must not hold {', '.join(taken)}: give the argument of chat() "
            "of that name, if there is one.",
            param="chat_template_kwargs",
        )
    return dict(variables)


def conversations_of(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """One conversation, or several, as a list of them.

    Raises:
        PromptError: neither.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise PromptError("messages must be a list of {'role': …, 'content': …} with entries")
    if isinstance(messages[0], Mapping):
        return [cast(Messages, messages)]
    return list(cast(Sequence[Messages], messages))
