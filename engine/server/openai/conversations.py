"""From a conversation to the model's prompt.

Knows which fields of a body say how it is rendered. Shared by chats and `/tokenize`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import Request

from engine.server.openai.protocol.common import TemplateFields
from engine.server.openai.tools.plan import ChatFormats, ChatPlan
from engine.server.state import server_of


class Conversation(NamedTuple):
    """A conversation whose template has been chosen."""

    body: TemplateFields
    messages: Sequence[Mapping[str, Any]]
    request: Request
    template: str | None
    formats: ChatFormats

    @classmethod
    def of(
        cls,
        body: TemplateFields,
        messages: Sequence[Mapping[str, Any]],
        request: Request,
    ) -> "Conversation":
        """Choose the template.

        Raises:
            ApiError: 400, the client may not bring one.
        """
        server = server_of(request)
        tokenizer = server.engine.get_tokenizer()
        template, formats = server.chat_templates.choose(
            body.chat_template, tokenizer, has_tools=bool(body.tools)
        )
        return cls(body, messages, request, template, formats)

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables of the template that the body brings."""
        variables = dict(self.body.chat_template_kwargs or {})
        if self.body.documents is not None:
            variables.setdefault("documents", self.body.documents)
        return variables

    async def render(self, plan: ChatPlan) -> dict[str, Any]:
        """The prompt's text, and whether special tokens are to be put around it.

        Raises:
            PromptError: the messages do not fit the template, or there is none.
        """
        body = self.body
        continues = bool(body.continue_final_message)
        begins = body.add_generation_prompt
        prompt = await server_of(self.request).engine.render_chat(
            plan.messages,
            add_generation_prompt=not continues if begins is None else begins,
            continue_final_message=continues,
            tools=plan.tools,
            chat_template=self.template,
            chat_template_kwargs=plan.chat_template_kwargs,
        )
        assert isinstance(prompt, dict)
        if body.add_special_tokens:  # besides those that the template has written
            return {"prompt": prompt["prompt"]}
        return prompt
