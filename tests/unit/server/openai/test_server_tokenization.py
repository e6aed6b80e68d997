"""`/tokenize`: whatever grows with what a client sends is done beside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tokenizers
from fastapi import FastAPI
from tokenizers import models, pre_tokenizers

from engine.api.async_llm import AsyncLLM
from engine.api.chat import chat_prompt
from engine.server.config import ServerConfig
from engine.server.http.errors import add_error_handlers
from engine.server.http.served import Phase
from engine.server.openai import tokenization
from engine.server.state import ServerState
from engine.text.tokenizer import LONG_TEXT, Tokenizer

TEMPLATE = "{{ tools | length if tools else '' }} {{ messages[0].content }}"


class Watched(Tokenizer):
    """One token a word; remembers which threads looked up how a token is spelled."""

    def __init__(self) -> None:
        vocabulary = {"[UNK]": 0, "word": 1, "other": 2}
        backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        super().__init__(
            backend, special_tokens={}, chat_templates={"default": TEMPLATE}, source="test"
        )
        self.threads: list[threading.Thread] = []

    def id_to_token(self, token_id: int) -> str:
        self.threads.append(threading.current_thread())
        return super().id_to_token(token_id)


class FakeEngine:
    """As much of an `AsyncLLM` as the route asks."""

    model_name = "tiny"
    attachment = None
    config = SimpleNamespace(
        model=SimpleNamespace(max_model_len=100), scheduler=SimpleNamespace(max_num_seqs=1)
    )
    llm_engine = SimpleNamespace(model_config=SimpleNamespace(vocab_size=3))
    with_texts = AsyncLLM.with_texts
    _off_loop = staticmethod(asyncio.to_thread)

    def __init__(self) -> None:
        self.tokenizer = Watched()

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    async def render_chat(
        self, messages: Any, *, chat_template_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        return chat_prompt(self.tokenizer, messages, **options, **(chat_template_kwargs or {}))


def tokenize(body: dict[str, Any]) -> tuple[dict[str, Any], list[threading.Thread]]:
    """The answer, and the threads that spelled its tokens."""
    engine = FakeEngine()
    state = ServerState(engine, ServerConfig())  # type: ignore[arg-type]
    state.phase = Phase.READY
    app = FastAPI()
    app.state.server = state
    add_error_handlers(app)
    app.include_router(tokenization.router)

    async def ask() -> Any:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.post("/tokenize", json=body)).raise_for_status().json()

    return asyncio.run(ask()), engine.tokenizer.threads


@pytest.mark.parametrize("num_words", [3, LONG_TEXT])
def test_a_long_texts_tokens_are_spelled_beside_the_loop(num_words: int) -> None:
    text = " ".join(["word", "other", "none"] * num_words)[: 5 * num_words]
    answer, threads = tokenize({"prompt": text, "return_token_strs": True})
    words = text.split()
    expected = [{"word": 1, "other": 2}.get(word, 0) for word in words]
    assert (answer["count"], answer["max_model_len"]) == (len(words), 100)
    assert answer["tokens"] == expected
    assert answer["token_strs"] == [("[UNK]", "word", "other")[one] for one in expected]
    assert len(threads) == len(words)
    is_long = len(text) > LONG_TEXT
    assert {thread is threading.main_thread() for thread in threads} == {not is_long}
    assert "token_strs" not in tokenize({"prompt": text})[0]


@pytest.mark.parametrize("num_tools", [1, 100])
def test_a_conversation_of_many_tools_is_planned_beside_the_loop(
    num_tools: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan: Callable[..., Any] = tokenization.plan_chat
    threads = []

    def watched(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return plan(*arguments, **options)

    monkeypatch.setattr(tokenization, "plan_chat", watched)
    tools = [
        {"type": "function", "function": {"name": f"look{index}"}} for index in range(num_tools)
    ]
    answer, _ = tokenize({"messages": [{"role": "user", "content": "word"}], "tools": tools})
    assert answer["tokens"] == [0, 1], "how many tools there are, and the word"
    (thread,) = threads
    assert (thread is threading.main_thread()) == (num_tools == 1)
